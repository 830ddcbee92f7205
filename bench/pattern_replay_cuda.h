// SPDX-License-Identifier: Apache-2.0
// Stands in for trained sparsity in benchmarks: the feed-forward layers of a model that was not
// trained to be sparse run their gate GEMM for real, and up and down on activation patterns
// captured from a model that was. Results are not the model's; times are.
#pragma once

#include <filesystem>
#include <memory>

#include "bench/packed_patterns_cuda.h"
#include "twell/model/forward_cuda.h"

namespace twell {

class PatternReplayCuda {
 public:
  // The patterns of a file as packed_patterns_cuda.h spreads them over layers and tokens.
  PatternReplayCuda(CudaContext& ctx, const std::filesystem::path& file, const ModelConfig& config,
                    int64_t max_tokens);

  // Runs the layer; done(true) is called after each gate GEMM, done(false) after what follows it.
  void forward(int64_t layer, const FfnForwardCuda& problem,
               const std::function<void(bool gate)>& done);
  double nnz_per_token(int64_t layer) const { return patterns_.nnz_per_token(layer); }

 private:
  CudaContext& ctx_;
  int64_t width_, ffn_, chunk_;
  bool gated_;
  PackedPatternsCuda patterns_;
  std::unique_ptr<PackedTwellCuda> made_;  // what the gate GEMM writes, not used further
  TileUnionWorkspace workspace_;
};

}  // namespace twell
