// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_ffn_cuda.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "bench/ffn_benchmark_cuda.h"
#include "bench/ffn_sweep_cuda.h"
#include "bench/harness_cuda.h"
#include "cli/bench.h"
#include "cli/progress_line.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

// TFLOP/s with the dense layer's operations: three (non-gated: two) products of 2 M D F.
double dense_equivalent_tflops(const FfnBenchmark& options, const FfnCudaRow& row) {
  const double products = options.gated ? 3.0 : 2.0;
  return products * 2.0 * static_cast<double>(row.tokens) * static_cast<double>(options.width) *
         static_cast<double>(options.ffn) / row.layer.median * 1e-9;
}

// TFLOP/s with only the operations computed: the gate, and the rest for active neurons.
double effective_tflops(const FfnBenchmark& options, const FfnCudaRow& row) {
  if (!row.execution.sparse) return dense_equivalent_tflops(options, row);
  const double pairs =
      static_cast<double>(options.ffn) + (options.gated ? 2.0 : 1.0) * row.nnz_per_token;
  return 2.0 * static_cast<double>(row.tokens) * static_cast<double>(options.width) * pairs /
         row.layer.median * 1e-9;
}

nlohmann::json row_json(const FfnBenchmark& options, const FfnCudaRow& row, double dense_tflops) {
  nlohmann::json json = {{"bench", "ffn"},
                         {"device", "cuda"},
                         {"pattern", row.pattern},
                         {"execution", row.name()},
                         {"auto", row.chosen},
                         {"tokens", row.tokens},
                         {"width", options.width},
                         {"ffn", options.ffn},
                         {"gated", options.gated},
                         {"activation", activation_name(options.activation)},
                         {"nnz_per_token", row.nnz_per_token},
                         {"max_row_nnz", row.max_row_nnz},
                         {"layer_ms", timing_json(row.layer)},
                         {"ratio_to_dense", row.speedup},
                         {"error", row.error},
                         {"effective_tflops", effective_tflops(options, row)},
                         {"dense_equivalent_tflops", dense_equivalent_tflops(options, row)},
                         {"share_of_dense_rate", effective_tflops(options, row) / dense_tflops}};
  if (row.gate.median > 0.0) {
    json["gate_ms"] = timing_json(row.gate);
    json["up_down_ms"] = timing_json(row.up_down);
  }
  if (row.millijoules_per_token > 0.0) json["millijoules_per_token"] = row.millijoules_per_token;
  if (row.chosen) json["reason"] = row.reason;
  if (row.eight_bit) json["arithmetic"] = row.arithmetic;
  return json;
}

Table gpu_layer_table() {
  return Table({{.header = "  runs", .width = 13, .left = true},
                {.header = "", .width = 5, .left = true},
                {.header = "gate", .width = 8, .extra = 1},
                {.header = "up+down", .width = 8, .extra = 1},
                {.header = "layer ms", .width = 9},
                {.header = "p10", .width = 8, .extra = 2},
                {.header = "p90", .width = 8, .extra = 2},
                {.header = "ratio", .width = 6},
                {.header = "TFLOP/s"},
                {.header = "mJ/token"},
                {.header = "error", .width = 7}});
}

void print_row(const Table& table, const FfnBenchmark& options, const FfnCudaRow& row) {
  const auto measured = [](double value) {
    return value > 0.0 ? fmt::format("{:.4f}", value) : "-";
  };
  table.print_row({fmt::format("  {}", row.name()), row.chosen ? "<auto" : "",
                   measured(row.gate.median), measured(row.up_down.median),
                   fmt::format("{:.4f}", row.layer.median), fmt::format("{:.4f}", row.layer.p10),
                   fmt::format("{:.4f}", row.layer.p90), fmt::format("{:.2f}x", row.speedup),
                   fmt::format("{:.0f}", dense_equivalent_tflops(options, row)),
                   measured(row.millijoules_per_token), fmt::format("{:.1e}", row.error)});
}

nlohmann::json sweep_json(const CudaContext& ctx, const FfnSweepRow& row) {
  nlohmann::json json = machine_json(0);
  json.erase("threads");
  json.update(nlohmann::json{{"bench", "ffn sweep"},
                             {"gpu", ctx.device_name()},
                             {"width", row.shape.width},
                             {"ffn", row.shape.ffn},
                             {"gated", row.gated},
                             {"tokens", row.tokens},
                             {"pattern", row.pattern},
                             {"nnz_per_token", row.activity.nnz_per_token},
                             {"union_share", row.activity.union_share},
                             {"largest_union", row.activity.largest_union},
                             {"extra_tiles", row.activity.extra_tiles},
                             {"sparse", row.sparse.name},
                             {"auto", row.chosen.name},
                             {"dense_us", row.dense_us},
                             {"sparse_us", row.sparse_us},
                             {"auto_us", row.auto_us},
                             {"dense_estimate_us", row.dense_estimate_us},
                             {"sparse_estimate_us", row.sparse_estimate_us},
                             {"error", row.error}});
  return json;
}

// Quality of the choices of `auto` over some cases of a sweep.
struct SweepSummary {
  int64_t cases = 0, slower = 0, off_the_best = 0, sparse = 0;
  FfnSweepRow worst;
  double worst_ratio = 0.0;

