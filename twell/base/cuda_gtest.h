// SPDX-License-Identifier: Apache-2.0
// Start of GPU tests: they skip, with the reason, if no GPU can run them. Where the environment
// variable TWELL_REQUIRE_GPUS says how many GPUs there must be, they fail instead, so that a
// machine that was meant to run them cannot pass by leaving them out (dev/gpu).
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "twell/base/cuda_testing.h"
#include "twell/base/gpu_code.h"

namespace twell {

inline int required_gpus() {
  const char* const value = std::getenv("TWELL_REQUIRE_GPUS");
  return value == nullptr ? 0 : std::atoi(value);
}

}  // namespace twell

// Skips what needs so many GPUs, or fails where they must be there. Ends the calling function.
#define TWELL_SKIP_OF_GPUS(gpus, why)                                           \
  if (::twell::required_gpus() >= (gpus)) {                                     \
    FAIL() << (why) << ", but TWELL_REQUIRE_GPUS=" << ::twell::required_gpus(); \
  }                                                                             \
  GTEST_SKIP() << (why)

// Use in SetUp, or in a test that needs no stream of its own.
#define TWELL_SKIP_WITHOUT_GPU()                                           \
  if (const std::string why = ::twell::cuda_unavailable(); !why.empty()) { \
    TWELL_SKIP_OF_GPUS(1, why);                                            \
  }

// Defines a CudaStream `stream` and a CudaContext `ctx` on it.
#define TWELL_GPU_TEST()            \
  TWELL_SKIP_WITHOUT_GPU();         \
  const ::twell::CudaStream stream; \
  ::twell::CudaContext ctx(stream.get())

// The same for kernels of compute capability 9.0, which a portable build does not have.
#define TWELL_HOPPER_TEST()                                            \
  if (::twell::kPortableBuild) GTEST_SKIP() << "a portable build";     \
  TWELL_GPU_TEST();                                                    \
  if (ctx.compute_capability() != 90) {                                \
    TWELL_SKIP_OF_GPUS(1, ctx.device_name() + " is not a Hopper GPU"); \
  }
