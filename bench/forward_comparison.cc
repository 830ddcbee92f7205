// SPDX-License-Identifier: Apache-2.0
#include "bench/forward_comparison.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "twell/base/error.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;

// Logits are made a chunk of tokens at a time, because [B * T, V] may not fit in memory.
constexpr int64_t kHeadTokens = 512;

class Runner {
 public:
  Runner(Context& ctx, const ModelView& model, std::span<const int32_t> ids, int64_t length,
         FfnPolicy policy)
      : ctx_(ctx),
        model_(model),
        ids_(ids),
        sequences_(ids.size() / static_cast<size_t>(length), {.tokens = length, .slot = 0}),
        state_(model.config, policy),
        hidden_(std::ssize(ids) * model.config.width),
        logits_(std::min(kHeadTokens, std::ssize(ids)) * model.config.vocab_size) {}

  void body() {
    forward(ctx_, model_, state_, {.ids = ids_, .sequences = sequences_, .hidden = hidden()});
  }

  // Calls use(logits) for each chunk of tokens.
  template <typename Use>
  void head(const Use& use) {
    for (int64_t begin = 0; begin < std::ssize(ids_); begin += kHeadTokens) {
      const int64_t count = std::min(kHeadTokens, std::ssize(ids_) - begin);
      const MatrixF out = logits_.matrix(count, model_.config.vocab_size);
      logits(ctx_, model_, hidden().slice_rows(begin, count), out);
      use(begin, out);
    }
  }

  MatrixF hidden() { return hidden_.matrix(std::ssize(ids_), model_.config.width); }
  const ForwardState& state() const { return state_; }

 private:
  Context& ctx_;
  const ModelView& model_;
  std::span<const int32_t> ids_;
  std::vector<ForwardSequence> sequences_;
  ForwardState state_;
  Buffer<float> hidden_;
  Buffer<float> logits_;
};

struct Times {
  std::vector<double> body, full, processor;
};

void time_once(Runner& runner, Times& times) {
  const double processor = processor_seconds();
  const Clock::time_point start = Clock::now();
  runner.body();
  const Clock::time_point middle = Clock::now();
  times.processor.push_back(processor_seconds() - processor);
  runner.head([](int64_t, MatrixF) {});
  const Clock::time_point end = Clock::now();
  times.body.push_back(std::chrono::duration<double>(middle - start).count());
  times.full.push_back(std::chrono::duration<double>(end - start).count());
}

void compare_logits(Context& ctx, const ModelView& model, Runner& dense, Runner& sparse,
                    ForwardComparison& result) {
  dense.body();
  sparse.body();
  const int64_t chunk = std::min(kHeadTokens, result.tokens);
  Buffer<float> other(chunk * model.config.vocab_size);
  dense.head([&](int64_t begin, MatrixF expected) {
    const MatrixF got = other.matrix(expected.rows, expected.cols);
    logits(ctx, model, sparse.hidden().slice_rows(begin, expected.rows), got);
    for (int64_t i = 0; i < expected.rows * expected.cols; ++i) {
      const double magnitude = std::abs(static_cast<double>(expected.data[i]));
      const double difference = std::abs(static_cast<double>(got.data[i]) - expected.data[i]);
      TWELL_REQUIRE(std::isfinite(magnitude) && std::isfinite(difference),
                    "the model gives a logit that is not a finite number: its weights are damaged");
      result.max_abs_logit = std::max(result.max_abs_logit, magnitude);
      result.max_abs_logit_diff = std::max(result.max_abs_logit_diff, difference);
    }
  });
}

}  // namespace

ForwardComparison compare_forward(Context& ctx, const ModelView& model,
                                  std::span<const int32_t> ids,
                                  const ForwardComparisonOptions& options) {
  const int64_t length = options.length == 0 ? model.config.context : options.length;
  TWELL_REQUIRE(options.repeats > 0, "the number of timed runs must be positive, got {}",
                options.repeats);
  TWELL_CHECK(std::ssize(ids) == options.sequences * length && !ids.empty(),
              "expected {} sequences of {} tokens, got {} tokens", options.sequences, length,
              ids.size());
  Runner dense(ctx, model, ids, length, FfnPolicy::kDense);
  Runner sparse(ctx, model, ids, length, options.sparse);

  ForwardComparison result;
  result.tokens = std::ssize(ids);
  compare_logits(ctx, model, dense, sparse, result);  // check before timing; this also warms up

  Times dense_times, sparse_times;
  for (int64_t i = 0; i < options.repeats; ++i) {
    time_once(dense, dense_times);
    time_once(sparse, sparse_times);
  }
  result.dense_body = summarize(dense_times.body);
  result.sparse_body = summarize(sparse_times.body);
  result.dense_full = summarize(dense_times.full);
  result.sparse_full = summarize(sparse_times.full);
  result.dense_processor = summarize(dense_times.processor);
  result.sparse_processor = summarize(sparse_times.processor);
  for (const FfnPlan& plan : sparse.state().ffn_plans) {
    result.layers.push_back({plan.execution, plan.reason, plan.nnz_per_token()});
  }
  return result;
}

}  // namespace twell
