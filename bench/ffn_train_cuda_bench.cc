// SPDX-License-Identifier: Apache-2.0
// Times the feed-forward layer in training on the GPU, forward and backward, dense against hybrid,
// on one activation pattern after the other. It checks errors before it times.
//   ffn_train_cuda_bench [--width D] [--ffn F] [--patterns FILE]... [--layer N]... [--nnz K]...
//                        [--full-rows K]... [--tokens M]... [--check] [--relu2] [--portable]
//                        [--jsonl FILE]
// A pattern is repeated over the tokens. The hybrid execution runs its gate GEMM and continues with
// the pattern; the dense execution runs on operands whose gate has as many non-zeros. For each file
// it prints the mean of dense / chosen, where choose_gpu_ffn_train chooses from the pattern's
// counts. --check compares both with f32 sums on the pattern's first 4,096 tokens. Patterns of
// other than F neurons are stretched to F. --relu2 also times the hybrid execution of relu2.
// --portable runs its kernels for every GPU on Hopper too.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

struct Options {
  std::vector<std::string> patterns;
  std::vector<int> layers;
  std::vector<double> nnz;
  std::vector<int> full_rows;
  std::vector<int64_t> tokens = {16384};
  int64_t width = 2048;
  int64_t ffn = 5632;
  int64_t captured_ffn = 5632;
  int rounds = 21;
  bool check = false;
  bool relu2 = false;
  bool portable = false;
  bool time = true;
  std::string jsonl;
};

FfnPattern random_pattern_of(int64_t tokens, int64_t ffn, double nnz) {
  return random_pattern(fmt::format("random {:g}", nnz), tokens, ffn,
                        nnz / static_cast<double>(ffn), /*seed=*/5);
}

// Every neuron is active on every `stride`-th token, about ten neurons on the other tokens.
FfnPattern full_rows_pattern(int64_t tokens, int64_t ffn, int stride) {
  const FfnPattern random = random_pattern_of(tokens, ffn, 10.0);
  FfnPattern full{.name = fmt::format("every {} full", stride)};
  size_t next = 0;
  for (int64_t row = 0; row < tokens; ++row) {
    const int32_t n = random.row_nnz[static_cast<size_t>(row)];
    if (row % stride == 0) {
      full.row_nnz.push_back(static_cast<int32_t>(ffn));
      for (int64_t j = 0; j < ffn; ++j) full.columns.push_back(static_cast<uint32_t>(j));
    } else {
      full.row_nnz.push_back(n);
      for (int32_t i = 0; i < n; ++i) {
        full.columns.push_back(random.columns[next + static_cast<size_t>(i)]);
      }
    }
    next += static_cast<size_t>(n);
  }
  return full;
}

// Operands that all patterns share, except for a bias in column 0 of w_gate that gives the
// pattern's activity; x[:, 0] is 1.
struct Operands {
  FfnTrainShapeCuda shape;
  std::vector<__nv_bfloat16> host_w_gate;
  DeviceBuffer<__nv_bfloat16> x, d_y, w_gate, w_up, w_down;

  Operands(const Options& options, int64_t tokens)
      : shape{.max_tokens = tokens,
              .width = options.width,
              .ffn = options.ffn,
              .portable = options.portable},
        host_w_gate(random_operand(shape.ffn * shape.width, 4, 0.02f)),
        d_y(upload(random_operand(tokens * shape.width, 5, 1e-3f))),
        w_gate(shape.ffn * shape.width),
        w_up(upload(random_operand(shape.ffn * shape.width, 2, 0.02f))),
        w_down(upload(random_operand(shape.ffn * shape.width, 3, 0.02f))) {
    auto host_x = random_operand(tokens * shape.width, 1, 1.0f);
    fill_first_column(host_x, shape.width, 1.0f);
    x = upload(host_x);
  }
  // Sets the bias so that the gate has about nnz non-zeros per token.
  void set_activity(double nnz) {
    fill_first_column(host_w_gate, shape.width, gate_bias(nnz, shape.ffn, shape.width));
    w_gate = upload(host_w_gate);
  }
};

