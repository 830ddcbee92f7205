// SPDX-License-Identifier: Apache-2.0
// Registers the benchmarks below `twell bench`.
#pragma once

#include "bench/harness.h"
#include "cli/loading.h"
#include "cli/options.h"

namespace twell::cli {

void add_bench_forward_command(Command& bench, CommonOptions& common);
void add_bench_decode_command(Command& bench, CommonOptions& common);
void add_bench_ffn_command(Command& bench, CommonOptions& common);
void add_bench_train_command(Command& bench, CommonOptions& common);

// The first tokens of the text, as the checkpoint's tokenizer splits it. InputError when it has
// fewer.
std::vector<int32_t> first_tokens(const CommonOptions& common, const TextOptions& text,
                                  int64_t tokens);

}  // namespace twell::cli
