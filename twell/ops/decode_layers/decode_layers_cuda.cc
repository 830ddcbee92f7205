// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/decode_layers/decode_layers_cuda.h"

namespace twell {

DecodeLayersWorkspace::DecodeLayersWorkspace(CudaContext& ctx, const Shape& shape)
    : tokens_(shape.tokens),
      segments_((shape.max_length + kDecodeSegment - 1) / kDecodeSegment),
      x_(shape.tokens * shape.width),
      qkv_(shape.tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim / 2),
      attended_(shape.tokens * shape.heads * shape.head_dim / 2),
      segment_values_(shape.tokens * shape.heads * segments_ * shape.head_dim),
      segment_sums_(shape.tokens * shape.heads * segments_ * 2),
      tagged_parts_(ctx.multiprocessors() * shape.width),
      parts_(ctx.multiprocessors() * shape.tokens * shape.width),
      state_(4) {
  // No word has a tag yet.
  const auto clear = [&](auto& buffer) {
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(buffer.data(), 0, static_cast<size_t>(buffer.bytes()), ctx.stream()));
  };
  clear(x_);
  clear(qkv_);
  clear(attended_);
  clear(segment_values_);
  clear(segment_sums_);
  clear(tagged_parts_);
  clear(state_);
}

DecodeWorkspace DecodeLayersWorkspace::get() const {
  return {.x = x_.data(),
          .qkv = qkv_.data(),
          .attended = attended_.data(),
          .segment_values = segment_values_.data(),
          .segment_sums = segment_sums_.data(),
          .segments = static_cast<int>(segments_),
          .tagged_parts = tagged_parts_.data(),
          .parts = parts_.data(),
          .state = state_.data()};
}

}  // namespace twell
