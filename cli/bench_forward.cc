// SPDX-License-Identifier: Apache-2.0
// twell bench forward: a whole model, dense against sparse, on the same tokens in one run.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "bench/forward_comparison.h"
#include "bench/synthetic_model.h"
#include "cli/bench.h"
#include "cli/bench_cuda.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/mapped_model.h"

namespace twell::cli {
namespace {

struct BenchForwardArguments {
  ForwardComparisonOptions comparison;
  TextOptions text;
  std::string preset;
  std::string ffn = "auto";
  std::filesystem::path jsonl;
  // GPU only:
  std::filesystem::path patterns;
  double seconds = 3.0;
};

struct Subject {
  std::shared_ptr<const ModelView> model;
  std::vector<int32_t> ids;
  std::string description;
  bool synthetic = false;
};

// A preset with random weights, of whose neurons about one in 200 is active.
Subject untrained(Context& ctx, const BenchForwardArguments& arguments, uint64_t seed) {
  const ModelConfig config = preset_config(arguments.preset);
  const int64_t length =
      arguments.comparison.length == 0 ? config.context : arguments.comparison.length;
  TWELL_REQUIRE(length <= config.context,
                "--sequence-length must be 1 to {} (the model's context), got {}", config.context,
                length);
  const int64_t tokens = arguments.comparison.sequences * length;
  // Weights, and the final hidden states of a dense and of a sparse run, in f32.
  require_memory(4 * (config.parameter_count() + 2 * tokens * config.width));
  std::unique_ptr<Model> model = synthetic_model(ctx, config, seed);
  set_synthetic_sparsity(*model, true);
  Subject subject;
  subject.model = std::move(model);
  subject.ids = random_tokens(tokens, config.vocab_size, seed);
  subject.description = describe({.preset = arguments.preset});
  subject.synthetic = true;
  return subject;
}

// The first tokens of the text that fill the batch; without a text random ones.
std::vector<int32_t> batch_of_text(const CommonOptions& common,
                                   const BenchForwardArguments& arguments) {
  const int64_t length = arguments.comparison.length == 0 ? load_config(common.checkpoint).context
                                                          : arguments.comparison.length;
  const int64_t tokens = arguments.comparison.sequences * length;
  if (!common.data.empty() || !arguments.text.shards.empty()) {
    return first_tokens(common, arguments.text, tokens);
  }
  const ModelConfig config = load_config(common.checkpoint);
  TWELL_REQUIRE(length <= config.context,
                "--sequence-length must be 1 to {} (the model's context), got {}", config.context,
                length);
  return random_tokens(tokens, config.vocab_size, common.seed);
}

Subject trained(Context& ctx, const CommonOptions& common, const BenchForwardArguments& arguments) {
  std::vector<int32_t> ids = batch_of_text(common, arguments);
  return {.model = map_model(ctx, common.checkpoint, load_options(common)),
          .ids = std::move(ids),
          .description = fmt::format("checkpoint {}", common.checkpoint.string())};
}

void print_table(const ForwardComparison& result, const Subject& subject, int threads,
                 const std::string& compute) {
  print_paragraphs(fmt::format("{} on {} ({} threads{}), {} tokens a run", subject.description,
                               cpu_name(), threads,
                               compute == "f32" ? "" : ", --compute " + compute, result.tokens));
  if (subject.synthetic) fmt::print("synthetic: about one neuron in 200 fires, at random\n");
  const Table speeds({{.header = "", .width = 11, .left = true},
                      {.header = "dense tok/s"},
                      {.header = "sparse tok/s"},
                      {.header = "ratio", .width = 6},
                      {.header = "dense ms", .width = 8},
                      {.header = "p10", .width = 8, .extra = 1},
                      {.header = "p90", .width = 8, .extra = 1},
                      {.header = "sparse ms", .width = 8},
                      {.header = "p10", .width = 8, .extra = 1},
                      {.header = "p90", .width = 8, .extra = 1}});
  const auto print_speeds = [&](const char* name, const Timing& dense, const Timing& sparse) {
    std::vector<std::string> cells = {
        name, fmt::format("{:.0f}", static_cast<double>(result.tokens) / dense.median),
        fmt::format("{:.0f}", static_cast<double>(result.tokens) / sparse.median),
        fmt::format("{:.2f}x", dense.median / sparse.median)};
    for (const Timing& time : {dense, sparse}) {
      for (const double seconds : {time.median, time.p10, time.p90}) {
        cells.push_back(fmt::format("{:.1f}", seconds * 1e3));
      }
    }
    speeds.print_row(cells);
  };
  speeds.print_header();
  print_speeds("layers", result.dense_body, result.sparse_body);
  print_speeds("with logits", result.dense_full, result.sparse_full);
  fmt::print("largest |logit| {:.3f}, largest difference {:.3g}\n", result.max_abs_logit,
             result.max_abs_logit_diff);

  const Table layers({{.header = "layer"},
                      {.header = "active/tok"},
                      {.header = "density"},
                      {.header = "execution", .width = 10, .left = true},
                      {.header = "reason", .width = 50, .left = true, .extra = 1}});
  layers.print_header();
  for (size_t i = 0; i < result.layers.size(); ++i) {
    const LayerComparison& layer = result.layers[i];
    const double density = layer.nnz_per_token / static_cast<double>(subject.model->config.ffn);
    layers.print_row({fmt::format("{}", i), fmt::format("{:.1f}", layer.nnz_per_token),
                      fmt::format("{:.2f}%", 100.0 * density), std::string(layer.execution.name),
                      layer.reason});
  }
  layers.print_left_out();
}

nlohmann::json to_json(const ForwardComparison& result, const Subject& subject, int threads) {
  nlohmann::json row = machine_json(threads);
  row["bench"] = "forward";
  row["subject"] = subject.description;
  row["tokens"] = result.tokens;
  row["ffn"] = subject.model->config.ffn;
  row["dense"] = {{"layers", rate_json(result.dense_body, result.tokens)},
                  {"full", rate_json(result.dense_full, result.tokens)},
                  {"processor_seconds", result.dense_processor.median}};
  row["sparse"] = {{"layers", rate_json(result.sparse_body, result.tokens)},
                   {"full", rate_json(result.sparse_full, result.tokens)},
                   {"processor_seconds", result.sparse_processor.median}};
  row["max_abs_logit"] = result.max_abs_logit;
  row["max_abs_logit_diff"] = result.max_abs_logit_diff;
  for (const LayerComparison& layer : result.layers) {
    row["per_layer"].push_back({{"nnz_per_token", layer.nnz_per_token},
                                {"execution", layer.execution.name},
                                {"reason", layer.reason}});
  }
  return row;
}

int run_on_gpu(const CommonOptions& common, const BenchForwardArguments& arguments) {
  BenchForwardCuda bench{.subject = {.checkpoint = common.checkpoint,
                                     .preset = arguments.preset,
                                     .seed = common.seed,
                                     .allow_non_finite = common.allow_non_finite,
                                     .weights = load_options(common).weights,
                                     .head_in_bytes = load_options(common).head_in_bytes},
                         .sequences = arguments.comparison.sequences,
                         .length = arguments.comparison.length,
                         .policy = arguments.comparison.sparse,
                         .seconds = arguments.seconds,
                         .patterns = arguments.patterns,
                         .jsonl = arguments.jsonl};
  if (arguments.preset.empty()) bench.ids = batch_of_text(common, arguments);
  return run_bench_forward_cuda(bench);
}

int run_bench_forward(const CommonOptions& common, BenchForwardArguments& arguments) {
  arguments.comparison.sparse = parse_ffn_policy(arguments.ffn);
  TWELL_REQUIRE(common.checkpoint.empty() != arguments.preset.empty(),
                "bench forward needs either --checkpoint DIR or --preset NAME");
  if (use_cuda(common)) return run_on_gpu(common, arguments);
  TWELL_REQUIRE(arguments.patterns.empty(), "--patterns needs a GPU");
  TWELL_REQUIRE(arguments.preset.empty() || common.weights == "stored",
                "--weights {} needs --checkpoint on the CPU", common.weights);
  Context ctx(common.threads);
  use_compute(ctx, common);
  const Subject subject = arguments.preset.empty() ? trained(ctx, common, arguments)
                                                   : untrained(ctx, arguments, common.seed);
  const ForwardComparison result =
      compare_forward(ctx, *subject.model, subject.ids, arguments.comparison);
  print_table(result, subject, ctx.threads(), common.compute);
  nlohmann::json row = to_json(result, subject, ctx.threads());
  row["compute"] = common.compute;
  append_jsonl(arguments.jsonl, row);
  return kExitOk;
}

}  // namespace

void add_bench_forward_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchForwardArguments>();
  Command& command = bench.add("forward", "Forward of a whole model");
  command.runs([&common, arguments] { return run_bench_forward(common, *arguments); });
  add_checkpoint_option(command, common).required(false);
  add_weights_option(command, common);
  add_preset_option(command, arguments->preset,
                    "A preset with random weights instead of a checkpoint");
  add_text_options(command, common, arguments->text);
  command.value("--batch", &arguments->comparison.sequences, "N", "Sequences per run")
      .range(1, 1 << 16);
  command
      .value("--sequence-length", &arguments->comparison.length, "N",
             "Tokens per sequence; 0: the model's context")
      .at_least(0);
  command.value("--repeats", &arguments->comparison.repeats, "N", "Timed runs of each, in turn");
  add_ffn_option(command, arguments->ffn, "Execution to compare with dense");
  command.value("--patterns", &arguments->patterns, "FILE",
                "GPU: replay these captured activation patterns (safetensors) in the sparse run; "
                "the gate GEMM still runs");
  command.value("--seconds", &arguments->seconds, "S", "GPU: time over which each run is measured")
      .range(0.01, 600.0);
  command.value("--jsonl", &arguments->jsonl, "FILE",
                "Append the result as one JSON line to this file");
  add_compute_options(command, common);
  command.footer(
      "Example:\n  twell bench forward --checkpoint runs/first/checkpoint --shards "
      "runs/first/shards");
}

}  // namespace twell::cli
