// SPDX-License-Identifier: Apache-2.0
// Stands in for the header that kernel-builder generates, in builds of this repository's own CMake.
#pragma once

#include <Python.h>

#define TWELL_MODULE_INIT(name) PyInit_##name
#define TWELL_MODULE_NAME(name) #name

// Defines an empty Python module, whose import loads the library and with it the ops.
#define REGISTER_EXTENSION(name)                          \
  PyMODINIT_FUNC TWELL_MODULE_INIT(name)(void);           \
  PyMODINIT_FUNC TWELL_MODULE_INIT(name)(void) {          \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT,   \
                                 TWELL_MODULE_NAME(name), \
                                 nullptr,                 \
                                 -1,                      \
                                 nullptr,                 \
                                 nullptr,                 \
                                 nullptr,                 \
                                 nullptr,                 \
                                 nullptr};                \
    return PyModule_Create(&module);                      \
  }