// One layer on a pattern, with its results.
struct Layer {
  const Operands& operands;
  FfnTrainShapeCuda shape;
  DeviceBuffer<__nv_bfloat16> y, d_x, dense_gate;
  DeviceBuffer<float> l1_scale, d_w_gate, d_w_up, d_w_down;
  DeviceBuffer<uint8_t> active;
  DeviceBuffer<FfnTrainCountsCuda> counts;
  TwellBuffersCuda gate;
  double nnz;

  // The pattern must have a row per token. `dense`: also store its gate as a dense matrix.
  Layer(Operands& operands_in, const FfnPattern& pattern, bool dense)
      : operands(operands_in),
        shape(operands.shape),
        y(poisoned<__nv_bfloat16>(shape.max_tokens * shape.width)),
        d_x(poisoned<__nv_bfloat16>(shape.max_tokens * shape.width)),
        dense_gate(dense ? shape.max_tokens * shape.ffn : 0),
        l1_scale(upload(std::vector<float>{1e-4f})),
        active(upload(std::vector<uint8_t>(static_cast<size_t>(shape.ffn)))),
        counts(upload(std::vector<FfnTrainCountsCuda>(1))),
        gate(
            pattern_to_device(pattern, shape.ffn, /*seed=*/5, dense ? dense_gate.data() : nullptr)),
        nnz(pattern.nnz_per_token()) {
    operands_in.set_activity(nnz);
    clear_gradients();
  }
  void clear_gradients() {
    const std::vector<float> zeros(static_cast<size_t>(shape.ffn * shape.width));
    d_w_gate = upload(zeros);
    d_w_up = upload(zeros);
    d_w_down = upload(zeros);
  }
  void clear_counts() { counts = upload(std::vector<FfnTrainCountsCuda>(1)); }
  FfnWeightsCuda weights(Activation activation) const {
    return {operands.w_gate.data(), operands.w_up.data(), operands.w_down.data(), activation};
  }
  FfnTrainForwardCuda forward(bool replay, Activation activation = Activation::kRelu) const {
    return {.tokens = shape.max_tokens,
            .weights = weights(activation),
            .x = operands.x.data(),
            .y = y.data(),
            .counts = counts.data(),
            .active = active.data(),
            .replay = replay ? gate.view() : TwellPacked{}};
  }
  FfnTrainBackwardCuda backward(Activation activation = Activation::kRelu) const {
    return {.tokens = shape.max_tokens,
            .weights = weights(activation),
            .x = operands.x.data(),
            .d_y = operands.d_y.data(),
            .l1_scale = l1_scale.data(),
            .d_x = d_x.data(),
            .grads = {d_w_gate.data(), d_w_up.data(), d_w_down.data()}};
  }
};

// Gradients and y as f32, on the host.
using Results = std::vector<std::pair<std::string, std::vector<float>>>;

std::vector<float> to_floats(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> floats(values.size());
  for (size_t i = 0; i < values.size(); ++i) floats[i] = __bfloat162float(values[i]);
  return floats;
}

Results results_of(const Layer& layer) {
  return {{"d_x", to_floats(download(layer.d_x))},
          {"d_w_gate", download(layer.d_w_gate)},
          {"d_w_up", download(layer.d_w_up)},
          {"d_w_down", download(layer.d_w_down)}};
}

// A GEMM whose left operand is f32, computed as three bf16 matrices that add up to it.
std::vector<float> product(CudaContext& ctx, MatmulShapeCuda shape, const std::vector<float>& a,
                           const __nv_bfloat16* b, std::vector<float> c = {}) {
  shape.f32_out = true;
  shape.add = true;
  if (c.empty()) c.resize(static_cast<size_t>(shape.rows * shape.cols));
  const auto out = upload(c);
  std::vector<float> left = a;
  std::vector<__nv_bfloat16> part(a.size());
  for (int i = 0; i < 3; ++i) {
    for (size_t j = 0; j < left.size(); ++j) {
      part[j] = __float2bfloat16(left[j]);
      left[j] -= __bfloat162float(part[j]);
    }
    const auto device = upload(part);
    matmul_cuda(ctx, shape, device.data(), b, out.data());
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  }
  return download(out);
}