  void add(const FfnSweepRow& row) {
    const double ratio = row.dense_us / row.auto_us;
    if (cases++ == 0 || ratio < worst_ratio) {
      worst = row;
      worst_ratio = ratio;
    }
    if (ratio < 0.97) ++slower;
    if (row.auto_us > 1.07 * std::min(row.dense_us, row.sparse_us)) ++off_the_best;
    if (row.chosen.sparse) ++sparse;
  }
  std::vector<std::string> cells(const std::string& width, const std::string& ffn) const {
    return {width,
            ffn,
            fmt::format("{}", cases),
            fmt::format("{}", sparse),
            fmt::format("{:.1f}%", percent(slower)),
            fmt::format("{:.1f}%", percent(off_the_best)),
            fmt::format("{:.2f}x: {} tokens, {}, {}", worst_ratio, worst.tokens, worst.pattern,
                        worst.chosen.name)};
  }
  double percent(int64_t count) const {
    return 100.0 * static_cast<double>(count) / static_cast<double>(std::max<int64_t>(cases, 1));
  }
};

}  // namespace

void run_bench_ffn_cuda(const FfnBenchmark& options, double energy_seconds,
                        const std::vector<FfnPattern>& patterns,
                        const std::filesystem::path& jsonl) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  fmt::print("FFN forward, D {}, F {}, {}, {}, bf16, on {}\n", options.width, options.ffn,
             options.gated ? "gated" : "not gated", activation_name(options.activation),
             ctx.device_name());
  use_products_of_build(ctx);
  const Table table = gpu_layer_table();
  table.print_header();
  double ratios = 0.0;  // sum over the patterns of dense time / time of the chosen execution
  for (const FfnPattern& pattern : patterns) {
    const FfnCudaResult result = benchmark_ffn_cuda(ctx, {options, energy_seconds}, pattern);
    const FfnCudaRow& dense = result.rows.front();
    fmt::print("{}: {} tokens, {:.1f} active per token, {} at most\n", dense.pattern, dense.tokens,
               dense.nnz_per_token, dense.max_row_nnz);
    for (const FfnCudaRow& row : result.rows) {
      if (row.chosen) ratios += row.speedup;
      print_row(table, options, row);
      nlohmann::json json = machine_json(0);
      json.erase("threads");
      json["gpu"] = ctx.device_name();
      json.update(row_json(options, row, dense_equivalent_tflops(options, dense)));
      append_jsonl(jsonl, json);
    }
    for (const std::string& execution : result.left_out) {
      print_paragraphs(fmt::format("  left out: {}", execution));
    }
    print_paragraphs(fmt::format("  auto: {}", dense.reason));
  }
  if (patterns.size() > 1) {
    fmt::print("mean ratio of what auto runs: {:.2f}x\n",
               ratios / static_cast<double>(patterns.size()));
  }
  print_paragraphs(
      "ratio: to dense, cuBLASLt's fastest algorithms; TFLOP/s: of the dense layer's operations; "
      "energy: of the whole GPU; error: against dense in bf16. dense-fp8 and dense-int8 are "
      "cuBLASLt's 8-bit GEMMs with a scale per row; x and h are quantised within the time, and the "
      "error is on normal operands as active as the pattern");
  table.print_left_out();
}

void run_bench_ffn_sweep(const FfnSweepOptions& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  FfnSweep sweep = default_ffn_sweep(options.quick);
  sweep.captured = options.captured;
  sweep.captured_ffn = options.captured_ffn;
  sweep.gated = options.gated;
  sweep.seed = options.seed;
  const int64_t cases = case_count(sweep);
  fmt::print("FFN forward, {}, bf16, on {}: {} cases\n", options.gated ? "gated" : "not gated",
             ctx.device_name(), cases);
  use_products_of_build(ctx);
  const Table table({{.header = "D", .width = 5},
                     {.header = "F", .width = 5},
                     {.header = "cases"},
                     {.header = "sparse"},
                     {.header = "<0.97x"},
                     {.header = "7% off"},
                     {.header = "worst of auto against dense", .left = true}});
  table.print_header();
  ProgressLine progress(10.0, stderr);
  const auto start = std::chrono::steady_clock::now();
  SweepSummary all, shape;
  const auto print_shape = [&] {
    progress.clear();
    table.print_row(shape.cells(fmt::format("{}", shape.worst.shape.width),
                                fmt::format("{}", shape.worst.shape.ffn)));
  };
  const std::vector<std::string> left_out = sweep_ffn_cuda(ctx, sweep, [&](const FfnSweepRow& row) {
    if (shape.cases > 0 &&
        (row.shape.width != shape.worst.shape.width || row.shape.ffn != shape.worst.shape.ffn)) {
      print_shape();
      shape = {};
    }
    shape.add(row);
    all.add(row);
    append_jsonl(options.jsonl, sweep_json(ctx, row));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    progress.update(fmt::format(
        "case {}/{}  D {} F {}  {} tokens  ETA {:.0f}s", all.cases, cases, row.shape.width,
        row.shape.ffn, row.tokens,
        seconds.count() / static_cast<double>(all.cases) * static_cast<double>(cases - all.cases)));
  });
  if (shape.cases > 0) print_shape();
  table.print_row(all.cells("all", ""));
  for (const std::string& shape_left_out : left_out) fmt::print("left out: {}\n", shape_left_out);
  print_paragraphs(
      "<0.97x: cases where auto is slower than 0.97 of dense (cuBLASLt's fastest algorithms); 7% "
      "off: where it takes over 7% longer than the better of dense and sparse. Larger shapes take "
      "longer than their share of the cases.");
}

}  // namespace twell::cli
