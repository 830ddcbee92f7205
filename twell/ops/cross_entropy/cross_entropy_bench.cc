// SPDX-License-Identifier: Apache-2.0
// Cross-entropy with its gradients; the rate counts the three GEMMs of M V D multiply-adds.
#include <benchmark/benchmark.h>

#include <vector>

#include "twell/base/rng.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/ops/cross_entropy/softmax_simd.h"

namespace twell {
namespace {

std::vector<float> random_floats(int64_t n, uint64_t stream, float scale) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * normal(1, stream, i);
  return values;
}

void forward_backward(benchmark::State& state) {
  const int64_t tokens = state.range(0), width = state.range(1), vocab = state.range(2);
  Context ctx;
  const std::vector<float> x = random_floats(tokens * width, 0, 1.0f);
  const std::vector<float> weight = random_floats(vocab * width, 1, 0.02f);
  std::vector<float> d_x(x.size()), d_weight(weight.size());
  std::vector<int32_t> targets(static_cast<size_t>(tokens));
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i] = static_cast<int32_t>(uniform_below(1, 2, i, static_cast<uint64_t>(vocab)));
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(cross_entropy(ctx, {.x = {x.data(), tokens, width},
                                                 .weight = {weight.data(), vocab, width},
                                                 .targets = targets,
                                                 .grad_scale = 1e-3f,
                                                 .d_x = {d_x.data(), tokens, width},
                                                 .d_weight = {d_weight.data(), vocab, width}}));
  }
  const double flops = 6.0 * static_cast<double>(tokens * width * vocab);
  state.counters["FLOP/s"] = benchmark::Counter(flops * static_cast<double>(state.iterations()),
                                                benchmark::Counter::kIsRate);
  state.SetItemsProcessed(state.iterations() * tokens);
}
BENCHMARK(forward_backward)
    ->ArgNames({"M", "D", "V"})
    ->Args({2048, 256, 4096})
    ->Args({2048, 512, 8192})
    ->Args({512, 2048, 49152})
    ->Unit(benchmark::kMillisecond);

// The softmax alone, on a row in the cache.
void softmax_row(benchmark::State& state) {
  const int64_t vocab = state.range(0);
  std::vector<float> row = random_floats(vocab, 3, 2.0f);
  for (auto _ : state) {
    benchmark::DoNotOptimize(exp_row(row.data(), vocab));
    scale_row(row.data(), vocab, 1.0f);
  }
  state.SetItemsProcessed(state.iterations() * vocab);
}
BENCHMARK(softmax_row)->ArgName("V")->Arg(4096)->Arg(49152);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
