// SPDX-License-Identifier: Apache-2.0
// Start of GPU tests: they skip, with the reason, if no GPU can run them.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "twell/base/cuda_testing.h"

// Use in SetUp, or in a test that needs no stream of its own.
#define TWELL_SKIP_WITHOUT_GPU() \
  if (const std::string why = ::twell::cuda_unavailable(); !why.empty()) GTEST_SKIP() << why

// Defines a CudaStream `stream` and a CudaContext `ctx` on it.
#define TWELL_GPU_TEST()            \
  TWELL_SKIP_WITHOUT_GPU();         \
  const ::twell::CudaStream stream; \
  ::twell::CudaContext ctx(stream.get())

// The same for kernels of compute capability 9.0.
#define TWELL_HOPPER_TEST() \
  TWELL_GPU_TEST();         \
  if (ctx.compute_capability() != 90) GTEST_SKIP() << ctx.device_name() << " is not a Hopper GPU"
