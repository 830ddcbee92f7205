// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_ffn_cuda.h"

#include "twell/base/error.h"

#ifdef TWELL_HAVE_CUDA
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "bench/ffn_benchmark_cuda.h"
#include "cli/bench.h"
#endif

namespace twell::cli {

#ifdef TWELL_HAVE_CUDA
namespace {

// TFLOP/s of the layer as if nothing were skipped: three (non-gated: two) products of 2 M D F.
double dense_equivalent_tflops(const FfnBenchmark& options, const FfnCudaRow& row) {
  const double products = options.gated ? 3.0 : 2.0;
  return products * 2.0 * static_cast<double>(row.tokens) * static_cast<double>(options.width) *
         static_cast<double>(options.ffn) / row.layer.median_ms * 1e-9;
}

// Of what is computed: the gate, and the rest on active neurons only.
double effective_tflops(const FfnBenchmark& options, const FfnCudaRow& row) {
  if (row.execution == FfnExecution::kDense) return dense_equivalent_tflops(options, row);
  const double pairs =
      static_cast<double>(options.ffn) + (options.gated ? 2.0 : 1.0) * row.nnz_per_token;
  return 2.0 * static_cast<double>(row.tokens) * static_cast<double>(options.width) * pairs /
         row.layer.median_ms * 1e-9;
}

nlohmann::json timing_json(const FfnCudaTiming& timing) {
  return {{"median", timing.median_ms}, {"p10", timing.p10_ms}, {"p90", timing.p90_ms}};
}

nlohmann::json row_json(const FfnBenchmark& options, const FfnCudaRow& row, double dense_tflops) {
  nlohmann::json json = {{"bench", "ffn"},
                         {"device", "cuda"},
                         {"pattern", row.pattern},
                         {"execution", ffn_execution_name(row.execution)},
                         {"auto", row.chosen},
                         {"tokens", row.tokens},
                         {"width", options.width},
                         {"ffn", options.ffn},
                         {"gated", options.gated},
                         {"nnz_per_token", row.nnz_per_token},
                         {"max_row_nnz", row.max_row_nnz},
                         {"layer_ms", timing_json(row.layer)},
                         {"ratio_to_dense", row.speedup},
                         {"error", row.error},
                         {"effective_tflops", effective_tflops(options, row)},
                         {"dense_equivalent_tflops", dense_equivalent_tflops(options, row)},
                         {"share_of_dense_rate", effective_tflops(options, row) / dense_tflops}};
  if (row.gate.median_ms > 0.0) {
    json["gate_ms"] = timing_json(row.gate);
    json["up_down_ms"] = timing_json(row.up_down);
  }
  if (row.millijoules_per_token > 0.0) json["millijoules_per_token"] = row.millijoules_per_token;
  if (row.chosen) json["reason"] = row.reason;
  return json;
}

void print_row(const FfnBenchmark& options, const FfnCudaRow& row) {
  const auto half = [](double ms) { return ms > 0.0 ? fmt::format("{:.4f}", ms) : "-"; };
  fmt::print(
      "  {:<11} {:>5} {:>8} {:>8} {:>9.4f} [{:.4f}, {:.4f}] {:>7.2f}x {:>7.0f} {:>9} {:>9.1e}\n",
      ffn_execution_name(row.execution), row.chosen ? "<auto" : "", half(row.gate.median_ms),
      half(row.up_down.median_ms), row.layer.median_ms, row.layer.p10_ms, row.layer.p90_ms,
      row.speedup, dense_equivalent_tflops(options, row),
      row.millijoules_per_token > 0.0 ? fmt::format("{:.4f}", row.millijoules_per_token) : "-",
      row.error);
}

}  // namespace

void run_bench_ffn_cuda(const FfnBenchmark& options, double energy_seconds,
                        const std::vector<FfnPattern>& patterns,
                        const std::filesystem::path& jsonl) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  fmt::print("FFN forward, D {}, F {}, {}, bf16, on {}\n", options.width, options.ffn,
             options.gated ? "gated" : "not gated", ctx.device_name());
  fmt::print("  {:<11} {:>5} {:>8} {:>8} {:>9} [{:>6}, {:>6}] {:>8} {:>7} {:>9} {:>9}\n", "runs",
             "", "gate", "up+down", "layer ms", "p10", "p90", "ratio", "TFLOP/s", "mJ/token",
             "error");
  double ratios = 0.0;  // of what is picked
  for (const FfnPattern& pattern : patterns) {
    const std::vector<FfnCudaRow> rows =
        benchmark_ffn_cuda(ctx, {options, energy_seconds}, pattern);
    const FfnCudaRow& dense = rows.front();
    fmt::print("{}: {} tokens, {:.1f} active per token, {} at most\n", dense.pattern, dense.tokens,
               dense.nnz_per_token, dense.max_row_nnz);
    for (const FfnCudaRow& row : rows) {
      if (row.chosen) ratios += row.speedup;
      print_row(options, row);
      nlohmann::json json = machine_json(0);
      json.erase("threads");
      json["gpu"] = ctx.device_name();
      json.update(row_json(options, row, dense_equivalent_tflops(options, dense)));
      append_jsonl(jsonl, json);
    }
    fmt::print("  auto: {}\n", dense.reason);
  }
  if (patterns.size() > 1) {
    fmt::print("mean ratio of what auto runs: {:.2f}x\n",
               ratios / static_cast<double>(patterns.size()));
  }
  fmt::print(
      "ratio: to dense, cuBLASLt's fastest algorithms; TFLOP/s: of the dense layer's operations;\n"
      "energy: of the whole GPU\n");
}
#else
void run_bench_ffn_cuda(const FfnBenchmark&, double, const std::vector<FfnPattern>&,
                        const std::filesystem::path&) {
  throw InputError("this program was built without CUDA");
}
#endif

}  // namespace twell::cli