// Computes the layer on the pattern with f32 sums.
Results reference(CudaContext& ctx, const Layer& layer) {
  const int64_t tokens = layer.shape.max_tokens, width = layer.shape.width, ffn = layer.shape.ffn;
  const Operands& in = layer.operands;
  const MatmulShapeCuda up{.rows = tokens, .cols = ffn, .inner = width, .trans_b = true};
  const std::vector<float> g = to_floats(download(layer.dense_gate));
  std::vector<float> u = product(ctx, up, to_floats(download(in.x)), in.w_up.data());
  std::vector<float> d_h = product(ctx, up, to_floats(download(in.d_y)), in.w_down.data());
  std::vector<float> h(g.size());
  const float l1_scale = download(layer.l1_scale)[0];
  for (size_t i = 0; i < g.size(); ++i) {
    h[i] = g[i] * u[i];
    const float d = d_h[i] + (h[i] > 0.0f ? l1_scale : (h[i] < 0.0f ? -l1_scale : 0.0f));
    d_h[i] = g[i] != 0.0f ? d * u[i] : 0.0f;  // d_g
    u[i] = d * g[i];                          // d_u
  }
  const MatmulShapeCuda through{.rows = tokens, .cols = width, .inner = ffn};
  const MatmulShapeCuda weight{.rows = ffn, .cols = width, .inner = tokens, .trans_a = true};
  Results results;
  std::vector<float> d_x = product(ctx, through, d_h, in.w_gate.data());
  results.emplace_back("d_x", product(ctx, through, u, in.w_up.data(), std::move(d_x)));
  results.emplace_back("d_w_gate", product(ctx, weight, d_h, in.x.data()));
  results.emplace_back("d_w_up", product(ctx, weight, u, in.x.data()));
  results.emplace_back("d_w_down", product(ctx, weight, h, in.d_y.data()));
  results.emplace_back("y", product(ctx, through, h, in.w_down.data()));
  return results;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / size);
}

// Errors of both executions against f32 sums, on the pattern's first tokens.
nlohmann::json check(CudaContext& ctx, const Options& options, const FfnPattern& pattern) {
  constexpr int64_t kTokens = 4096;
  Operands operands(options, kTokens);
  Layer layer(operands, repeated(pattern, 0, kTokens), /*dense=*/true);
  const Results want = reference(ctx, layer);
  FfnSavedCuda saved(ctx, layer.shape);
  FfnTrainWorkspaceCuda workspace(ctx, layer.shape);
  // The dense execution, with its gate replaced by the pattern.
  ffn_train_forward_cuda(ctx, layer.forward(false), saved, workspace);
  TWELL_CUDA_CHECK(cudaMemcpyAsync(saved.memory, layer.dense_gate.data(),
                                   static_cast<size_t>(layer.dense_gate.bytes()),
                                   cudaMemcpyDeviceToDevice, ctx.stream()));
  ffn_train_backward_cuda(ctx, layer.backward(), saved, workspace);
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  const Results dense = results_of(layer);
  layer.clear_gradients();
  saved.prepare(ctx, FfnTrainExecution::kHybrid, layer.nnz);
  ffn_train_forward_cuda(ctx, layer.forward(true), saved, workspace);
  ffn_train_backward_cuda(ctx, layer.backward(), saved, workspace);
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  const Results hybrid = results_of(layer);
  nlohmann::json row;
  std::string line;
  for (size_t i = 0; i < dense.size(); ++i) {
    const double a = relative_error(dense[i].second, want[i].second);
    const double b = relative_error(hybrid[i].second, want[i].second);
    row[dense[i].first] = {{"dense", a}, {"hybrid", b}};
    line += fmt::format("  {} {:.2e} {:.2e}", dense[i].first, a, b);
    TWELL_CHECK(b <= 1.02 * a, "{}: {} is off by {}, dense by {}", pattern.name, dense[i].first, b,
                a);
  }
  const double y = relative_error(to_floats(download(layer.y)), want.back().second);
  row["y"] = {{"hybrid", y}};
  TWELL_CHECK(y < std::ldexp(1.0, -8), "{}: y is off by {}", pattern.name, y);
  fmt::print("{:14} error against f32, dense and hybrid: {}  y {:.2e}\n", pattern.name, line, y);
  return row;
}

