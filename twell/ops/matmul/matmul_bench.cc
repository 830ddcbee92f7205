// SPDX-License-Identifier: Apache-2.0
// matmul_bench: GFLOP/s and weight bandwidth at the shapes of training, prefill and decode.
#include "twell/ops/matmul/matmul.h"

#include <benchmark/benchmark.h>

#include <vector>

#include "twell/base/buffer.h"

namespace twell {
namespace {

enum Kind { kForward, kInputGradient, kWeightGradient };

// Arguments: tokens, inputs and outputs of a linear layer. Calls rotate over enough copies of the
// weight that it does not stay in the caches, as in a model of many layers.
void linear(benchmark::State& state, Kind kind) {
  const int64_t tokens = state.range(0), in = state.range(1), out = state.range(2);
  const int64_t copies = std::max<int64_t>(1, (int64_t{64} << 20) / (in * out * 4));
  Context ctx;
  Buffer<float> x(tokens * in), y(tokens * out), weight(copies * in * out);
  for (int64_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3.0f;
  for (int64_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(i % 5) - 2.0f;
  for (int64_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 3) - 1.0f;
  int64_t call = 0;
  const auto run = [&] {
    const MatrixF w(weight.data() + call++ % copies * in * out, out, in);
    const MatrixF rows_x = x.matrix(tokens, in), rows_y = y.matrix(tokens, out);
    if (kind == kForward) linear_forward(ctx, rows_x, w, rows_y);
    if (kind == kInputGradient) matmul(ctx, {.a = rows_y, .b = w, .c = rows_x});
    if (kind == kWeightGradient) {
      matmul(ctx, {.a = rows_y, .b = rows_x, .c = w, .trans_a = true, .beta = 1.0f});
    }
  };
  run();
  for (auto _ : state) run();
  using benchmark::Counter;
  const double calls = static_cast<double>(state.iterations());
  const double elements = static_cast<double>(in * out);
  state.counters["GFLOP/s"] =
      Counter(2e-9 * calls * static_cast<double>(tokens) * elements, Counter::kIsRate);
  state.counters["weights GB/s"] = Counter(4e-9 * calls * elements, Counter::kIsRate);
}

void training_shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t tokens : {1024, 8192}) {
    for (const auto& [in, out] : {std::pair{256, 256}, {256, 1024}, {1024, 256}, {256, 4096}}) {
      bench->Args({tokens, in, out});
    }
  }
  bench->Args({4096, 768, 3072});
}

BENCHMARK_CAPTURE(linear, forward, kForward)->Apply(training_shapes)->UseRealTime();
BENCHMARK_CAPTURE(linear, input_gradient, kInputGradient)->Apply(training_shapes)->UseRealTime();
BENCHMARK_CAPTURE(linear, weight_gradient, kWeightGradient)->Apply(training_shapes)->UseRealTime();
BENCHMARK_CAPTURE(linear, prefill, kForward)->Args({512, 2048, 5632})->UseRealTime();
BENCHMARK_CAPTURE(linear, decode, kForward)
    ->ArgsProduct({{1, 2, 4, 8, 16, 32}, {256, 2048}, {1024, 5632}})
    ->UseRealTime();

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
