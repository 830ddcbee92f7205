// SPDX-License-Identifier: Apache-2.0
// twell bench ffn: one feed-forward layer, every execution against dense, on captured or synthetic
// activation patterns.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "bench/ffn_benchmark.h"
#include "cli/bench.h"
#include "cli/bench_ffn_cuda.h"
#include "cli/device.h"
#include "cli/process.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

struct BenchFfnArguments {
  FfnBenchmark benchmark;
  std::vector<std::string> activations;  // none: relu
  std::filesystem::path patterns;
  std::optional<int64_t> layer;
  int64_t tokens = 0;  // 0: a default for the device
  int64_t begin = 0;
  std::vector<double> nnz;
  double energy_seconds = 1.0;
  bool sweep = false;
  bool quick = false;
  std::filesystem::path jsonl;
};

std::vector<FfnPattern> captured_patterns(const BenchFfnArguments& arguments) {
  const SafetensorsFile file(arguments.patterns);
  std::set<int64_t> layers = captured_layers(file);
  if (arguments.layer) layers = {*arguments.layer};
  std::vector<FfnPattern> patterns;
  for (const int64_t layer : layers) {
    const FfnPattern captured = captured_pattern(file, layer, arguments.benchmark.ffn);
    const bool again = arguments.begin + arguments.tokens > captured.tokens();
    FfnPattern& pattern =
        patterns.emplace_back(repeated(captured, arguments.begin, arguments.tokens));
    pattern.name = fmt::format("{} layer {} tokens {}..{}{}", arguments.patterns.stem().string(),
                               layer, arguments.begin, arguments.begin + arguments.tokens - 1,
                               again ? fmt::format(" of {}, repeated", captured.tokens()) : "");
  }
  return patterns;
}

// Patterns of random neurons, at the requested means or over a sweep of densities.
std::vector<FfnPattern> synthetic_patterns(const BenchFfnArguments& arguments, uint64_t seed) {
  const double ffn = static_cast<double>(arguments.benchmark.ffn);
  std::vector<double> densities;
  for (const double nnz : arguments.nnz) {
    TWELL_REQUIRE(nnz >= 0.0 && nnz <= ffn, "--nnz must be 0 to {} (the FFN size), got {}", ffn,
                  nnz);
    densities.push_back(nnz / ffn);
  }
  if (densities.empty()) densities = {0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0};
  std::vector<FfnPattern> patterns;
  for (const double density : densities) {
    patterns.push_back(random_pattern(fmt::format("random {:g}%", density * 100.0),
                                      arguments.tokens, arguments.benchmark.ffn, density, seed));
  }
  return patterns;
}

Table layer_table() {
  return Table({{.header = "  policy", .width = 12, .left = true},
                {.header = "runs", .width = 10, .left = true},
                {.header = "ms", .width = 9},
                {.header = "p10", .width = 8, .extra = 1},
                {.header = "p90", .width = 8, .extra = 1},
                {.header = "tok/s", .width = 9},
                {.header = "GFLOP/s*", .width = 8},
                {.header = "ratio", .width = 6},
                {.header = "error", .width = 7}});
}

void print_row(const Table& table, const FfnBenchmarkRow& row, const FfnBenchmark& options) {
  // Dense FLOPs: three (non-gated: two) matrix products of 2 M D F operations each.
  const double dense_flops = (options.gated ? 6.0 : 4.0) * static_cast<double>(row.tokens) *
                             static_cast<double>(options.width) * static_cast<double>(options.ffn);
  const std::string execution(row.execution.name);
  table.print_row({fmt::format("  {}", row.policy == FfnPolicy::kAuto ? "auto" : execution),
                   execution, fmt::format("{:.3f}", row.time.median * 1e3),
                   fmt::format("{:.3f}", row.time.p10 * 1e3),
                   fmt::format("{:.3f}", row.time.p90 * 1e3),
                   fmt::format("{:.0f}", static_cast<double>(row.tokens) / row.time.median),
                   fmt::format("{:.1f}", dense_flops / row.time.median * 1e-9),
                   fmt::format("{:.2f}x", row.speedup), fmt::format("{:.1e}", row.error)});
}

nlohmann::json to_json(const FfnBenchmarkRow& row, const FfnBenchmark& options, int threads) {
  nlohmann::json json = machine_json(threads);
  json["bench"] = "ffn";
  json["pattern"] = row.pattern;
  json["policy"] = row.policy == FfnPolicy::kAuto ? "auto" : row.execution.name;
  json["execution"] = row.execution.name;
  json["tokens"] = row.tokens;
  json["width"] = options.width;
  json["ffn"] = options.ffn;
  json["gated"] = options.gated;
  json["activation"] = activation_name(options.activation);
  json["nnz_per_token"] = row.nnz_per_token;
  json["max_row_nnz"] = row.max_row_nnz;
  json["median_s"] = row.time.median;
  json["p10_s"] = row.time.p10;
  json["p90_s"] = row.time.p90;
  json["ratio_to_dense"] = row.speedup;
  json["error"] = row.error;
  return json;
}

// Checks memory for the weights and the activations of every execution before drawing patterns,
// which is slow.
void require_room(const BenchFfnArguments& arguments) {
  const int64_t width = arguments.benchmark.width, ffn = arguments.benchmark.ffn;
  const double d = static_cast<double>(width), f = static_cast<double>(ffn);
  const double bytes = 4.0 * (3.0 * d * f + static_cast<double>(arguments.tokens) * (2.0 * d + f));
  require_memory(static_cast<int64_t>(std::min(bytes, 1e18)));
}

