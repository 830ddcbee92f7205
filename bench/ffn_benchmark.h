// SPDX-License-Identifier: Apache-2.0
// Times ffn_forward on a given activation pattern, every execution against dense in the same run.
//
// Nothing is replayed or substituted: x gets orthonormal rows and w_gate is solved from
// x w_gate^T = G for a G with the pattern's signs, so the layer's own gate produces the pattern.
// That needs no more tokens than the width.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

// Which neurons are active on each of M tokens.
struct FfnPattern {
  std::string name;
  std::vector<int32_t> row_nnz;  // [M]
  std::vector<uint32_t> column;  // [sum of row_nnz], ascending within a row
};
// Each neuron active with probability `density`, independently.
FfnPattern random_pattern(int64_t tokens, int64_t ffn, double density, uint64_t seed);
// Tokens [begin, begin + count) of a captured pattern, layerN.row_nnz and layerN.col of a file,
// which starts again behind its last one. InputError when token `begin` is not there.
FfnPattern captured_pattern(std::string name, std::span<const uint16_t> row_nnz,
                            std::span<const uint16_t> column, int64_t begin, int64_t count);

// The pattern of `from` neurons as one of `to`: neuron j fires where neuron floor(j from / to) did.
// The share of neurons that fire for a token, and that fire for any of some neighbouring tokens,
// stay what they were; of fewer neurons, some are left out.
FfnPattern stretch_pattern(const FfnPattern& pattern, int64_t from, int64_t to);

struct FfnBenchmark {
  int64_t width = 2048;
  int64_t ffn = 5632;
  bool gated = true;
  int repeats = 11;  // rounds, each running every execution once
  uint64_t seed = 1;
};

struct FfnBenchmarkRow {
  std::string pattern;
  FfnPolicy policy = FfnPolicy::kDense;
  FfnExecution execution = FfnExecution::kDense;  // what the policy came to
  int64_t tokens = 0;
  double nnz_per_token = 0.0;
  int64_t max_row_nnz = 0;
  double error = 0.0;  // largest |y - y_dense| / |y_dense| (norms) of any token
  double median_s = 0.0, p10_s = 0.0, p90_s = 0.0;
  double speedup = 1.0;  // median over the rounds of dense time / this time
};
// One row per policy: dense, row-fused, tile-union, auto. Error when an execution does not give the
// dense result or the gate not the pattern; InputError for a pattern that does not fit the layer.
std::vector<FfnBenchmarkRow> benchmark_ffn(Context& ctx, const FfnBenchmark& options,
                                           const FfnPattern& pattern);

}  // namespace twell
