// SPDX-License-Identifier: Apache-2.0
// twell bench decode: generated tokens per second, dense against sparse, on the GPU.
#include <algorithm>
#include <memory>

#include "cli/bench.h"
#include "cli/bench_cuda.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

struct BenchDecodeArguments {
  BenchDecode bench;
  TextOptions text;
};

int run_bench_decode(const CommonOptions& common, BenchDecodeArguments& arguments) {
  BenchDecode& bench = arguments.bench;
  TWELL_REQUIRE(common.checkpoint.empty() != bench.subject.preset.empty(),
                "bench decode needs either --checkpoint DIR or --preset NAME");
  TWELL_REQUIRE(bench.subject.kv_heads == 0 || common.checkpoint.empty(),
                "--kv-heads changes a preset; the heads of a checkpoint are in its config.json");
  TWELL_REQUIRE(use_cuda(common), "bench decode needs a GPU; there is none here");
  bench.subject.checkpoint = common.checkpoint;
  bench.subject.seed = common.seed;
  bench.subject.allow_non_finite = common.allow_non_finite;
  if (!common.data.empty() || !arguments.text.shards.empty()) {
    TWELL_REQUIRE(bench.subject.preset.empty(),
                  "--data and --shards need --checkpoint: a preset has no tokenizer");
    bench.prompts =
        first_tokens(common, arguments.text, std::ranges::max(bench.batches) * bench.prompt);
  }
  return run_bench_decode_cuda(bench);
}

}  // namespace

void add_bench_decode_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchDecodeArguments>();
  BenchDecode& bench_decode = arguments->bench;
  Command& command = bench.add("decode", "Tokens a second while generating (GPU)");
  command.runs([&common, arguments] { return run_bench_decode(common, *arguments); });
  add_checkpoint_option(command, common).required(false);
  command.value("--preset", &bench_decode.subject.preset, "NAME",
                "A preset with random weights instead of a checkpoint");
  command
      .value("--kv-heads", &bench_decode.subject.kv_heads, "N",
             "Key/value heads of the preset, a divisor of its heads (default: one for each head)")
      .at_least(1);
  add_text_options(command, common, arguments->text);
  command.value("--batch", &bench_decode.batches, "N", "Sequences decoded together; repeatable")
      .at_least(1)
      .several_values();
  command
      .value("--prompt-tokens", &bench_decode.prompt, "N",
             "Tokens of each sequence before the clock")
      .at_least(1);
  command.value("--tokens", &bench_decode.tokens, "N", "Tokens decoded per sequence").at_least(1);
  command
      .value("--temperature", &bench_decode.temperature, "X",
             "Of the tokens that are drawn; 0: the most likely one")
      .range(0, 100);
  command.value("--jsonl", &bench_decode.jsonl, "FILE",
                "Append a JSON line per batch to this file");
  add_compute_options(command, common);
  command.footer("Example:\n  twell bench decode --preset 2b --batch 1 --batch 64");
}

}  // namespace twell::cli
