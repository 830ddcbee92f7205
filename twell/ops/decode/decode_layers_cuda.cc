// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/decode/decode_layers_cuda.h"

namespace twell {

namespace {

// Values of each array.
struct Sizes {
  int64_t x, qkv, attended, segment_values, segment_sums, fired, tagged_parts, parts, state;
};

Sizes sizes_of(const CudaContext& ctx, const DecodeLayersWorkspace::Shape& s) {
  if (s.tokens == 0) return {};
  const int64_t heads = s.tokens * s.heads, segments = heads * decode_segments(s.max_length);
  return {.x = s.tokens * s.width,
          .qkv = s.tokens * (s.heads + 2 * s.kv_heads) * s.head_dim / 2,
          .attended = heads * s.head_dim / 2,
          .segment_values = segments * s.head_dim,
          .segment_sums = segments * 2,
          .fired = ctx.multiprocessors(),
          .tagged_parts = ctx.multiprocessors() * s.width,
          .parts = ctx.multiprocessors() * s.tokens * s.width,
          .state = 3};
}

}  // namespace

int64_t DecodeLayersWorkspace::bytes_needed(const CudaContext& ctx, const Shape& shape) {
  const Sizes s = sizes_of(ctx, shape);
  return 8 * (s.x + s.qkv + s.attended + s.segment_values + s.segment_sums + s.fired +
              s.tagged_parts) +
         4 * (s.parts + s.state);
}

DecodeLayersWorkspace::DecodeLayersWorkspace(CudaContext& ctx, const Shape& shape)
    : tokens_(shape.tokens), segments_(decode_segments(shape.max_length)) {
  if (tokens_ == 0) return;
  const Sizes sizes = sizes_of(ctx, shape);
  x_ = DeviceBuffer<uint64_t>(sizes.x);
  qkv_ = DeviceBuffer<uint64_t>(sizes.qkv);
  attended_ = DeviceBuffer<uint64_t>(sizes.attended);
  segment_values_ = DeviceBuffer<uint64_t>(sizes.segment_values);
  segment_sums_ = DeviceBuffer<uint64_t>(sizes.segment_sums);
  fired_ = DeviceBuffer<uint64_t>(sizes.fired);
  tagged_parts_ = DeviceBuffer<uint64_t>(sizes.tagged_parts);
  parts_ = DeviceBuffer<float>(sizes.parts);
  state_ = DeviceBuffer<uint32_t>(sizes.state);
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
  clear(fired_);
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
          .fired = fired_.data(),
          .tagged_parts = tagged_parts_.data(),
          .parts = parts_.data(),
          .state = state_.data()};
}

}  // namespace twell
