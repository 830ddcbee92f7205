// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding, Hugging Face Llama convention: within a head of size hd the pair is
// (i, i + hd/2) and rotates by position * theta^(-2i/hd).
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

// cos and sin [max_positions, hd/2], computed in double.
struct RopeTable {
  RopeTable(int64_t max_positions, int64_t head_dim, double theta);
  // The same for given angles per position [hd/2], with a factor on cos and sin.
  RopeTable(int64_t max_positions, std::span<const double> radians, double scale);
  int64_t max_positions;
  int64_t head_dim;
  Buffer<float> cos;
  Buffer<float> sin;
};

// In place on x [M, heads * hd]; positions [M] in [0, max_positions), else Error.
// inverse rotates back: the backward pass of the forward rotation.
void rope(Context& ctx, const RopeTable& table, std::span<const int32_t> positions, MatrixF x,
          bool inverse = false);

}  // namespace twell
