// SPDX-License-Identifier: Apache-2.0
// Compares dense and sparse execution of one model on one text, in speed and results, in one run.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "twell/base/context.h"
#include "twell/model/forward.h"
#include "twell/model/weights.h"

namespace twell {

struct ForwardComparisonOptions {
  int64_t sequences = 8;  // B
  int64_t length = 0;     // T; 0: the model's context
  int64_t repeats = 9;    // timed runs of each, alternating
  FfnPolicy sparse = FfnPolicy::kAuto;
};

struct LayerComparison {
  FfnExecution execution = FfnExecution::kDense;
  std::string reason;
  double nnz_per_token = 0.0;
};

struct ForwardComparison {
  int64_t tokens = 0;  // per run, B * T
  // Seconds for the layers alone, and for the forward with logits for every token.
  Timing dense_body, sparse_body, dense_full, sparse_full;
  Timing dense_processor, sparse_processor;  // of all threads, for the layers alone
  double max_abs_logit = 0.0;
  double max_abs_logit_diff = 0.0;
  std::vector<LayerComparison> layers;
};

// ids [B * T]: B sequences of T tokens.
ForwardComparison compare_forward(Context& ctx, const ModelView& model,
                                  std::span<const int32_t> ids,
                                  const ForwardComparisonOptions& options);

}  // namespace twell
