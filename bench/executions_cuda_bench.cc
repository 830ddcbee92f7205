// SPDX-License-Identifier: Apache-2.0
// Compares the executions of a feed-forward layer on activation patterns: the gate GEMM for Hopper
// and the portable one against cuBLASLt's GEMM with ReLU; tile-union and row-fused against dense up
// and down. It checks the results before it times them.
//   executions_cuda_bench --patterns FILE [--layer N]... [--nnz K]... [--tokens M] [--jsonl FILE]
// The gate GEMMs run on random operands with a bias that gives the pattern's mean activity.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {
namespace {

struct Options {
  std::string patterns;
  std::vector<int> layers;
  std::vector<double> nnz;
  int64_t tokens = 16384;
  int64_t width = 2048;
  int64_t ffn = 5632;
  int rounds = 21;
  std::string jsonl;
};

nlohmann::json measure(CudaContext& ctx, const CudaStream& stream, const Options& options,
                       const FfnPattern& pattern) {
  const auto tokens = pattern.tokens();
  const int64_t width = options.width, ffn = options.ffn;
  auto host_x = random_operand(tokens * width, 1, 1.0f);
  auto host_gate = random_operand(ffn * width, 4, 0.02f);
  fill_first_column(host_x, width, 1.0f);
  fill_first_column(host_gate, width, gate_bias(pattern.nnz_per_token(), ffn, width));
  const auto x = upload(host_x), w_gate = upload(host_gate);
  const auto w_up = upload(random_operand(ffn * width, 2, 0.02f));
  const auto w_down = upload(random_operand(ffn * width, 3, 0.02f));
  const FfnWeightsCuda weights{w_gate.data(), w_up.data(), w_down.data()};

  DenseFfnCuda dense(ctx, tokens, width, ffn, true);
  const auto dense_y = poisoned<__nv_bfloat16>(tokens * width);
  const auto y = poisoned<__nv_bfloat16>(tokens * width);
  const auto union_y = poisoned<__nv_bfloat16>(tokens * width);
  dense.tune(ctx, weights, x.data(), dense_y.data());
  const TwellBuffersCuda gate = pattern_to_device(pattern, ffn, /*seed=*/5, dense.gate_values());
  SparseUpDownCuda up_down{tokens,   width,       ffn,           gate.view(),
                           x.data(), w_up.data(), w_down.data(), y.data()};
  SparseUpDownCuda union_up_down = up_down;
  union_up_down.y = union_y.data();
  RowFusedWorkspace row_workspace(ctx, tokens, width);
  TileUnionWorkspace union_workspace(tokens, ffn);
  row_fused_up_down_cuda(ctx, up_down, row_workspace);
  dense.up_down(ctx, weights, x.data(), dense_y.data());
  stream.synchronize();
  const double difference = relative_difference(y, dense_y);
  TWELL_CHECK(difference < std::ldexp(1.0, -7), "{}: row-fused differs by {} from dense",
              pattern.name, difference);

  const TwellBuffersCuda made(gate.shape);  // output of the gate GEMM
  const GateGemmCuda gate_gemm{tokens, width, ffn, x.data(), w_gate.data(), made.view()};
  const bool hopper = ctx.compute_capability() == 90;
  const auto times = time_pieces(
      stream.get(), options.rounds,
      {[&] { dense.gate(ctx, weights, x.data()); }, [&] { gate_gemm_sm80_cuda(ctx, gate_gemm); },
       [&] {
         if (hopper) gate_gemm_cuda(ctx, gate_gemm);
       },
       [&] { dense.up_down(ctx, weights, x.data(), dense_y.data()); },
       [&] { row_fused_up_down_cuda(ctx, up_down, row_workspace); },
       [&] {
         if (hopper) tile_union_up_down_cuda(ctx, union_up_down, union_workspace);
       },
       [&] { dense.forward(ctx, weights, x.data(), dense_y.data()); },
       [&] {
         gate_gemm_sm80_cuda(ctx, gate_gemm);
         row_fused_up_down_cuda(ctx, up_down, row_workspace);
       }});
  const char* names[] = {"dense_gate", "gate_sm80",  "gate",      "dense_up_down",
                         "row_fused",  "tile_union", "dense_ffn", "portable_ffn"};
  nlohmann::json row;
  row["pattern"] = pattern.name;
  row["tokens"] = tokens;
  row["width"] = width;
  row["ffn"] = ffn;
  row["nnz_per_token"] = pattern.nnz_per_token();
  row["difference_to_dense"] = difference;
  for (size_t i = 0; i < times.size(); ++i) {
    if (!hopper && (i == 2 || i == 5)) continue;
    row[std::string(names[i]) + "_ms"] = timing_json(times[i]);
  }
  row["portable_speedup"] = times[6].median / times[7].median;
  fmt::print(
      "{:12} {:6} {:7.1f}  {:.3f} {:.3f} {:.3f}   {:.3f} {:.3f} {:.3f}   {:.3f} {:.3f} = {:.2f}x  "
      "{:.1e}\n",
      pattern.name, tokens, pattern.nnz_per_token(), times[0].median, times[2].median,
      times[1].median, times[3].median, times[5].median, times[4].median, times[6].median,
      times[7].median, times[6].median / times[7].median, difference);
  std::fflush(stdout);
  return row;
}

void run(const Options& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  JsonLines lines(ctx, "cuBLASLt, fastest proposal", options.jsonl);
  std::vector<FfnPattern> patterns;
  if (!options.patterns.empty())
    patterns = read_patterns(options.patterns, options.layers, options.ffn);
  for (const double nnz : options.nnz) {
    patterns.push_back(random_pattern(fmt::format("random {:g}", nnz), options.tokens, options.ffn,
                                      nnz / static_cast<double>(options.ffn), /*seed=*/5));
  }
  fmt::print("{}, CUDA driver {}, D {}, F {}; ms; gate: dense, Hopper, portable; after the gate: ",
             ctx.device_name(), lines.driver(), options.width, options.ffn);
  fmt::print("dense, tile-union, row-fused; layer: dense, portable\n");
  for (const FfnPattern& pattern : patterns) lines.write(measure(ctx, stream, options, pattern));
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("The executions of a feed-forward layer on the GPU, side by side.");
  app.add_option("--patterns", options.patterns, "safetensors file of captured patterns");
  app.add_option("--layer", options.layers, "layers of the file")->needs("--patterns");
  app.add_option("--nnz", options.nnz, "non-zeros per token of random patterns");
  app.add_option("--tokens", options.tokens, "tokens of random patterns")->capture_default_str();
  app.add_option("--rounds", options.rounds, "timed rounds")->capture_default_str();
  app.add_option("--jsonl", options.jsonl, "file to append JSON lines to");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("executions_cuda_bench", [&] { twell::run(options); });
}
