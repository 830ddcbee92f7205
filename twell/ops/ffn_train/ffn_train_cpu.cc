// SPDX-License-Identifier: Apache-2.0
// Entry points: checks, the choice of the execution, the memory of saved activations.
#include "twell/ops/ffn_train/ffn_train_cpu.h"

#include <algorithm>

#include "twell/base/carver.h"
#include "twell/base/error.h"

namespace twell {
namespace {

template <typename T>
void check_layer(const FfnMatrices<T>& m, const char* what, int64_t width, int64_t ffn,
                 bool gated) {
  TWELL_CHECK(m.gated() == gated, "{} are {}gated, the saved activations are {}gated", what,
              m.gated() ? "" : "not ", gated ? "" : "not ");
  const auto check = [&](const auto& matrix, const char* name) {
    TWELL_CHECK(matrix.rows == ffn && matrix.cols == width, "{}: {} is [{}, {}], expected [{}, {}]",
                what, name, matrix.rows, matrix.cols, ffn, width);
  };
  if (gated) check(m.w_gate, "w_gate");
  check(m.w_up, "w_up");
  check(m.w_down, "w_down");
}

template <typename T>
void check_rows(const Matrix<T>& m, const char* name, int64_t tokens, int64_t width) {
  TWELL_CHECK(m.rows == tokens && m.cols == width, "{} is [{}, {}], expected [{}, {}]", name,
              m.rows, m.cols, tokens, width);
}

bool wants_hybrid(const FfnTrainForward& problem) {
  if (!problem.weights.activation.leaves_zeros() || problem.weights.biased()) return false;
  if (problem.policy != FfnTrainPolicy::kAuto) return problem.policy == FfnTrainPolicy::kHybrid;
  return choose_ffn_train_execution(problem.x.rows, problem.x.cols, problem.weights.ffn(),
                                    problem.nnz_hint) == FfnTrainExecution::kHybrid;
}

constexpr int64_t kAlignFloats = static_cast<int64_t>(kAlignment / sizeof(float));

// Words that an array takes, in whole cache lines.
int64_t aligned(int64_t words) { return round_up(words, kAlignFloats); }

int64_t dense_words(int64_t max_tokens, int64_t ffn, bool gated) {
  return aligned(max_tokens * ffn) * (gated ? 2 : 1);
}

// W. A row of more than F / 4 non-zeros costs less through the GEMMs of the tail. With this width
// the compact part takes at most half of the dense plan, which leaves a tail of at least half of
// the rows.
int64_t ell_width(int64_t ffn) { return std::max<int64_t>(1, ffn / 4); }

}  // namespace

// Measured with ffn_train_bench on one AVX-512 core with 2 MiB of second-level cache: 2048 tokens,
// D 256-2048, F 1024-5632, uniform random patterns, forward and backward. Hybrid is 4.3-4.8x as
// fast as dense at 1% density, 2.7-3.3x at 5%, 1.3-1.6x at 20%; with 128 tokens 2.9x, 2.2x, 1.5x.
// Beyond 25% most rows go to the tail, and hybrid gains nothing.
FfnTrainExecution choose_ffn_train_execution(int64_t tokens, int64_t width, int64_t ffn,
                                             double nnz_hint) {
  constexpr double kMaxDensity = 0.20;
  constexpr int64_t kMinTokens = 128;  // below, copying weight slices costs more than it saves
  constexpr int64_t kMinWidth = 64;    // below, a row is too short for the vector kernels
  const bool sparse = nnz_hint >= 0.0 && nnz_hint <= kMaxDensity * static_cast<double>(ffn);
  return sparse && tokens >= kMinTokens && width >= kMinWidth ? FfnTrainExecution::kHybrid
                                                              : FfnTrainExecution::kDense;
}

std::string_view ffn_train_execution_name(FfnTrainExecution execution) {
  return execution == FfnTrainExecution::kDense ? "dense" : "hybrid";
}

FfnTrainPolicy parse_ffn_train_policy(std::string_view name) {
  if (name == "auto") return FfnTrainPolicy::kAuto;
  if (name == "dense") return FfnTrainPolicy::kDense;
  if (name == "hybrid") return FfnTrainPolicy::kHybrid;
  TWELL_REQUIRE(false, "unknown training execution '{}'; use auto, dense or hybrid", name);
}

FfnTrainStats ffn_train_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved) {
  const FfnWeights& w = problem.weights;
  const int64_t tokens = problem.x.rows;
  check_layer(w, "FFN weights", problem.x.cols, saved.ffn(), saved.gated());
  check_rows(problem.y, "y", tokens, problem.x.cols);
  TWELL_CHECK(tokens <= saved.max_tokens(), "{} tokens exceed the {} planned for", tokens,
              saved.max_tokens());
  TWELL_CHECK(problem.active.empty() || static_cast<int64_t>(problem.active.size()) == w.ffn(),
              "{} active flags for {} neurons", problem.active.size(), w.ffn());
  FfnTrainStats stats;
  if (wants_hybrid(problem) && hybrid_forward(ctx, problem, saved, stats)) return stats;
  return dense_forward(ctx, problem, saved);
}

