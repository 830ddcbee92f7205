// SPDX-License-Identifier: Apache-2.0
// twell bench train: whole training steps, dense and sparse, on the GPU.
#include "cli/bench_train.h"

#include <memory>

#include "cli/bench.h"
#include "cli/device.h"
#include "cli/ranks.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

int run_bench_train(const CommonOptions& common, BenchTrain& arguments, bool largest) {
  TWELL_REQUIRE(use_cuda(common), "bench train needs a GPU; there is none here");
  if (arguments.gpus > 1 && !started_by_launch_ranks()) {
    return launch_ranks({.ranks = arguments.gpus});
  }
  if (largest) arguments.micro_batch = 0;
  arguments.seed = common.seed;
  return run_bench_train_cuda(arguments);
}

}  // namespace

void add_bench_train_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchTrain>();
  auto largest = std::make_shared<bool>(false);
  Command& command = bench.add("train", "Whole training steps, dense and sparse (GPU)");
  command.runs(
      [&common, arguments, largest] { return run_bench_train(common, *arguments, *largest); });
  add_preset_option(command, arguments->preset, "Model to train, with random weights and tokens")
      .required();
  command.value("--micro-batch", &arguments->micro_batch, "N", "Sequences of a step")
      .range(1, 1 << 16);
  command.flag("--largest", largest.get(), "The largest micro-batch that fits, instead");
  command
      .value("--sequence-length", &arguments->length, "N",
             "Tokens per sequence; 0: the model's context")
      .at_least(0);
  command.value("--steps", &arguments->steps, "N", "Timed steps of each run").at_least(1);
  command.value("--patterns", &arguments->patterns, "FILE",
                "Replay these captured activation patterns (safetensors) in the sparse run");
  command
      .value("--ffn-policy", &arguments->policy, "NAME",
             "Executions of the sparse run: auto, hybrid, or dense for none")
      .suggests({"auto", "hybrid", "dense"});
  command
      .value("--recompute", &arguments->recompute, "LEVEL",
             "What backward makes again, as for 'twell train'; repeatable: a run with each")
      .several_values();
  command
      .value("--sparse-recompute", &arguments->sparse_recompute, "LEVEL",
             "Also time the sparse run with this level of recomputation; repeatable")
      .several_values();
  command.choice("--moment-dtype", &arguments->moment_dtype, {"f32", "bf16"},
                 "Type of AdamW's moments");
  command
      .value("--gpus", &arguments->gpus, "N",
             "Train on N GPUs of this machine, a process and a micro-batch each")
      .range(1, 1024)
      .hide_default();
  command.choice("--gradient-dtype", &arguments->gradient_dtype, {"f32", "bf16"},
                 "Type of gradients on their way between GPUs");
  command.flag(
      "--document-mask", &arguments->document_mask,
      "Attention within random documents of about 600 tokens, as 'twell train' has with this flag");
  command.flag("--tune", &arguments->tune,
               "Choose the algorithms of matrix products by a stopwatch, which training does not, "
               "so that runs repeat");
  command.value("--jsonl", &arguments->jsonl, "FILE",
                "Append the result as one JSON line to this file");
  add_compute_options(command, common);
  command.footer(
      "Examples:\n  twell bench train --preset 2b --micro-batch 8\n  twell bench train --preset 2b "
      "--micro-batch 8 --gpus 2");
}

}  // namespace twell::cli
