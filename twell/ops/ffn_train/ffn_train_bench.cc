// SPDX-License-Identifier: Apache-2.0
// Forward and backward of one training FFN, dense against hybrid, over densities. Each row times
// the two alternately and reports their medians, so that a busy machine slows both.
//   ffn_train_bench --benchmark_counters_tabular=true
#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "twell/base/rng.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {
namespace {

struct Shape {
  int64_t tokens, width, ffn;
};

// Random weights whose gates are active with the given probability: column 0 of x is 1, and that of
// w_gate the threshold.
struct Layer {
  Layer(const Shape& s, double density) : shape(s), saved(s.tokens, s.ffn, true) {
    const auto fill = [](Buffer<float>& buffer, int64_t rows, int64_t cols, uint64_t stream,
                         float scale) {
      buffer = Buffer<float>(rows * cols);
      for (int64_t i = 0; i < rows * cols; ++i) {
        buffer[i] = scale * normal(3, stream, static_cast<uint64_t>(i));
      }
      return buffer.matrix(rows, cols);
    };
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.width - 1));
    x = fill(buffers[0], s.tokens, s.width, 0, 1.0f);
    d_y = fill(buffers[1], s.tokens, s.width, 1, 1.0f);
    w_gate = fill(buffers[2], s.ffn, s.width, 2, scale);
    w_up = fill(buffers[3], s.ffn, s.width, 3, scale);
    w_down = fill(buffers[4], s.ffn, s.width, 4, scale);
    y = fill(buffers[5], s.tokens, s.width, 5, 0.0f);
    d_x = fill(buffers[6], s.tokens, s.width, 6, 0.0f);
    d_w_gate = fill(buffers[7], s.ffn, s.width, 7, 0.0f);
    d_w_up = fill(buffers[8], s.ffn, s.width, 8, 0.0f);
    d_w_down = fill(buffers[9], s.ffn, s.width, 9, 0.0f);
    for (int64_t m = 0; m < s.tokens; ++m) x(m, 0) = 1.0f;
    const float threshold = static_cast<float>(normal_quantile(density));
    for (int64_t j = 0; j < s.ffn; ++j) w_gate(j, 0) = threshold;
  }

  // z with P(normal < z) = p, by bisection.
  static double normal_quantile(double p) {
    double low = -8.0, high = 8.0;
    for (int i = 0; i < 60; ++i) {
      const double mid = (low + high) / 2;
      (0.5 * std::erfc(-mid / std::sqrt(2.0)) < p ? low : high) = mid;
    }
    return low;
  }

  FfnTrainStats forward(Context& ctx, FfnTrainPolicy policy) {
    return ffn_train_forward(
        ctx, {.weights = {w_gate, w_up, w_down}, .x = x, .y = y, .policy = policy}, saved);
  }
  void backward(Context& ctx) {
    ffn_train_backward(ctx,
                       {.weights = {w_gate, w_up, w_down},
                        .x = x,
                        .d_y = d_y,
                        .l1_scale = 1e-4f,
                        .d_x = d_x,
                        .grads = {d_w_gate, d_w_up, d_w_down}},
                       saved);
  }

  Shape shape;
  Buffer<float> buffers[10];
  MatrixF x, d_y, w_gate, w_up, w_down, y, d_x, d_w_gate, d_w_up, d_w_down;
  FfnSaved saved;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Wall-clock time; with one thread, that thread's processor time, which other programs on the
// machine disturb less.
double now_ms(const Context& ctx) {
  timespec t;
  clock_gettime(ctx.threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

template <typename Fn>
double milliseconds(const Context& ctx, const Fn& fn) {
  const double start = now_ms(ctx);
  fn();
  return now_ms(ctx) - start;
}

void ffn_train_step(benchmark::State& state, const Shape& shape, double density) {
  Context ctx;
  Layer layer(shape, density);
  FfnTrainStats stats;
  std::vector<double> forward[2], backward[2];
  const FfnTrainPolicy policies[] = {FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid};
  for (const FfnTrainPolicy policy : policies) {  // warm-up
    layer.forward(ctx, policy);
    layer.backward(ctx);
  }
  for (auto _ : state) {
    for (int i = 0; i < 2; ++i) {
      forward[i].push_back(milliseconds(ctx, [&] { stats = layer.forward(ctx, policies[i]); }));
      backward[i].push_back(milliseconds(ctx, [&] { layer.backward(ctx); }));
    }
  }
  const double dense = median(forward[0]) + median(backward[0]);
  const double hybrid = median(forward[1]) + median(backward[1]);
  // Nine GEMMs of M F D multiply-adds.
  const double flops = 18.0 * static_cast<double>(shape.tokens * shape.ffn * shape.width);
  state.counters["nnz/row"] = static_cast<double>(stats.nnz) / static_cast<double>(shape.tokens);
  state.counters["tail"] = static_cast<double>(stats.tail_rows);
  state.counters["dense_ms"] = dense;
  state.counters["dense_GFLOP/s"] = flops / dense / 1e6;
  state.counters["hybrid_ms"] = hybrid;
  state.counters["hybrid_fwd"] = median(forward[1]);
  state.counters["speedup"] = dense / hybrid;
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  const twell::Shape shapes[] = {{128, 512, 2048},  {2048, 256, 1024}, {2048, 512, 2048},
                                 {8192, 512, 2048}, {2048, 768, 3072}, {2048, 2048, 5632}};
  for (const twell::Shape& shape : shapes) {
    for (const double density : {0.005, 0.01, 0.02, 0.05, 0.08, 0.12, 0.16, 0.20}) {
      const std::string name = "M" + std::to_string(shape.tokens) + "/D" +
                               std::to_string(shape.width) + "/F" + std::to_string(shape.ffn) +
                               "/density" + std::to_string(density).substr(0, 5);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [=](benchmark::State& state) { twell::ffn_train_step(state, shape, density); })
          ->Unit(benchmark::kMillisecond)
          ->Iterations(7);
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
