// SPDX-License-Identifier: Apache-2.0
// Marks small functions that host code and CUDA kernels share; empty without CUDA.
#pragma once

#ifdef __CUDACC__
#define TWELL_HOST_DEVICE __host__ __device__
#else
#define TWELL_HOST_DEVICE
#endif
