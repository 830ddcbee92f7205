// SPDX-License-Identifier: Apache-2.0
// Bytes per second of the optimizer step (reads 4 floats, writes 3 per parameter) and of the norm.
#include <benchmark/benchmark.h>

#include <vector>

#include "twell/ops/adamw/adamw.h"

namespace twell {
namespace {

void step(benchmark::State& state) {
  const size_t n = static_cast<size_t>(state.range(0));
  Context ctx;
  std::vector<float> weight(n, 0.5f), grad(n, 0.01f), exp_avg(n), exp_avg_sq(n);
  for (auto _ : state) adamw_step(ctx, {}, {weight, grad, exp_avg, exp_avg_sq});
  state.SetBytesProcessed(state.iterations() * state.range(0) * 7 *
                          static_cast<int64_t>(sizeof(float)));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(step)->Arg(1 << 18)->Arg(1 << 24)->Unit(benchmark::kMicrosecond);

void norm(benchmark::State& state) {
  Context ctx;
  const std::vector<float> values(static_cast<size_t>(state.range(0)), 0.01f);
  for (auto _ : state) benchmark::DoNotOptimize(global_norm(ctx, values));
  state.SetBytesProcessed(state.iterations() * state.range(0) *
                          static_cast<int64_t>(sizeof(float)));
}
BENCHMARK(norm)->Arg(1 << 18)->Arg(1 << 24)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
