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

}  // namespace twell::cli
