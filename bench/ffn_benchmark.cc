// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

constexpr FfnPolicy kPolicies[] = {FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion,
                                   FfnPolicy::kAuto};

void fill_normal(Context& ctx, const Buffer<float>& out, uint64_t seed, float scale) {
  ctx.parallel_for(out.size(), 4096, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      out[i] = scale * normal(seed, 0, static_cast<uint64_t>(i));
    }
  });
}

// Rows of the type-II cosine transform, which are orthonormal, with random signs on the columns.
void fill_orthonormal(Context& ctx, MatrixF x, uint64_t seed) {
  const double d = static_cast<double>(x.cols);
  ctx.parallel_for(x.rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const double scale = std::sqrt((row == 0 ? 1.0 : 2.0) / d);
      for (int64_t k = 0; k < x.cols; ++k) {
        const double sign = uniform(seed, 0, static_cast<uint64_t>(k)) < 0.5f ? -1.0 : 1.0;
        const double phase =
            std::numbers::pi * (static_cast<double>(k) + 0.5) * static_cast<double>(row) / d;
        x(row, k) = static_cast<float>(sign * scale * std::cos(phase));
      }
    }
  });
}

// The layer, and inputs for which its gate has the given pattern.
struct Layer {
  Layer(Context& ctx, const FfnBenchmark& options, const FfnPattern& pattern)
      : tokens(pattern.tokens()),
        x(tokens * options.width),
        gate(options.gated ? options.ffn * options.width : 0),
        up(options.ffn * options.width),
        down(options.ffn * options.width) {
    const int64_t d = options.width;
    const int64_t f = options.ffn;
    fill_orthonormal(ctx, x.matrix(tokens, d), options.seed);
    fill_normal(ctx, up, options.seed + 1, 1.0f);
    fill_normal(ctx, down, options.seed + 2, 0.02f);
    Buffer<float> wanted(tokens * f);  // G; not near 0, so that rounding keeps signs
    fill_normal(ctx, wanted, options.seed + 3, 1.0f);
    for (float& value : wanted.span()) value = -std::abs(value) - 0.05f;
    for (int64_t row = 0, at = 0; row < tokens; ++row) {
      for (int32_t i = 0; i < pattern.row_nnz[static_cast<size_t>(row)]; ++i, ++at) {
        float& value = wanted[row * f + pattern.columns[static_cast<size_t>(at)]];
        value = -value;
      }
    }
    const Buffer<float>& firing = options.gated ? gate : up;
    matmul(ctx, {.a = wanted.matrix(tokens, f),
                 .b = x.matrix(tokens, d),
                 .c = firing.matrix(f, d),
                 .trans_a = true});
    weights = {{}, up.matrix(f, d), down.matrix(f, d), {options.activation}};
    if (options.gated) weights.w_gate = gate.matrix(f, d);
  }

  int64_t tokens;
  Buffer<float> x, gate, up, down;
  FfnWeights weights;
};

// The output and times of one policy.
struct Subject {
  Subject(FfnPolicy policy, const Layer& layer, int64_t width)
      : y(layer.tokens * width), row_nnz(static_cast<size_t>(layer.tokens)) {
    plan.policy = policy;
  }
  void run(Context& ctx, const Layer& layer) {
    const int64_t d = layer.weights.width();
    ffn_forward(ctx, layer.weights, layer.x.matrix(layer.tokens, d), y.matrix(layer.tokens, d),
                plan, row_nnz);
  }
  void run_timed(Context& ctx, const Layer& layer) {
    const auto start = std::chrono::steady_clock::now();
    run(ctx, layer);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }

  FfnPlan plan;
  Buffer<float> y;
  std::vector<int32_t> row_nnz;
  std::vector<double> seconds;
};

double squared_norm(const float* a, const float* b, int64_t n) {  // of a - b
  double sum = 0.0;
  for (int64_t k = 0; k < n; ++k) {
    const double delta = static_cast<double>(a[k]) - b[k];
    sum += delta * delta;
  }
  return sum;
}