nlohmann::json measure(CudaContext& ctx, const CudaStream& stream, const Options& options,
                       const FfnPattern& pattern, Operands& operands) {
  Layer layer(operands, repeated(pattern, 0, operands.shape.max_tokens), /*dense=*/false);
  FfnTrainWorkspaceCuda workspace(ctx, layer.shape);
  FfnSavedCuda dense(ctx, layer.shape), hybrid(ctx, layer.shape);
  hybrid.prepare(ctx, FfnTrainExecution::kHybrid, layer.nnz);
  const FfnTrainForwardCuda dense_forward = layer.forward(false), replay = layer.forward(true);
  const auto run = [&](const FfnTrainForwardCuda& forward, FfnSavedCuda& saved) {
    ffn_train_forward_cuda(ctx, forward, saved, workspace);
    ffn_train_backward_cuda(ctx, layer.backward(forward.weights.activation), saved, workspace);
  };
  const FfnTrainForwardCuda squared = layer.forward(true, Activation::kRelu2);
  run(dense_forward, dense);  // warm-up: tunes and allocates
  run(replay, hybrid);
  stream.synchronize();
  std::vector<std::function<void()>> pieces = {
      [&] { ffn_train_forward_cuda(ctx, dense_forward, dense, workspace); },
      [&] { ffn_train_backward_cuda(ctx, layer.backward(), dense, workspace); },
      [&] { ffn_train_forward_cuda(ctx, replay, hybrid, workspace); },
      [&] { ffn_train_backward_cuda(ctx, layer.backward(), hybrid, workspace); },
      [&] { run(dense_forward, dense); },
      [&] { run(replay, hybrid); }};
  if (options.relu2) pieces.emplace_back([&] { run(squared, hybrid); });
  const auto times = time_pieces(stream.get(), options.rounds, pieces);
  layer.clear_counts();
  ffn_train_forward_cuda(ctx, layer.forward(true), hybrid, workspace);
  stream.synchronize();
  const FfnTrainCountsCuda counts = download(layer.counts)[0];
  const double union_neurons =
      static_cast<double>(counts.union_neurons) * 128.0 / static_cast<double>(counts.tokens);
  const FfnTrainExecution choice = choose_gpu_ffn_train(
      gpu_ffn_layer(ctx, layer.shape), layer.shape.max_tokens, FfnTrainPolicy::kAuto,
      {.nnz_per_token = layer.nnz,
       .union_share = union_neurons / static_cast<double>(layer.shape.ffn)});
  const double speedup = times[4].median / times[5].median;
  nlohmann::json row;
  row["tokens"] = layer.shape.max_tokens;
  row["dense_forward_ms"] = timing_json(times[0]);
  row["dense_backward_ms"] = timing_json(times[1]);
  row["hybrid_forward_ms"] = timing_json(times[2]);
  row["hybrid_backward_ms"] = timing_json(times[3]);
  row["dense_ms"] = timing_json(times[4]);
  row["hybrid_ms"] = timing_json(times[5]);
  if (options.relu2) row["hybrid_relu2_ms"] = timing_json(times[6]);
  row["speedup"] = speedup;
  row["choice"] = std::string(ffn_train_execution_name(choice));
  row["choice_speedup"] = choice == FfnTrainExecution::kHybrid ? speedup : 1.0;
  row["dense_saved_bytes"] = dense.bytes();
  row["hybrid_saved_bytes"] = hybrid.bytes();
  row["union_neurons"] = union_neurons;
  row["recomputed"] = counts.recomputed;
  row["workspace_bytes"] = workspace.bytes;
  fmt::print(
      "{:14} {:6} {:7.1f}   {:.3f} + {:.3f} = {:.3f}   {:.3f} + {:.3f} = {:.3f}   {:.2f}x  {:6}  "
      "union {:.0f}  saved {:.1f}%  recomputed {}{}\n",
      pattern.name, layer.shape.max_tokens, layer.nnz, times[0].median, times[1].median,
      times[4].median, times[2].median, times[3].median, times[5].median, speedup,
      ffn_train_execution_name(choice), union_neurons,
      100.0 * static_cast<double>(hybrid.bytes()) / static_cast<double>(dense.bytes()),
      counts.recomputed,
      options.relu2 ? fmt::format("  relu2 {:.3f}, {:.3f} of relu", times[6].median,
                                  times[6].median / times[5].median)
                    : "");
  std::fflush(stdout);
  return row;
}

