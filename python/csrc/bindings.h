// SPDX-License-Identifier: Apache-2.0
// What the parts of the module twell._engine share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace twell::python {

// The device of "auto", "cpu", "cuda" or "cuda:N"; -1: the CPU. InputError where there is none.
int device_index(const std::string& name);

// TrainingRun and tokenize(), see training.cc.
void bind_training(nanobind::module_& m);

}  // namespace twell::python
