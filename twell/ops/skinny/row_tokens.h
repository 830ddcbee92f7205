// SPDX-License-Identifier: Apache-2.0
// How many tokens the kernels of layer_ops.h take at once: their rows stay in shared memory beside
// a ring buffer of weights. Plain arithmetic, which the choice of kernels uses without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace twell::layer_ops {

inline constexpr int64_t kMaxTokens = 8;

inline constexpr int64_t kRingBytes = 5 * 2 * 256 * 16;  // blocks, rows, threads, bytes
inline constexpr int64_t kOtherBytes = 16 * 1024;        // static shared memory, and the driver's

// Bytes between rows of bf16 in shared memory: 64 more than a multiple of 128, so that lanes that
// read 64 bytes each of neighbouring rows read different banks.
constexpr int64_t row_bytes(int64_t columns) { return (columns * 2 + 127) / 128 * 128 + 64; }

// shared_memory: bytes that a CTA of the device may have.
constexpr int64_t row_tokens(int64_t shared_memory, int64_t width) {
  return std::clamp<int64_t>((shared_memory - kRingBytes - kOtherBytes) / row_bytes(width), 0,
                             kMaxTokens);
}

}  // namespace twell::layer_ops