// Patterns over which results are averaged.
struct PatternGroup {
  std::string name;
  std::vector<FfnPattern> patterns;
};

std::vector<PatternGroup> all_patterns(const Options& options) {
  std::vector<PatternGroup> groups;
  for (const std::string& file : options.patterns) {
    PatternGroup& group = groups.emplace_back();
    group.name = std::filesystem::path(file).stem().string();
    group.patterns = read_patterns(file, options.layers, options.captured_ffn);
    if (options.ffn == options.captured_ffn) continue;
    for (FfnPattern& pattern : group.patterns) {
      pattern = stretch_pattern(pattern, options.captured_ffn, options.ffn);
    }
  }
  const int64_t most = *std::max_element(options.tokens.begin(), options.tokens.end());
  const int64_t rows = std::min<int64_t>(most, 16384);
  PatternGroup made{"random and full rows", {}};
  for (const double nnz : options.nnz) {
    made.patterns.push_back(random_pattern_of(rows, options.ffn, nnz));
  }
  for (const int stride : options.full_rows) {
    made.patterns.push_back(full_rows_pattern(rows, options.ffn, stride));
  }
  if (!made.patterns.empty()) groups.push_back(std::move(made));
  return groups;
}

void run(const Options& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  set_matmul_tuning(ctx, true);
  JsonLines lines(ctx, "dense execution, cuBLASLt, fastest proposals", options.jsonl);
  const std::vector<PatternGroup> groups = all_patterns(options);
  fmt::print("{}, CUDA driver {}, D {}, F {}; ms, forward + backward: dense, hybrid\n",
             ctx.device_name(), lines.driver(), options.width, options.ffn);
  const auto write = [&](nlohmann::json row, const FfnPattern& pattern) {
    row["pattern"] = pattern.name;
    row["width"] = options.width;
    row["ffn"] = options.ffn;
    row["nnz_per_token"] = pattern.nnz_per_token();
    lines.write(std::move(row));
  };
  for (const PatternGroup& group : groups) {
    if (!options.check) break;
    for (const FfnPattern& pattern : group.patterns) {
      write({{"errors", check(ctx, options, pattern)}}, pattern);
    }
  }
  if (!options.time) return;
  for (const int64_t tokens : options.tokens) {
    Operands operands(options, tokens);
    for (const PatternGroup& group : groups) {
      double sum = 0.0, least = std::numeric_limits<double>::infinity();
      for (const FfnPattern& pattern : group.patterns) {
        const nlohmann::json row = measure(ctx, stream, options, pattern, operands);
        write(row, pattern);
        sum += row["choice_speedup"].get<double>();
        least = std::min(least, row["choice_speedup"].get<double>());
      }
      fmt::print("{}, {} tokens: dense / chosen {:.2f} on average, {:.2f} at least\n", group.name,
                 tokens, sum / static_cast<double>(group.patterns.size()), least);
    }
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("The feed-forward layer in training on the GPU, dense and hybrid.");
  app.add_option("--width", options.width, "width of the layer")->capture_default_str();
  app.add_option("--ffn", options.ffn, "neurons of the layer")->capture_default_str();
  app.add_option("--patterns", options.patterns, "safetensors files of captured patterns");
  app.add_option("--captured-ffn", options.captured_ffn, "neurons of those patterns")
      ->needs("--patterns")
      ->capture_default_str();
  app.add_option("--layer", options.layers, "layers of the files; not given: all that they have")
      ->needs("--patterns");
  app.add_option("--nnz", options.nnz, "non-zeros per token of random patterns");
  app.add_option("--full-rows", options.full_rows,
                 "patterns in which every K-th token has all neurons active");
  app.add_option("--tokens", options.tokens, "tokens, the pattern repeated; one after the other")
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "timed rounds")->capture_default_str();
  app.add_flag("--check", options.check, "errors against f32 first");
  app.add_flag("--portable", options.portable, "hybrid on the kernels for every GPU");
  app.add_flag("--relu2", options.relu2, "also time the hybrid execution of relu2");
  app.add_flag("!--no-time", options.time, "no timing");
  app.add_option("--jsonl", options.jsonl, "file to append JSON lines to");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("ffn_train_cuda_bench", [&] { twell::run(options); });
}