void ffn_train_backward(Context& ctx, const FfnTrainBackward& problem, FfnSaved& saved) {
  const int64_t width = problem.x.cols;
  check_layer(problem.weights, "FFN weights", width, saved.ffn(), saved.gated());
  check_layer(problem.grads, "FFN gradients", width, saved.ffn(), saved.gated());
  check_rows(problem.x, "x", saved.tokens, width);
  check_rows(problem.d_y, "d_y", saved.tokens, width);
  check_rows(problem.d_x, "d_x", saved.tokens, width);
  if (saved.execution == FfnTrainExecution::kHybrid) {
    hybrid_backward(ctx, problem, saved);
  } else {
    dense_backward(ctx, problem, saved);
  }
}

FfnSaved::FfnSaved(int64_t max_tokens, int64_t ffn, bool gated)
    : FfnSaved(max_tokens, ffn, gated, nullptr) {
  owned_ = Buffer<float>(dense_words(max_tokens, ffn, gated));
  memory_ = owned_.data();
}

FfnSaved::FfnSaved(int64_t max_tokens, int64_t ffn, bool gated, float* memory)
    : max_tokens_(max_tokens), ffn_(ffn), gated_(gated), memory_(memory) {
  TWELL_CHECK(max_tokens > 0 && ffn > 0, "saved activations of {} tokens and {} neurons",
              max_tokens, ffn);
}

int64_t FfnSaved::bytes(int64_t max_tokens, int64_t ffn, bool gated) {
  return dense_words(max_tokens, ffn, gated) * static_cast<int64_t>(sizeof(float));
}

MatrixF FfnSaved::dense_gate(int64_t m) const { return {memory_, m, ffn_}; }

MatrixF FfnSaved::dense_up(int64_t m) const { return {memory_ + aligned(m * ffn_), m, ffn_}; }

bool FfnSaved::plan_hybrid(int64_t m) {
  const int64_t planes = gated_ ? 2 : 1;
  const int64_t width = ell_width(ffn_);
  // For m tokens of max_tokens the plan stays within the dense plan of m.
  const int64_t budget = dense_words(m, ffn_, gated_);
  const int64_t compact = 2 * aligned(m) + (1 + planes) * aligned(m * width);
  const int64_t padding = planes * kAlignFloats;
  if (budget < compact + padding) return false;
  int64_t capacity = std::min(m, (budget - compact - padding) / (planes * ffn_));
  if (capacity > 0) capacity -= capacity % tail_granularity(capacity);

  Carver carver(memory_, static_cast<int64_t>(kAlignment));
  hybrid = {.shape = {m, ffn_, width, capacity},
            .row_nnz = carver.take<int32_t>(m),
            .tail_slot = carver.take<int32_t>(m),
            .index = {carver.take<uint32_t>(m * width), m, width},
            .value = {carver.take<float>(m * width), m, width},
            .tail = {carver.take<float>(capacity * ffn_), capacity, ffn_}};
  up = gated_ ? MatrixF(carver.take<float>(m * width), m, width) : MatrixF();
  up_tail = gated_ ? MatrixF(carver.take<float>(capacity * ffn_), capacity, ffn_) : MatrixF();
  return true;
}

FiredFlags::FiredFlags(Context& ctx, Arena::Scope& scope, std::span<uint8_t> active)
    : active_(active) {
  if (active.empty()) return;
  fired_ = scope.matrix<float>(ctx.threads(), static_cast<int64_t>(active.size()));
  std::fill_n(fired_.data, fired_.rows * fired_.cols, 0.0f);
}

float* FiredFlags::of_thread(int thread) const {
  return fired_.empty() ? nullptr : fired_.row(thread);
}

void FiredFlags::merge() const {
  for (int64_t thread = 0; thread < fired_.rows; ++thread) {
    for (int64_t j = 0; j < fired_.cols; ++j) {
      if (fired_(thread, j) != 0.0f) active_[static_cast<size_t>(j)] = 1;
    }
  }
}

}  // namespace twell
