// SPDX-License-Identifier: Apache-2.0
// Stands in for trained sparsity in benchmarks: the feed-forward layers of a model that was not
// trained to be sparse run their gate GEMM for real, and up and down on activation patterns
// captured from a model that was. Results are not the model's; times are.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "twell/model/forward_cuda.h"

namespace twell {

class PatternReplayCuda {
 public:
  // Safetensors with layerN.row_nnz U16 [M] and layerN.col U16 [sum], ascending in a row. The
  // patterns are spread over the model's layers in order and repeated over its tokens.
  PatternReplayCuda(CudaContext& ctx, const std::filesystem::path& file, const ModelConfig& config,
                    int64_t max_tokens);
  ~PatternReplayCuda();

  // Runs the layer; done(true) is called after each gate GEMM, done(false) after what follows it.
  void forward(int64_t layer, const FfnForwardCuda& problem,
               const std::function<void(bool gate)>& done);
  double nnz_per_token(int64_t layer) const;

 private:
  struct Packed;
  const Packed& pattern_of(int64_t layer) const;

  CudaContext& ctx_;
  int64_t layers_, width_, ffn_, chunk_;
  bool gated_;
  std::vector<std::unique_ptr<Packed>> patterns_;
  std::unique_ptr<Packed> made_;  // what the gate GEMM writes, not used further
  TileUnionWorkspace workspace_;
};

}  // namespace twell