// Largest |y - expected| of a token, relative to |expected|, or to the norm of row_nnz typical
// terms where that is larger, because a few terms can cancel.
double largest_row_error(MatrixF y, MatrixF expected, std::span<const int32_t> row_nnz) {
  const std::vector<float> zero(static_cast<size_t>(y.cols), 0.0f);
  double total = 0.0;
  for (int64_t row = 0; row < y.rows; ++row) {
    total += squared_norm(expected.row(row), zero.data(), y.cols);
  }
  const double nnz = std::accumulate(row_nnz.begin(), row_nnz.end(), 0.0);
  double largest = 0.0;
  for (int64_t row = 0; row < y.rows; ++row) {
    const double difference = squared_norm(y.row(row), expected.row(row), y.cols);
    if (difference == 0.0) continue;
    const double usual = total / nnz * row_nnz[static_cast<size_t>(row)];
    const double norm = squared_norm(expected.row(row), zero.data(), y.cols);
    const double error = std::sqrt(difference / std::max(norm, usual));
    if (!(error <= largest)) largest = error;  // also true for NaN
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

FfnBenchmarkRow row_of(const FfnPattern& pattern, const Subject& subject, const Subject& dense,
                       double error) {
  FfnBenchmarkRow row;
  row.pattern = pattern.name;
  row.policy = subject.plan.policy;
  row.execution = subject.plan.execution;
  row.tokens = pattern.tokens();
  row.nnz_per_token = subject.plan.nnz_per_token();
  row.max_row_nnz = subject.plan.max_row_nnz;
  row.error = error;
  row.time = summarize(subject.seconds);
  std::vector<double> ratios(subject.seconds.size());
  std::transform(dense.seconds.begin(), dense.seconds.end(), subject.seconds.begin(),
                 ratios.begin(), std::divides<>());
  row.speedup = summarize(std::move(ratios)).median;
  return row;
}

void check_fits(const FfnBenchmark& options, const FfnPattern& pattern) {
  const int64_t tokens = pattern.tokens();
  TWELL_REQUIRE(tokens >= 1 && tokens <= options.width,
                "the FFN benchmark takes between 1 token and as many as the width of {}, got {}",
                options.width, tokens);
  TWELL_REQUIRE(options.repeats >= 1, "the number of timed rounds must be positive, got {}",
                options.repeats);
  for (const uint32_t column : pattern.columns) {
    TWELL_REQUIRE(column < options.ffn, "pattern {} names neuron {} of a layer of {}", pattern.name,
                  column, options.ffn);
  }
}

}  // namespace

std::vector<FfnBenchmarkRow> benchmark_ffn(Context& ctx, const FfnBenchmark& options,
                                           const FfnPattern& pattern) {
  check_fits(options, pattern);
  const Layer layer(ctx, options, pattern);
  std::vector<Subject> subjects;
  for (const FfnPolicy policy : kPolicies) subjects.emplace_back(policy, layer, options.width);

  // Check before timing; this also warms up. The tolerance is the rounding of sums of D and F
  // terms.
  const double tolerance = std::numeric_limits<float>::epsilon() *
                           std::sqrt(static_cast<double>(options.width + options.ffn));
  std::vector<double> errors;
  for (Subject& subject : subjects) {
    subject.run(ctx, layer);
    TWELL_CHECK(subject.row_nnz == pattern.row_nnz, "the gate does not give pattern {}",
                pattern.name);
    errors.push_back(largest_row_error(subject.y.matrix(layer.tokens, options.width),
                                       subjects[0].y.matrix(layer.tokens, options.width),
                                       pattern.row_nnz));
    TWELL_CHECK(errors.back() <= tolerance, "{} is off by {} from dense on pattern {}",
                subject.plan.execution.name, errors.back(), pattern.name);
  }
  // Each round starts with another execution, so that cached data favours none.
  for (size_t round = 0; round < static_cast<size_t>(options.repeats); ++round) {
    for (size_t i = 0; i < subjects.size(); ++i) {
      subjects[(i + round) % subjects.size()].run_timed(ctx, layer);
    }
  }
  std::vector<FfnBenchmarkRow> rows;
  for (size_t i = 0; i < subjects.size(); ++i) {
    rows.push_back(row_of(pattern, subjects[i], subjects[0], errors[i]));
  }
  return rows;
}

}  // namespace twell
