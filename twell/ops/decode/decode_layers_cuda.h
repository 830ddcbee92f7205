// SPDX-License-Identifier: Apache-2.0
// Device memory of one decode_layers call in flight.
#pragma once

#include "twell/base/cuda.h"
#include "twell/ops/decode/decode_layers.h"

namespace twell {

class DecodeLayersWorkspace {
 public:
  struct Shape {
    int64_t tokens = 0;      // at most, kMaxDecodeTokens or fewer; 0: for no calls
    int64_t width = 0;       // D
    int64_t heads = 0;       // H
    int64_t kv_heads = 0;    // H_kv
    int64_t head_dim = 0;    // hd
    int64_t max_length = 0;  // of a sequence
  };

  DecodeLayersWorkspace(CudaContext& ctx, const Shape& shape);
  static int64_t bytes_needed(const CudaContext& ctx, const Shape& shape);

  int64_t tokens() const { return tokens_; }
  DecodeWorkspace get() const;

 private:
  int64_t tokens_;
  int64_t segments_;
  DeviceBuffer<uint64_t> x_, qkv_, attended_, segment_values_, segment_sums_, fired_, tagged_parts_;
  DeviceBuffer<float> parts_;
  DeviceBuffer<uint32_t> state_;
};

}  // namespace twell
