// SPDX-License-Identifier: Apache-2.0
// When the hybrid execution is the faster one: what a forward and a backward pass take, fitted to
// bench/ffn_train_cuda_bench on an H200 with D 2048 and F 5632. Milliseconds.
#include <algorithm>
#include <cmath>

#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {
namespace {

constexpr double kTileTokens = 128.0;

double giga(double value) { return value * 1e-9; }

// Nine GEMMs, and 18 bytes per token and neuron read and written between them.
double dense_time(double tokens, double width, double ffn) {
  constexpr double kMsPerTeraflop = 1.22, kMsPerGigabyte = 0.25, kMsPerCall = 0.05;
  return 9.0 * 2.0 * giga(tokens * width * ffn) * 1e-3 * kMsPerTeraflop +
         18.0 * giga(tokens * ffn) * kMsPerGigabyte + kMsPerCall;
}

// The gate GEMM; eight products on the unions; what grows with active pairs: elementwise work, and
// the tokens that weight gradients gather, of which neurons of a tile share the more the more of
// them a token has; launches.
double hybrid_time(double tokens, double width, double ffn, double nnz, double union_neurons) {
  constexpr double kGateMsPerTeraflop = 1.59, kUnionMsPerTeraflop = 1.61;
  constexpr double kFew = 64.0, kMsPerGigapair = 559.0, kMsPerGigapairBeyond = 43.0;
  constexpr double kChunk = 16384.0, kMsPerChunk = 0.16;
  const double unions = tokens / kTileTokens * union_neurons;
  return 2.0 * giga(tokens * width * ffn) * 1e-3 * kGateMsPerTeraflop +
         8.0 * 2.0 * giga(unions * kTileTokens * width) * 1e-3 * kUnionMsPerTeraflop +
         giga(tokens * std::min(nnz, kFew)) * kMsPerGigapair +
         giga(tokens * std::max(nnz - kFew, 0.0)) * kMsPerGigapairBeyond +
         std::ceil(tokens / kChunk) * kMsPerChunk;
}

}  // namespace

FfnTrainExecution choose_ffn_train_cuda(const FfnTrainShapeCuda& shape, int64_t tokens, double nnz,
                                        double union_neurons) {
  // Estimates are off by up to 7%, those of unknown unions too high.
  constexpr double kMargin = 0.95;
  if (nnz < 0.0) return FfnTrainExecution::kDense;
  const auto width = static_cast<double>(shape.width), ffn = static_cast<double>(shape.ffn);
  const auto count = static_cast<double>(tokens);
  nnz = std::min(nnz, ffn);
  if (union_neurons < 0.0) union_neurons = ffn * (1.0 - std::pow(1.0 - nnz / ffn, kTileTokens));
  const double hybrid = hybrid_time(count, width, ffn, nnz, std::min(union_neurons, ffn));
  return hybrid < kMargin * dense_time(count, width, ffn) ? FfnTrainExecution::kHybrid
                                                          : FfnTrainExecution::kDense;
}

}  // namespace twell
