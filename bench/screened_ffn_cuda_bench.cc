// SPDX-License-Identifier: Apache-2.0
// Times the feed-forward layer behind a rotated screen on the GPU against the dense layer through
// tuned cuBLASLt and against tile-union, in the same run, after checking the results.
//   screened_ffn_cuda_bench [--layer FILE]... [--tokens M] [--nnz K]... [--jsonl FILE]
// A FILE is a safetensors file with a layer of a trained model and the rows that its norm makes of
// text: x [M, D], w_gate [F, D], w_up [F, D], w_down [F, D], all bf16; --tokens takes the first
// rows of x. Without files, operands are drawn: about K neurons are active per token, because all
// rows of x share a direction, and tokens of a tile share a part of their randomness, as neighbours
// in text do. `rotate` is what quantising x costs beyond the norm: a fused norm's time less the
// plain norm's. Layers behind a screen are timed with that norm's rows, so their time is screen to
// down; the table adds `rotate`.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/base/rng.h"
#include "twell/base/rounding.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

struct Options {
  std::vector<std::string> layers;
  std::optional<int64_t> tokens;  // rows of x; else all of a file, or 16,384 drawn ones
  std::vector<double> nnz{15, 40};
  int64_t width = 2048;
  int64_t ffn = 5632;
  int rounds = 21;
  std::string jsonl;
};

struct Operands {
  std::string name;
  int64_t tokens = 0, width = 0, ffn = 0;
  std::vector<__nv_bfloat16> x, gate, up, down;
};

Operands drawn(const Options& options, double nnz) {
  const int64_t m = options.tokens.value_or(16384), d = options.width, f = options.ffn;
  Operands o{.name = fmt::format("drawn, {}", nnz), .tokens = m, .width = d, .ffn = f};
  constexpr float kShared = 0.9f;  // of the randomness
  const float own = std::sqrt(1.0f - kShared * kShared);
  o.x = random_operand(m * d, 0, own);
  const auto topics = random_operand(ceil_div(m, 128) * d, 1, kShared);
  for (int64_t i = 0; i < m * d; ++i) {
    auto& value = o.x[static_cast<size_t>(i)];
    const auto topic = topics[static_cast<size_t>(i / d / 128 * d + i % d)];
    value = __float2bfloat16(__bfloat162float(value) + __bfloat162float(topic) + 1.0f);
  }
  o.gate = random_operand(f * d, 2, 0.02f);
  const float bias = gate_bias(nnz, f, d + 1) / static_cast<float>(d);
  for (auto& value : o.gate) value = __float2bfloat16(__bfloat162float(value) + bias);
  o.up = random_operand(f * d, 3, 0.02f);
  o.down = random_operand(f * d, 4, 0.02f);
  return o;
}

Operands loaded(const Options& options, const std::string& path) {
  const SafetensorsFile file(path);
  Operands o{.name = std::filesystem::path(path).stem().string()};
  const auto read = [&](const char* name, int64_t& rows, int64_t& cols) {
    const TensorInfo& tensor = file.tensor(name);
    TWELL_REQUIRE(tensor.dtype == "BF16" && tensor.shape.size() == 2, "{}: {} is not a bf16 matrix",
                  path, name);
    rows = tensor.shape[0];
    cols = tensor.shape[1];
    std::vector<__nv_bfloat16> values(static_cast<size_t>(rows * cols));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  };
  o.x = read("x", o.tokens, o.width);
  if (options.tokens) {
    TWELL_REQUIRE(*options.tokens <= o.tokens, "{} has {} tokens, {} were asked for", path,
                  o.tokens, *options.tokens);
    o.tokens = *options.tokens;
    o.x.resize(static_cast<size_t>(o.tokens * o.width));
  }
  o.gate = read("w_gate", o.ffn, o.width);
  o.up = read("w_up", o.ffn, o.width);
  o.down = read("w_down", o.ffn, o.width);
  return o;
}

// The 8-bit copies of a layer and its rows for one kind of bound.
struct Screen {
  DeviceBuffer<int8_t> gate, x;
  DeviceBuffer<int32_t> spread;
  DeviceBuffer<float> rounding;
  DeviceBuffer<TokenBound> bounds;
  ScreenBound bound;

  Screen(const Operands& o, ScreenBound bound_in)
      : gate(o.ffn * o.width),
        x(o.tokens * o.width),
        spread(ceil_div(o.ffn, 256) * 256),
        rounding(1),
        bounds(o.tokens),
        bound(bound_in) {}
  RotatedRowsCuda rows() const { return {x.data(), bounds.data()}; }
  RotatedGateCuda view() const { return {gate.data(), spread.data(), rounding.data(), bound}; }
};

