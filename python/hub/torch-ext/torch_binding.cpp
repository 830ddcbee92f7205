// SPDX-License-Identifier: Apache-2.0
// Makes the library of the ops importable as a Python module. The ops register themselves
// (python/csrc). kernel-builder supplies the header and the name.
#include "registration.h"

#define TWELL_REGISTER(name) REGISTER_EXTENSION(name)
TWELL_REGISTER(TORCH_EXTENSION_NAME)
