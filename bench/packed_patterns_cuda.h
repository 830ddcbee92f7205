// SPDX-License-Identifier: Apache-2.0
// Captured activation patterns as TwELL in device memory: what benchmarks replay in place of the
// activity of a model that was not trained to be sparse.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/base/dtype.h"
#include "twell/format/twell.h"

namespace twell {

// Tiles of 256, C = 8, with as many spill slots.
struct PackedTwellCuda {
  PackedTwellCuda(int64_t tokens, int64_t ffn, int64_t slots);
  TwellPacked view() const;

  TwellShape shape;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<BF16> spill;
  DeviceBuffer<int32_t> row_nnz;
};

class PackedPatternsCuda {
 public:
  // Safetensors as captured_patterns.h says, which are spread over the model's layers in order and
  // repeated over `tokens` tokens, with random positive values. InputError on any fault of the
  // file. Waits for the device.
  PackedPatternsCuda(const std::filesystem::path& file, int64_t layers, int64_t ffn,
                     int64_t tokens);

  TwellPacked of(int64_t layer) const { return patterns_[index(layer)].view(); }
  double nnz_per_token(int64_t layer) const { return nnz_per_token_[index(layer)]; }
  // Active on any of 128 tokens in a row, mean.
  double union_neurons(int64_t layer) const { return union_neurons_[index(layer)]; }

 private:
  size_t index(int64_t layer) const {
    return static_cast<size_t>(layer * std::ssize(patterns_) / layers_);
  }
  int64_t layers_;
  std::vector<PackedTwellCuda> patterns_;
  std::vector<double> nnz_per_token_, union_neurons_;
};

}  // namespace twell
