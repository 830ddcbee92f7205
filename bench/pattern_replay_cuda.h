// SPDX-License-Identifier: Apache-2.0
// Replays captured activation patterns in a model that was not trained to be sparse: the gate GEMM
// of each feed-forward layer runs on the model's data, the up and down products on patterns
// captured from a sparse model. The times are those of a sparse model; the results are meaningless.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/model/forward_cuda.h"

namespace twell {

// The patterns of a file, assigned to a model's layers in order and repeated over `tokens` tokens,
// as TwELL in device memory. InputError on any fault of the file.
class PatternsCuda {
 public:
  PatternsCuda(const std::filesystem::path& file, int64_t layers, int64_t ffn, int64_t tokens);

  TwellPacked of(int64_t layer) const { return packed_[index(layer)].view(); }
  double nnz_per_token(int64_t layer) const { return nnz_per_token_[index(layer)]; }
  // The mean union of 128 tokens, as mean_union computes it.
  double union_neurons(int64_t layer) const { return union_neurons_[index(layer)]; }

 private:
  size_t index(int64_t layer) const {
    return static_cast<size_t>(layer * std::ssize(packed_) / layers_);
  }
  int64_t layers_;
  std::vector<TwellBuffersCuda> packed_;
  std::vector<double> nnz_per_token_, union_neurons_;
};

class PatternReplayCuda {
 public:
  PatternReplayCuda(CudaContext& ctx, const std::filesystem::path& file, const ModelConfig& config,
                    int64_t max_tokens);

  // Runs the layer. Calls done(true) after each gate GEMM and done(false) after the up and down
  // products that follow it.
  void forward(int64_t layer, const FfnForwardCuda& problem,
               const std::function<void(bool gate)>& done);
  double nnz_per_token(int64_t layer) const { return patterns_.nnz_per_token(layer); }

 private:
  CudaContext& ctx_;
  int64_t width_, ffn_, chunk_;
  bool gated_;
  PatternsCuda patterns_;
  TwellBuffersCuda made_;  // receives the gate GEMM's output, which is not used
  TileUnionWorkspace workspace_;
  DeviceBuffer<uint8_t> w_down_;  // [F, D] of a layer in e4m3; widened without a gate
};

}  // namespace twell
