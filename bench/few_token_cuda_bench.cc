// SPDX-License-Identifier: Apache-2.0
// Times the executions of one feed-forward layer for a few tokens on the GPU, and the dense layer
// through tuned cuBLASLt in the same run, after checking the results. Ratios are to the fastest
// dense one.
//   few_token_cuda_bench [--tokens M]... [--nnz K]... [--fp8] [--jsonl FILE]
// Weights must not stay in the L2 cache, as they do not in decoding: a CUDA graph makes two passes
// over
// --sets copies of them, one layer each; times are per layer. About K random neurons are active per
// token, because x[:, 0] is 1 and w_gate[:, 0] is a bias. The lower bound is the time to read the
// gate weight and the up and down rows of active neurons once, at 4.3 TB/s. With --fp8 the layer
// has weights in e4m3, and the executions of that type are timed instead, dense and sparse.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/registry.h"

namespace twell {
namespace {

struct Options {
  std::vector<int64_t> tokens{1, 2, 4, 8, 16, 32, 64};
  std::vector<double> nnz{30, 150};
  int64_t width = 2048;
  int64_t ffn = 5632;
  int sets = 8;
  int rounds = 21;
  bool fp8 = false;
  std::string jsonl;
};

constexpr double kBytesPerMicrosecond = 4.3e6;
constexpr int64_t kMostFew = 2048;  // tokens of the executions for few

struct WeightSet {
  DeviceBuffer<__nv_bfloat16> gate, up, down;
  FfnWeightsCuda view() const { return {gate.data(), up.data(), down.data()}; }
};

// The executions for few tokens that take calls of so many.
std::vector<const GpuFfnExecution*> executions_of(const GpuFfnLayer& layer, int64_t tokens) {
  std::vector<const GpuFfnExecution*> taken;
  for (const GpuFfnExecution& execution : gpu_ffn_registry()) {
    if (execution.limits.most_tokens > kMostFew) continue;
    if (gpu_ffn_unsupported(execution, layer, {.tokens = tokens}).empty()) {
      taken.push_back(&execution);
    }
  }
  return taken;
}

nlohmann::json measure(CudaContext& ctx, const CudaStream& stream, const Options& options,
                       const std::vector<WeightSet>& sets, const __nv_bfloat16* x, int64_t tokens,
                       double nnz) {
  const int64_t width = options.width, ffn = options.ffn;
  DenseFfnCuda dense(ctx, tokens, width, ffn, true);
  const auto dense_y = poisoned<__nv_bfloat16>(tokens * width);
  dense.tune(ctx, sets[0].view(), x, dense_y.data());
  FfnWorkspaceCuda workspace(ctx, tokens, width, ffn, true);
  const std::vector<const GpuFfnExecution*> executions = executions_of(workspace.layer(), tokens);
  std::vector<DeviceBuffer<__nv_bfloat16>> results;
  std::vector<FfnPlansCuda> plans;
  plans.reserve(executions.size());
  results.reserve(executions.size());
  dense.forward(ctx, sets[0].view(), x, dense_y.data());
  std::vector<std::function<void()>> pieces = {[&] {
    for (size_t i = 0; i < 2 * sets.size(); ++i) {
      dense.forward(ctx, sets[i % sets.size()].view(), x, dense_y.data());
    }
  }};
  double active = 0.0, worst = 0.0;
  for (const GpuFfnExecution* execution : executions) {
    FfnPlanCuda& plan =
        plans.emplace_back(ctx, 1, ffn, FfnPolicy{FfnPolicy::Kind::kNamed, execution->name})[0];
    __nv_bfloat16* const y = results.emplace_back(poisoned<__nv_bfloat16>(tokens * width)).data();
    const auto layer = [&, y](const WeightSet& set) {
      ffn_forward_cuda(ctx, {.tokens = tokens, .weights = set.view(), .x = x, .y = y}, plan,
                       workspace);
    };
    layer(sets[0]);
    plans.back().update(ctx);
    stream.synchronize();
    const double difference = relative_difference(results.back(), dense_y);
    TWELL_CHECK(difference < std::ldexp(1.0, -7), "{} tokens: {} differs by {} from dense", tokens,
                execution->name, difference);
    worst = std::max(worst, difference);
    if (execution->sparse) active = plan.activity.nnz_per_token;
    pieces.push_back([&sets, layer] {
      for (size_t i = 0; i < 2 * sets.size(); ++i) layer(sets[i % sets.size()]);
    });
  }
  const double layers = 2.0 * static_cast<double>(sets.size());
  auto times = time_pieces(stream.get(), options.rounds, pieces);
  for (Timing& t : times) {  // to microseconds per layer
    t = {t.median * 1e3 / layers, t.p10 * 1e3 / layers, t.p90 * 1e3 / layers};
  }
  // Expected number of neurons active for at least one token, if tokens are independent.
  const double density = active / static_cast<double>(ffn);
  const double neurons =
      static_cast<double>(ffn) * (1.0 - std::pow(1.0 - density, static_cast<double>(tokens)));
  const double floor = (static_cast<double>(ffn) + 2.0 * neurons) * static_cast<double>(width) *
                       2.0 / kBytesPerMicrosecond;
  nlohmann::json row;
  row["tokens"] = tokens;
  row["width"] = width;
  row["ffn"] = ffn;
  row["nnz_asked"] = nnz;
  row["nnz_per_token"] = active;
  row["neurons"] = neurons;
  row["weight_sets"] = sets.size();
  row["difference_to_dense"] = worst;
  row["dense_us"] = timing_json(times[0]);
  row["floor_us"] = floor;
  double best = times[0].median;
  for (size_t i = 0; i < executions.size(); ++i) {
    row[std::string(executions[i]->name) + "_us"] = timing_json(times[i + 1]);
    if (!executions[i]->sparse) best = std::min(best, times[i + 1].median);
  }
  fmt::print("{:4} {:7.1f} {:7.0f}  {:8.2f} {:8.2f}", tokens, active, neurons, floor, best);
  for (size_t i = 0; i < executions.size(); ++i) {
    if (!executions[i]->sparse) continue;
    fmt::print("  {} {:.2f} {:.2f}x", executions[i]->name, times[i + 1].median,
               best / times[i + 1].median);
  }
  fmt::print("\n");
  std::fflush(stdout);
  return row;
}

// A layer in e4m3; w_down as the dense and as the sparse execution reads it.
struct ByteSet {
  DeviceBuffer<uint8_t> gate, up, down, down_rows;
  DeviceBuffer<float> gate_scales, up_scales, down_scales;

