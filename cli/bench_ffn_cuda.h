// SPDX-License-Identifier: Apache-2.0
// The GPU side of `twell bench ffn`; built with or without CUDA.
#pragma once

#include <filesystem>
#include <vector>

#include "bench/ffn_benchmark.h"

namespace twell::cli {

// Prints a table, and appends its rows to the JSON lines file unless its name is empty. Only where
// a GPU can be used.
void run_bench_ffn_cuda(const FfnBenchmark& options, double energy_seconds,
                        const std::vector<FfnPattern>& patterns,
                        const std::filesystem::path& jsonl);

struct FfnSweepOptions {
  bool quick = false;
  bool gated = true;
  uint64_t seed = 1;
  std::vector<FfnPattern> captured;  // of captured_ffn neurons, stretched to each FFN size
  int64_t captured_ffn = 0;
  std::filesystem::path jsonl;
};
// The sweep of bench/ffn_sweep_cuda.h: prints how auto does for each shape and on the whole, with
// its progress, and appends a row for each case. Only where a GPU can be used.
void run_bench_ffn_sweep(const FfnSweepOptions& options);

}  // namespace twell::cli
