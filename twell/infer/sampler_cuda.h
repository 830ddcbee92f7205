// SPDX-License-Identifier: Apache-2.0
// The sampler (sampler.h) and log-probabilities (log_probs.h) on the GPU: for every row of logits,
// with the same penalties, filters, tie order and random numbers. Probabilities are summed as
// 32-bit fixed-point numbers, so that draws are reproducible; they differ from the CPU's only where
// a sum is within rounding of a boundary.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "twell/infer/log_probs.h"
#include "twell/infer/sampler.h"

namespace twell {

// Device memory throughout.
struct SampleCuda {
  int64_t rows = 0;
  int64_t vocab = 0;                // logits used in each row, from its start
  int64_t stride = 0;               // from one row to the next
  const float* logits = nullptr;    // [rows, stride]
  const float* uniforms = nullptr;  // [rows] in [0, 1): uniform(seed, stream, index) of each row
  int32_t* ids = nullptr;           // [rows] out; kNoToken where none can be drawn
  // Masks as in token_filter.h, of mask_words words each, and the one of each row, negative: none.
  const uint32_t* masks = nullptr;   // null: no row has one
  const int32_t* mask_of = nullptr;  // [rows]
  int64_t mask_words = 0;
  // As in SamplerOptions.
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
};
cudaError_t launch_sample(const SampleCuda& problem, cudaStream_t stream);

struct PenalizedRow {
  int64_t row = 0;             // of the logits
  int64_t begin = 0, end = 0;  // its tokens in `seen`, each once
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
};
struct PenalizeCuda {
  int64_t count = 0;                   // of rows
  const PenalizedRow* rows = nullptr;  // [count]
  const SeenToken* seen = nullptr;     // ids of `vocab` and more are passed over
  int64_t vocab = 0;
  float* logits = nullptr;  // [rows, vocab] in and out
  float* before = nullptr;  // for each seen token its logit: written, or put back by an undo
  bool undo = false;
};
cudaError_t launch_penalize(const PenalizeCuda& problem, cudaStream_t stream);

inline constexpr int64_t kMostTop = 32;
struct LogProbsCuda {
  int64_t rows = 0;
  int64_t vocab = 0;              // all logits of a row, whose probabilities add up to 1
  const float* logits = nullptr;  // [rows, vocab]
  const int32_t* ids = nullptr;   // [rows] tokens; those outside the vocabulary get NaN
  int64_t top = 0;                // the number of most likely tokens wanted, at most kMostTop,
  int64_t top_vocab = 0;          // among the first top_vocab; fewer if there are fewer
  // Rows of 1 + top entries, out_stride apart: the token, then the most likely ones, equals by id.
  // NaN where a logit is NaN or none is finite; kNoToken where there are fewer.
  TokenLogProb* out = nullptr;
  int64_t out_stride = 0;
};
cudaError_t launch_log_probs(const LogProbsCuda& problem, cudaStream_t stream);

}  // namespace twell