nlohmann::json measure(CudaContext& ctx, const CudaStream& stream, const Options& options,
                       const Operands& o) {
  const int64_t m = o.tokens, d = o.width, f = o.ffn;
  const auto x = upload(o.x), gate = upload(o.gate), up = upload(o.up), down = upload(o.down);
  const FfnWeightsCuda weights{gate.data(), up.data(), down.data()};
  const auto dense_y = poisoned<__nv_bfloat16>(m * d), y = poisoned<__nv_bfloat16>(m * d);
  const auto sparse_y = poisoned<__nv_bfloat16>(m * d);
  DenseFfnCuda dense(ctx, m, d, f, true);
  dense.tune(ctx, weights, x.data(), dense_y.data());
  TwellBuffersCuda packed(TwellShape{m, f, 256, 8});
  TileUnionWorkspace workspace(m, f);
  DeviceBuffer<uint32_t> candidate_words(m * ceil_div(f, 256) * 8);
  DeviceBuffer<int32_t> candidate_counts(m);
  const CandidatesCuda candidates{candidate_words.data(), candidate_counts.data()};

  const auto rotate_gate = [&](const Screen& screen) {
    TWELL_CUDA_CHECK(launch_rotate_gate({.neurons = f,
                                         .width = d,
                                         .w_gate = gate.data(),
                                         .values = screen.gate.data(),
                                         .spread = screen.spread.data(),
                                         .rounding = screen.rounding.data(),
                                         .bound = screen.bound},
                                        stream.get()));
  };
  Screen strict(o, ScreenBound::kStrict), probabilistic(o, ScreenBound::kProbabilistic);
  for (const Screen* screen : {&strict, &probabilistic}) {
    rotate_gate(*screen);
    TWELL_CUDA_CHECK(launch_rotate_rows({.tokens = m,
                                         .width = d,
                                         .x = x.data(),
                                         .rotated = screen->rows(),
                                         .rounding = screen->rounding.data(),
                                         .bound = screen->bound},
                                        stream.get()));
  }
  const auto tile_union = [&](ActivityCuda* activity) {
    const GateGemmCuda gemm{.tokens = m,
                            .width = d,
                            .ffn = f,
                            .x = x.data(),
                            .w_gate = gate.data(),
                            .out = packed.view(),
                            .progress = workspace.progress(m)};
    gate_gemm_cuda(ctx, gemm);
    SparseUpDownCuda rest;
    rest.tokens = m;
    rest.width = d;
    rest.ffn = f;
    rest.gate = packed.view();
    rest.x = x.data();
    rest.w_up = up.data();
    rest.w_down = down.data();
    rest.y = sparse_y.data();
    rest.activity = activity;
    rest.follows_gate = true;
    tile_union_up_down_cuda(ctx, rest, workspace);
  };
  const auto screened = [&](const Screen& screen, ActivityCuda* activity) {
    screened_ffn_cuda(ctx,
                      {.tokens = m,
                       .width = d,
                       .ffn = f,
                       .rotated = screen.rows(),
                       .screen = screen.view(),
                       .x = x.data(),
                       .w_gate = gate.data(),
                       .w_up = up.data(),
                       .w_down = down.data(),
                       .y = y.data(),
                       .candidates = candidates,
                       .activity = activity},
                      workspace);
  };

  // Results first.
  const auto count = [&](const auto& run) {
    const auto activity = upload(std::vector<ActivityCuda>(1));
    run(activity.data());
    stream.synchronize();
    return download(activity)[0];
  };
  dense.forward(ctx, weights, x.data(), dense_y.data());
  const ActivityCuda fired = count([&](ActivityCuda* a) { tile_union(a); });
  nlohmann::json row;
  row["layer"] = o.name;
  row["tokens"] = m;
  row["width"] = d;
  row["ffn"] = f;
  row["nnz_per_token"] = static_cast<double>(fired.nnz) / static_cast<double>(m);
  row["union"] = static_cast<double>(fired.union_neurons) / static_cast<double>(fired.unions);
  row["difference_tile_union_to_dense"] = relative_difference(sparse_y, dense_y);
  for (const Screen* screen : {&strict, &probabilistic}) {
    const ActivityCuda got = count([&](ActivityCuda* a) { screened(*screen, a); });
    const auto counts = download(candidate_counts);
    double sum = 0.0;
    for (const int32_t n : counts) sum += n;
    nlohmann::json& of = row[screen == &strict ? "strict" : "probabilistic"];
    of["candidates_per_token"] = sum / static_cast<double>(m);
    of["union"] = static_cast<double>(got.candidate_union_neurons) /
                  static_cast<double>(got.candidate_unions);
    of["missed"] = static_cast<int64_t>(fired.nnz) - static_cast<int64_t>(got.nnz);
    of["difference_to_dense"] = relative_difference(y, dense_y);
    of["difference_to_tile_union"] = relative_difference(y, sparse_y);
  }

  const auto norm_weight = upload(random_operand(d, 9, 1.0f));
  const auto residual = upload(o.x);
  const auto sum = poisoned<__nv_bfloat16>(m * d), normed = poisoned<__nv_bfloat16>(m * d);
  const RmsNormCuda norm{.tokens = m,
                         .width = d,
                         .x = x.data(),
                         .residual = residual.data(),
                         .sum = sum.data(),
                         .weight = norm_weight.data(),
                         .y = normed.data()};
  RmsNormCuda plain = norm;
  plain.residual = nullptr;
  plain.sum = nullptr;
  // Other memory than the layers', whose rows they read.
  const Screen scratch(o, ScreenBound::kStrict);
  const auto rotated_norm = [&](const RmsNormCuda& of, ScreenBound bound) {
    TWELL_CUDA_CHECK(launch_rotate_norm(
        {.norm = of, .rotated = scratch.rows(), .rounding = strict.rounding.data(), .bound = bound},
        stream.get()));
  };
  const auto gate_only = [&] {
    gate_gemm_cuda(ctx, {.tokens = m,
                         .width = d,
                         .ffn = f,
                         .x = x.data(),
                         .w_gate = gate.data(),
                         .out = packed.view()});
  };
  const auto screen_only = [&](const Screen& screen) {
    screen_gemm_cuda(ctx, {.tokens = m,
                           .width = d,
                           .ffn = f,
                           .x = screen.rows(),
                           .gate = screen.view(),
                           .out = candidates});
  };
  const std::vector<std::pair<const char*, Piece>> pieces{
      {"dense", [&] { dense.forward(ctx, weights, x.data(), dense_y.data()); }},
      {"dense_gate", [&] { dense.gate(ctx, weights, x.data()); }},
      {"tile_union", [&] { tile_union(nullptr); }},
      {"strict_layer", [&] { screened(strict, nullptr); }},
      {"probabilistic_layer", [&] { screened(probabilistic, nullptr); }},
      {"gate_gemm", gate_only},
      {"screen_gemm", [&] { screen_only(probabilistic); }},
      {"norm", [&] { TWELL_CUDA_CHECK(launch_rms_norm(norm, stream.get())); }},
      {"rotated_norm", [&] { rotated_norm(norm, ScreenBound::kStrict); }},
      {"rotated_norm_probabilistic", [&] { rotated_norm(norm, ScreenBound::kProbabilistic); }},
      {"plain_norm", [&] { TWELL_CUDA_CHECK(launch_rms_norm(plain, stream.get())); }},
      {"rotated_plain_norm", [&] { rotated_norm(plain, ScreenBound::kStrict); }},
      {"rotate_gate", [&] { rotate_gate(scratch); }}};
  std::vector<Piece> to_time;
  for (const auto& [name, piece] : pieces) to_time.push_back(piece);
  const auto times = time_pieces(stream.get(), options.rounds, to_time);
  std::map<std::string, double> us;
  for (size_t i = 0; i < pieces.size(); ++i) {
    row[std::string(pieces[i].first) + "_ms"] = timing_json(times[i]);
    us[pieces[i].first] = times[i].median * 1e3;
  }
  const auto ratio = [&](const char* bound) {
    const std::string name(bound);
    const std::string rotated = name == "strict" ? "rotated_norm" : "rotated_norm_probabilistic";
    const double layer = us[name + "_layer"] + us[rotated] - us["norm"];
    row[name]["speedup"] = us["dense"] / layer;
    return us["dense"] / layer;
  };
  const double of_strict = ratio("strict"), of_probabilistic = ratio("probabilistic");
  const double of_union = us["dense"] / us["tile_union"];
  row["tile_union_speedup"] = of_union;
  fmt::print("{}: {} tokens, {:.1f} active per token, unions {:.0f}\n", o.name, m,
             row["nnz_per_token"].get<double>(), row["union"].get<double>());
  for (const char* bound : {"strict", "probabilistic"}) {
    const nlohmann::json& of = row[bound];
    fmt::print("  {:13} {:6.1f} candidates, unions {:5.0f}, missed {}, to tile-union {:.1e}\n",
               bound, of["candidates_per_token"].get<double>(), of["union"].get<double>(),
               of["missed"].get<int64_t>(), of["difference_to_tile_union"].get<double>());
  }
  for (const auto& [name, piece] : pieces) fmt::print("  {:27} {:8.1f} us\n", name, us[name]);
  fmt::print("  layer over dense: tile-union {:.2f}x, strict {:.2f}x, probabilistic {:.2f}x\n",
             of_union, of_strict, of_probabilistic);
  std::fflush(stdout);
  return row;
}

void run(const Options& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const JsonLines results(ctx, "tuned cuBLASLt", options.jsonl);
  for (const std::string& path : options.layers) {
    results.write(measure(ctx, stream, options, loaded(options, path)));
  }
  if (!options.layers.empty()) return;
  for (const double nnz : options.nnz) {
    results.write(measure(ctx, stream, options, drawn(options, nnz)));
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("Times a feed-forward layer behind a rotated screen on the GPU.");
  app.add_option("--layer", options.layers, "safetensors file of a layer");
  app.add_option("--tokens", options.tokens, "rows of x that are drawn, or the first of a file");
  app.add_option("--nnz", options.nnz, "active neurons per token of drawn operands");
  app.add_option("--width", options.width);
  app.add_option("--ffn", options.ffn);
  app.add_option("--rounds", options.rounds);
  app.add_option("--jsonl", options.jsonl, "append the results to this file");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("screened_ffn_cuda_bench", [&] { twell::run(options); });
}
