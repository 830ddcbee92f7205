// SPDX-License-Identifier: Apache-2.0
// twell bench decode: tokens a second while generating, dense against sparse, on the GPU.
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
  for (const int64_t batch : arguments.batches) {
    TWELL_REQUIRE(batch >= 1, "--batch must be at least 1, got {}", batch);
  }
  TWELL_REQUIRE(arguments.prompt >= 1 && arguments.tokens >= 1,
                "--prompt-tokens and --tokens must be positive, got {} and {}", arguments.prompt,
                arguments.tokens);
  TWELL_REQUIRE(use_cuda(common), "bench decode needs a GPU; there is none here");
  arguments.subject.checkpoint = common.checkpoint;
  arguments.subject.seed = common.seed;
  return run_bench_decode_cuda(arguments);
}

}  // namespace

void add_bench_decode_command(CLI::App& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchDecode>();
  CLI::App& command =
      add_command(bench, common, "decode", "Tokens a second while generating (GPU)",
                  [&common, arguments] { return run_bench_decode(common, *arguments); });
  add_checkpoint_option(command, common)->required(false);
  command
      .add_option("--preset", arguments->subject.preset,
                  "A preset with random weights instead of a checkpoint")
      ->type_name("NAME");
  command.add_option("--batch", arguments->batches, "Sequences decoded together; repeatable")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--prompt-tokens", arguments->prompt, "Tokens of each sequence before the clock")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--tokens", arguments->tokens, "Tokens decoded per sequence")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--jsonl", arguments->jsonl, "Append a JSON line per batch to this file")
      ->type_name("FILE");
  add_compute_options(command, common, Devices::kAny);
  command.footer("Example:\n  twell bench decode --preset 2b --batch 1 --batch 64");
}

}  // namespace twell::cli
