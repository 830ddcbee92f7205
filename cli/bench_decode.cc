// SPDX-License-Identifier: Apache-2.0
// twell bench decode: generated tokens per second, dense against sparse, on the GPU.
#include <memory>

#include "cli/bench.h"
#include "cli/bench_cuda.h"
#include "cli/device.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

int run_bench_decode(const CommonOptions& common, BenchDecode& arguments) {
  TWELL_REQUIRE(common.checkpoint.empty() != arguments.subject.preset.empty(),
                "bench decode needs either --checkpoint DIR or --preset NAME");
  TWELL_REQUIRE(use_cuda(common), "bench decode needs a GPU; there is none here");
  arguments.subject.checkpoint = common.checkpoint;
  arguments.subject.seed = common.seed;
  arguments.subject.allow_non_finite = common.allow_non_finite;
  return run_bench_decode_cuda(arguments);
}

}  // namespace

void add_bench_decode_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchDecode>();
  Command& command = bench.add("decode", "Tokens a second while generating (GPU)");
  command.runs([&common, arguments] { return run_bench_decode(common, *arguments); });
  add_checkpoint_option(command, common).required(false);
  command.value("--preset", &arguments->subject.preset, "NAME",
                "A preset with random weights instead of a checkpoint");
  command.value("--batch", &arguments->batches, "N", "Sequences decoded together; repeatable")
      .at_least(1)
      .several_values();
  command
      .value("--prompt-tokens", &arguments->prompt, "N", "Tokens of each sequence before the clock")
      .at_least(1);
  command.value("--tokens", &arguments->tokens, "N", "Tokens decoded per sequence").at_least(1);
  command.value("--jsonl", &arguments->jsonl, "FILE", "Append a JSON line per batch to this file");
  add_compute_options(command, common);
  command.footer("Example:\n  twell bench decode --preset 2b --batch 1 --batch 64");
}

}  // namespace twell::cli
