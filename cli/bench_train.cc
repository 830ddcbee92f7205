// SPDX-License-Identifier: Apache-2.0
// twell bench train: whole training steps, dense and sparse, on the GPU.
#include "cli/bench_train.h"

#include <memory>

#include "cli/bench.h"
#include "cli/device.h"
#include "cli/train_flags.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

int run_bench_train(const CommonOptions& common, BenchTrain& arguments, bool largest) {
  TWELL_REQUIRE(arguments.micro_batch >= 1 && arguments.micro_batch <= 65536,
                "--micro-batch must be 1 to 65536 sequences, got {}", arguments.micro_batch);
  TWELL_REQUIRE(arguments.length >= 0, "--sequence-length must be 0 or more, got {}",
                arguments.length);
  TWELL_REQUIRE(arguments.steps >= 1, "--steps must be at least 1, got {}", arguments.steps);
  TWELL_REQUIRE(use_cuda(common), "bench train needs a GPU; there is none here");
  if (largest) arguments.micro_batch = 0;
  arguments.seed = common.seed;
  return run_bench_train_cuda(arguments);
}

}  // namespace

void add_bench_train_command(CLI::App& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchTrain>();
  auto largest = std::make_shared<bool>(false);
  CLI::App& command = add_command(
      bench, common, "train", "Whole training steps, dense and sparse (GPU)",
      [&common, arguments, largest] { return run_bench_train(common, *arguments, *largest); });
  command
      .add_option("--preset", arguments->preset, "Model to train, with random weights and tokens")
      ->type_name("NAME")
      ->required();
  command.add_option("--micro-batch", arguments->micro_batch, "Sequences of a step")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--largest", *largest, "The largest micro-batch that fits, instead");
  command
      .add_option("--sequence-length", arguments->length,
                  "Tokens per sequence; 0: the model's context")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--steps", arguments->steps, "Timed steps of each run")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--patterns", arguments->patterns,
                  "Replay these captured activation patterns (safetensors) in the sparse run")
      ->type_name("FILE");
  command
      .add_option("--ffn-policy", arguments->policy,
                  "Executions of the sparse run: auto, hybrid, or dense for none")
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--recompute", arguments->recompute,
                  "As of 'twell train'; repeatable, for runs with each")
      ->type_name("LEVEL")
      ->capture_default_str();
  command
      .add_option("--sparse-recompute", arguments->sparse_recompute,
                  "Also the sparse run with this level; repeatable")
      ->type_name("LEVEL");
  command
      .add_option("--moment-dtype", arguments->moment_dtype, "Type of AdamW's moments: f32, bf16")
      ->type_name("NAME")
      ->check(CLI::IsMember({"f32", "bf16"}).description(""))
      ->capture_default_str();
  command.add_flag("--tune", arguments->tune,
                   "Choose the algorithms of matrix products by a stopwatch, which training does "
                   "not, so that runs repeat");
  command
      .add_option("--jsonl", arguments->jsonl, "Append the result as one JSON line to this file")
      ->type_name("FILE");
  add_compute_options(command, common, Devices::kAny);
  command.footer("Example:\n  twell bench train --preset 2b --micro-batch 8");
}

}  // namespace twell::cli