int run_sweep(const CommonOptions& common, BenchFfnArguments& arguments, bool cuda) {
  TWELL_REQUIRE(cuda, "--sweep times GPU kernels; this run uses the CPU");
  for (const std::string& activation : arguments.activations) {
    TWELL_REQUIRE(activation == "relu", "--sweep times relu, not {}", activation);
  }
  constexpr int64_t kCapturedTokens = 1024;  // the sweep repeats these tokens
  arguments.tokens = kCapturedTokens;
  FfnSweepOptions options{.quick = arguments.quick,
                          .gated = arguments.benchmark.gated,
                          .seed = common.seed,
                          .captured_ffn = arguments.benchmark.ffn,
                          .jsonl = arguments.jsonl};
  if (!arguments.patterns.empty()) options.captured = captured_patterns(arguments);
  run_bench_ffn_sweep(options);
  return kExitOk;
}

// The layer with benchmark.activation on every pattern.
void run_layer(const CommonOptions& common, const BenchFfnArguments& arguments, bool cuda,
               const std::vector<FfnPattern>& patterns) {
  if (cuda) {
    run_bench_ffn_cuda(arguments.benchmark, arguments.energy_seconds, patterns, arguments.jsonl);
    return;
  }
  Context ctx(common.threads);
  print_paragraphs(fmt::format(
      "FFN forward, D {}, F {}, {}, {}, f32, on {} ({} threads)", arguments.benchmark.width,
      arguments.benchmark.ffn, arguments.benchmark.gated ? "gated" : "not gated",
      activation_name(arguments.benchmark.activation), cpu_name(), ctx.threads()));
  const Table table = layer_table();
  table.print_header();
  for (const FfnPattern& pattern : patterns) {
    const std::vector<FfnBenchmarkRow> rows = benchmark_ffn(ctx, arguments.benchmark, pattern);
    fmt::print("{}: {:.1f} active per token, {} at most\n", rows.front().pattern,
               rows.front().nnz_per_token, rows.front().max_row_nnz);
    for (const FfnBenchmarkRow& row : rows) {
      print_row(table, row, arguments.benchmark);
      append_jsonl(arguments.jsonl, to_json(row, arguments.benchmark, ctx.threads()));
    }
  }
  fmt::print("* dense-equivalent: the operations of the dense layer over the time taken\n");
  table.print_left_out();
}

int run_bench_ffn(const CommonOptions& common, BenchFfnArguments& arguments) {
  const bool cuda = use_cuda(common);
  if (arguments.sweep) return run_sweep(common, arguments, cuda);
  if (arguments.tokens == 0) arguments.tokens = cuda ? 16384 : 512;
  require_room(arguments);
  arguments.benchmark.seed = common.seed;
  const std::vector<FfnPattern> patterns = arguments.patterns.empty()
                                               ? synthetic_patterns(arguments, common.seed)
                                               : captured_patterns(arguments);
  if (arguments.activations.empty()) arguments.activations = {"relu"};
  for (const std::string& activation : arguments.activations) {
    arguments.benchmark.activation = parse_activation(activation, "--activation");
    run_layer(common, arguments, cuda, patterns);
  }
  return kExitOk;
}

}  // namespace

void add_bench_ffn_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchFfnArguments>();
  Command& command = bench.add("ffn", "One feed-forward layer");
  command.runs([&common, arguments] { return run_bench_ffn(common, *arguments); });
  FfnBenchmark& benchmark = arguments->benchmark;
  Option& patterns = command.value("--patterns", &arguments->patterns, "FILE",
                                   "Captured activation patterns: safetensors with layerN.row_nnz "
                                   "and layerN.col; repeated where --tokens are more");
  command.value("--layer", &arguments->layer, "N", "Layer of the patterns; default: each in turn")
      .needs(patterns);
  command.value("--begin", &arguments->begin, "N", "First token of the captured patterns to use")
      .at_least(0);
  command
      .value("--nnz", &arguments->nnz, "K",
             "Without --patterns: mean active neurons per token, random; repeatable. Default: a "
             "sweep from 0.05% to 100%")
      .excludes(patterns);
  command
      .value("--tokens", &arguments->tokens, "M",
             "Tokens per call; default: 512 on the CPU, 16384 on a GPU")
      .at_least(0)
      .hide_default();
  command.value("--width", &benchmark.width, "D", "Width of the layer").at_least(1);
  command.value("--ffn", &benchmark.ffn, "F", "Neurons of the layer").at_least(1);
  command.flag("--gated", "--no-gated", &benchmark.gated, "With a gate projection (the default)");
  command
      .value("--activation", &arguments->activations, "NAME",
             "relu, the default, or relu2, its square; repeatable, to compare them")
      .choices({"relu", "relu2"});
  command.value("--repeats", &benchmark.repeats, "N", "Timed rounds, each running everything once")
      .at_least(1);
  command.value("--jsonl", &arguments->jsonl, "FILE",
                "Append each row as one JSON line to this file");
  command
      .value("--energy-seconds", &arguments->energy_seconds, "S",
             "GPU: how long each execution runs for its energy per token; 0: not measured")
      .at_least(0);
  Option& sweep = command.flag(
      "--sweep", &arguments->sweep,
      "GPU: ten shapes, 1 to 65,536 tokens and all activities instead of one layer: where auto is "
      "slower than dense, or not the best; --patterns, of --ffn neurons, are stretched to each "
      "shape");
  command.flag("--quick", &arguments->quick, "Run a tenth of the sweep").needs(sweep);
  add_compute_options(command, common);
  command.footer(
      "The layer's own gate fires as in the pattern; results are compared with dense first. On a\n"
      "GPU and with more than 2,048 tokens, the pattern is replayed behind a gate GEMM that runs\n"
      "on random operands, firing as often.\n\n"
      "Example:\n  twell bench ffn --tokens 512 --nnz 30 --nnz 300");
}

}  // namespace twell::cli