  ByteSet(CudaContext& ctx, const WeightSet& wide, int64_t width, int64_t ffn)
      : gate(ffn * width),
        up(ffn * width),
        down(ffn * width),
        down_rows(ffn * width),
        gate_scales(ffn),
        up_scales(ffn),
        down_scales(width) {
    const DeviceBuffer<__nv_bfloat16> transposed(ffn * width);
    const auto quantise = [&](int64_t rows, int64_t cols, const __nv_bfloat16* from,
                              const DeviceBuffer<uint8_t>& values,
                              const DeviceBuffer<float>& scales) {
      TWELL_CUDA_CHECK(launch_quantise_rows(
          {.rows = rows, .cols = cols, .x = from, .values = values.data(), .scales = scales.data()},
          ctx.stream()));
    };
    quantise(ffn, width, wide.gate.data(), gate, gate_scales);
    quantise(ffn, width, wide.up.data(), up, up_scales);
    TWELL_CUDA_CHECK(
        launch_transpose(wide.down.data(), ffn, width, transposed.data(), ctx.stream()));
    quantise(width, ffn, transposed.data(), down, down_scales);
    TWELL_CUDA_CHECK(
        launch_transpose_bytes(down.data(), width, ffn, down_rows.data(), ctx.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  }
  FfnWeightsCuda view() const {
    return {.gate_bytes = {gate.data(), gate_scales.data()},
            .up_bytes = {up.data(), up_scales.data()},
            .down_bytes = {down.data(), down_scales.data()},
            .down_rows = down_rows.data()};
  }
};

nlohmann::json measure_bytes(CudaContext& ctx, const Options& options,
                             const std::vector<ByteSet>& sets, const ByteRowsCuda& x,
                             int64_t tokens, double nnz) {
  const int64_t width = options.width, ffn = options.ffn;
  constexpr std::array kNames = {"dense-few-fp8", "small-batch-fp8"};
  FfnWorkspaceCuda workspace(ctx, tokens, width, ffn, true);
  workspace.make_for_bytes();
  std::vector<DeviceBuffer<__nv_bfloat16>> results;
  std::vector<FfnPlansCuda> plans;
  std::vector<std::function<void()>> pieces;
  plans.reserve(kNames.size());
  results.reserve(kNames.size());
  for (const char* name : kNames) {
    FfnPlanCuda& plan =
        plans.emplace_back(ctx, 1, ffn, FfnPolicy{FfnPolicy::Kind::kNamed, name})[0];
    __nv_bfloat16* const y = results.emplace_back(poisoned<__nv_bfloat16>(tokens * width)).data();
    const auto layer = [&, y](const ByteSet& set) {
      ffn_forward_cuda(
          ctx, {.tokens = tokens, .rows = tokens, .weights = set.view(), .y = y, .x_bytes = x},
          plan, workspace);
    };
    layer(sets[0]);
    plans.back().update(ctx);
    pieces.push_back([&sets, layer] {
      for (size_t i = 0; i < 2 * sets.size(); ++i) layer(sets[i % sets.size()]);
    });
  }
  // The dense execution quantises h.
  const double difference = relative_difference(results[1], results[0]);
  TWELL_CHECK(difference < 0.06, "{} tokens: the result differs by {} from dense", tokens,
              difference);
  const double layers = 2.0 * static_cast<double>(sets.size());
  auto times = time_pieces(ctx.stream(), options.rounds, pieces);
  for (Timing& t : times) t = {t.median * 1e3 / layers, t.p10 * 1e3 / layers, t.p90 * 1e3 / layers};
  const double active = plans[1][0].activity.nnz_per_token;
  const double ratio = times[0].median / times[1].median;
  fmt::print("{:4} {:7.1f}  {:8.2f} {:8.2f} {:6.2f}x   {:.1e}\n", tokens, active, times[0].median,
             times[1].median, ratio, difference);
  std::fflush(stdout);
  nlohmann::json row;
  row["weights"] = "fp8";
  row["tokens"] = tokens;
  row["width"] = width;
  row["ffn"] = ffn;
  row["nnz_asked"] = nnz;
  row["nnz_per_token"] = active;
  row["weight_sets"] = sets.size();
  row["difference_to_dense"] = difference;
  for (size_t i = 0; i < times.size(); ++i) {
    row[std::string(kNames[i]) + "_us"] = timing_json(times[i]);
  }
  row["speedup"] = ratio;
  return row;
}

void run_bytes(CudaContext& ctx, const Options& options, const std::vector<WeightSet>& sets,
               const DeviceBuffer<__nv_bfloat16>& x, double nnz, JsonLines& lines) {
  const DeviceBuffer<uint8_t> values(kMaxFewTokens * options.width);
  const DeviceBuffer<float> scales(kMaxFewTokens);
  TWELL_CUDA_CHECK(launch_quantise_rows({.rows = kMaxFewTokens,
                                         .cols = options.width,
                                         .x = x.data(),
                                         .values = values.data(),
                                         .scales = scales.data()},
                                        ctx.stream()));
  std::vector<ByteSet> bytes;
  for (const WeightSet& set : sets) bytes.emplace_back(ctx, set, options.width, options.ffn);
  for (const int64_t tokens : options.tokens) {
    lines.write(measure_bytes(ctx, options, bytes, {values.data(), scales.data()}, tokens, nnz));
  }
}

void run(const Options& options) {
  TWELL_REQUIRE(options.sets > 0 && options.rounds > 0, "--sets {} and --rounds {}: at least 1",
                options.sets, options.rounds);
  for (const int64_t tokens : options.tokens) {
    TWELL_REQUIRE(tokens > 0 && tokens <= kMaxFewTokens, "--tokens {}: 1 to {}", tokens,
                  kMaxFewTokens);
  }
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const int64_t width = options.width, ffn = options.ffn;
  auto host_x = random_operand(kMaxFewTokens * width, 1, 1.0f);
  fill_first_column(host_x, width, 1.0f);
  const auto x = upload(host_x);
  auto gate = random_operand(ffn * width, 4, 0.02f);
  const auto up = random_operand(ffn * width, 2, 0.02f);
  const auto down = random_operand(ffn * width, 3, 0.02f);
  std::vector<WeightSet> sets;
  for (int i = 0; i < options.sets; ++i) {
    sets.push_back({DeviceBuffer<__nv_bfloat16>(ffn * width), upload(up), upload(down)});
  }
  JsonLines lines(ctx, "cuBLASLt, fastest proposal", options.jsonl);
  fmt::print("{}, CUDA driver {}, D {}, F {}; us per layer\n", ctx.device_name(), lines.driver(),
             width, ffn);
  if (options.fp8) {
    fmt::print("{:>4} {:>7}  {:>8} {:>8} {:>7}   {}\n", "M", "nnz", "dense", "sparse", "ratio",
               "difference");
  } else {
    fmt::print("{:>4} {:>7} {:>7}  {:>8} {:>8}  {}\n", "M", "nnz", "neurons", "floor", "dense",
               "sparse executions, and their ratio to dense");
  }
  for (const double nnz : options.nnz) {
    fill_first_column(gate, width, gate_bias(nnz, ffn, width));
    for (WeightSet& set : sets) set.gate = upload(gate);
    if (options.fp8) {
      run_bytes(ctx, options, sets, x, nnz, lines);
      continue;
    }
    for (const int64_t tokens : options.tokens) {
      lines.write(measure(ctx, stream, options, sets, x.data(), tokens, nnz));
    }
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("One feed-forward layer for a few tokens on the GPU: sparse against dense.");
  app.add_option("--tokens", options.tokens, "tokens, at most 64");
  app.add_option("--nnz", options.nnz, "non-zeros per token");
  app.add_option("--sets", options.sets, "copies of the weights")->capture_default_str();
  app.add_option("--rounds", options.rounds, "timed rounds")->capture_default_str();
  app.add_flag("--fp8", options.fp8, "weights in e4m3");
  app.add_option("--width", options.width, "columns of x")->capture_default_str();
  app.add_option("--ffn", options.ffn, "neurons")->capture_default_str();
  app.add_option("--jsonl", options.jsonl, "file to append JSON lines to");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("few_token_cuda_bench", [&] { twell::run(options); });
}
