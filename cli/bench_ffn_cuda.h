// SPDX-License-Identifier: Apache-2.0
// The GPU side of `twell bench ffn`.
#pragma once

#include <filesystem>
#include <vector>

#include "bench/ffn_benchmark.h"

namespace twell::cli {

// Prints a table and appends its rows to the JSON lines file, unless its name is empty. Requires a
// usable GPU.
void run_bench_ffn_cuda(const FfnBenchmark& options, double energy_seconds,
                        const std::vector<FfnPattern>& patterns,
                        const std::filesystem::path& jsonl);

struct FfnSweepOptions {
  bool quick = false;
  bool gated = true;
  uint64_t seed = 1;
  std::vector<FfnPattern> captured;  // of captured_ffn neurons; stretched to each FFN size
  int64_t captured_ffn = 0;
  std::filesystem::path jsonl;
};
// Runs the sweep of bench/ffn_sweep_cuda.h: shows progress, appends a row for each case, and prints
// how well `auto` chooses for each shape and overall. Requires a usable GPU.
void run_bench_ffn_sweep(const FfnSweepOptions& options);

}  // namespace twell::cli
