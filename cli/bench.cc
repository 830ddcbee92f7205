// SPDX-License-Identifier: Apache-2.0
// twell bench: the parts that all benchmarks share.
#include "cli/bench.h"

#include "cli/commands.h"

namespace twell::cli {

void add_bench_command(Command& root, CommonOptions& common) {
  Command& bench = root.add("bench", "Speed of dense and sparse execution");
  add_bench_forward_command(bench, common);
  add_bench_decode_command(bench, common);
  add_bench_ffn_command(bench, common);
  add_bench_train_command(bench, common);
}

}  // namespace twell::cli
