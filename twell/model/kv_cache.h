// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens, per layer: [slots][context, H_kv * hd] f32, rotated keys.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/matrix.h"
#include "twell/model/config.h"

namespace twell {

class KvCache {
 public:
  // Room for `slots` sequences of at most `capacity` tokens each.
  KvCache(const ModelConfig& config, int64_t slots, int64_t capacity);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity);

  MatrixF keys(int64_t layer, int64_t slot) const;    // [capacity, H_kv * hd]
  MatrixF values(int64_t layer, int64_t slot) const;  // [capacity, H_kv * hd]
  int64_t length(int64_t slot) const;                 // tokens held
  void set_length(int64_t slot, int64_t length);
  int64_t capacity() const { return capacity_; }
  int64_t slots() const { return slots_; }

 private:
  int64_t layers_, slots_, capacity_, width_;
  Buffer<float> keys_, values_;
  std::vector<int64_t> lengths_;
};

}  // namespace twell
