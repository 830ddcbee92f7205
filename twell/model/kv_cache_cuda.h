// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens on the GPU, per layer: [slots * capacity, H_kv * hd] bf16, rotated
// keys. The host keeps the number of rows in use.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/config.h"

namespace twell {

class KvCacheCuda {
 public:
  // Room for `slots` sequences of at most `capacity` tokens each; InputError when they do not fit
  // the model's context or the device.
  KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity);

  __nv_bfloat16* keys(int64_t layer) const { return keys_.data() + layer * layer_size_; }
  __nv_bfloat16* values(int64_t layer) const { return values_.data() + layer * layer_size_; }
  int64_t first_row(int64_t slot) const { return slot * capacity_; }
  int64_t length(int64_t slot) const;  // tokens held
  void set_length(int64_t slot, int64_t length);
  int64_t capacity() const { return capacity_; }
  int64_t slots() const { return static_cast<int64_t>(lengths_.size()); }

 private:
  int64_t capacity_, layer_size_;
  DeviceBuffer<__nv_bfloat16> keys_, values_;
  std::vector<int64_t> lengths_;
};

}  // namespace twell
