// SPDX-License-Identifier: Apache-2.0
// Registers the benchmarks below `twell bench`.
#pragma once

#include "bench/harness.h"
#include "cli/options.h"

namespace twell::cli {

void add_bench_forward_command(Command& bench, CommonOptions& common);
void add_bench_decode_command(Command& bench, CommonOptions& common);
void add_bench_ffn_command(Command& bench, CommonOptions& common);
void add_bench_train_command(Command& bench, CommonOptions& common);

}  // namespace twell::cli
