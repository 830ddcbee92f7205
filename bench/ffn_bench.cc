// SPDX-License-Identifier: Apache-2.0
// FFN forward on synthetic patterns from 0.05% to 100% density and from one token up. An iteration
// reports the median time of an execution, `speedup` its ratio to dense in the same run.
#include <benchmark/benchmark.h>

#include <string>

#include "bench/ffn_benchmark.h"

namespace twell {
namespace {

void run(benchmark::State& state, int64_t tokens, double density, bool gated) {
  Context ctx;
  const FfnBenchmark options{.gated = gated};
  const FfnPattern pattern = random_pattern("random", tokens, options.ffn, density, 1);
  for (auto _ : state) {
    for (const FfnBenchmarkRow& row : benchmark_ffn(ctx, options, pattern)) {
      if (row.policy != FfnPolicy::kAuto) {
        state.counters[std::string(row.execution.name) + "_ms"] = row.time.median * 1e3;
        continue;
      }
      state.SetIterationTime(row.time.median);
      state.SetLabel(std::string(row.execution.name));
      state.counters["speedup"] = row.speedup;
      state.counters["nnz"] = row.nnz_per_token;
    }
  }
}

void add(int64_t tokens, double percent, bool gated) {
  const std::string name = std::string(gated ? "gated" : "plain") + "/M:" + std::to_string(tokens) +
                           "/percent:" + std::to_string(percent).substr(0, 5);
  benchmark::RegisterBenchmark(name.c_str(), run, tokens, percent / 100.0, gated)
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  for (const double percent : {0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 20.0, 30.0, 50.0, 100.0}) {
    twell::add(512, percent, true);
  }
  for (const double percent : {0.5, 3.0, 100.0}) {
    twell::add(512, percent, false);
    for (const int64_t tokens : {1, 8, 64}) twell::add(tokens, percent, true);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
