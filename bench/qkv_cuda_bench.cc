// SPDX-License-Identifier: Apache-2.0
// Times the query, key and value projection of many tokens on the GPU with the rotation in its
// epilogue, against cuBLASLt's product alone and followed by a rotation kernel, in the same run,
// after checking the results.
//   qkv_cuda_bench [--tokens M]... [--width D] [--heads H] [--kv-heads K] [--head-dim N]
//                  [--jsonl FILE]
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"
#include "twell/ops/qkv/qkv_cuda.h"
#include "twell/ops/rope/rope.h"

namespace twell {
namespace {

constexpr int64_t kPositions = 2048;  // tokens per sequence

struct Options {
  std::vector<int64_t> tokens{16384, 131072};
  int64_t width = 2048, heads = 32, kv_heads = 32, head_dim = 64;
  int rounds = 21;
  std::string jsonl;
};

nlohmann::json measure(CudaContext& ctx, const CudaStream& stream, const Options& options,
                       const RopeTable& table, int64_t tokens) {
  const int64_t columns = (options.heads + 2 * options.kv_heads) * options.head_dim;
  const auto x = upload(random_operand(tokens * options.width, 1, 1.0f));
  const auto w = upload(random_operand(columns * options.width, 2, 0.02f));
  const auto cos = upload(std::vector<float>(table.cos.span().begin(), table.cos.span().end()));
  const auto sin = upload(std::vector<float>(table.sin.span().begin(), table.sin.span().end()));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i % kPositions);
  const auto device_positions = upload(positions);
  const auto fused_y = poisoned<__nv_bfloat16>(tokens * columns);
  const auto y = poisoned<__nv_bfloat16>(tokens * columns);
  const auto rotation = [&](__nv_bfloat16* qkv) {
    return RopeCuda{.tokens = tokens,
                    .heads = options.heads,
                    .kv_heads = options.kv_heads,
                    .head_dim = options.head_dim,
                    .cos = cos.data(),
                    .sin = sin.data(),
                    .positions = device_positions.data(),
                    .qkv = qkv};
  };
  const auto product = [&] {
    linear_cuda(ctx, {.rows = tokens,
                      .cols = columns,
                      .inner = options.width,
                      .x = x.data(),
                      .w = w.data(),
                      .y = y.data()});
  };
  const auto product_and_rotation = [&] {
    product();
    TWELL_CUDA_CHECK(launch_rope(rotation(y.data()), ctx.stream()));
  };
  const auto fused = [&] {
    qkv_cuda(
        ctx,
        {.width = options.width, .x = x.data(), .w = w.data(), .rope = rotation(fused_y.data())});
  };
  set_matmul_tuning(ctx, true);
  product_and_rotation();
  set_matmul_tuning(ctx, false);
  fused();
  stream.synchronize();
  const double difference = relative_difference(fused_y, y);
  TWELL_CHECK(difference < std::ldexp(1.0, -7),
              "{} tokens: the result differs by {} from cuBLASLt's, rotated", tokens, difference);

  const auto times =
      time_pieces(stream.get(), options.rounds, {product, product_and_rotation, fused});
  const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(columns) *
                       static_cast<double>(options.width);
  const double to_product = times[2].median / times[0].median;
  const double to_both = times[2].median / times[1].median;
  fmt::print("{:7}  {:9.4f} {:9.4f} {:9.4f}  {:8.3f} {:8.3f}  {:7.0f}   {:.1e}\n", tokens,
             times[0].median, times[1].median, times[2].median, to_product, to_both,
             flops / times[2].median * 1e-9, difference);
  std::fflush(stdout);
  nlohmann::json row;
  row["tokens"] = tokens;
  row["width"] = options.width;
  row["heads"] = options.heads;
  row["kv_heads"] = options.kv_heads;
  row["head_dim"] = options.head_dim;
  row["difference"] = difference;
  row["product_ms"] = timing_json(times[0]);
  row["product_and_rotation_ms"] = timing_json(times[1]);
  row["fused_ms"] = timing_json(times[2]);
  row["fused_to_product"] = to_product;
  row["fused_to_product_and_rotation"] = to_both;
  return row;
}

void run(const Options& options) {
  TWELL_REQUIRE(options.rounds > 0, "--rounds {}: at least 1", options.rounds);
  const CudaStream stream;
  CudaContext ctx(stream.get());
  for (const int64_t tokens : options.tokens) {
    const QkvCuda problem{.width = options.width,
                          .rope = {.tokens = tokens,
                                   .heads = options.heads,
                                   .kv_heads = options.kv_heads,
                                   .head_dim = options.head_dim}};
    TWELL_REQUIRE(
        tokens > 0 && options.heads > 0 && options.kv_heads > 0 && qkv_is_fused(ctx, problem),
        "--tokens {} --width {} --heads {} --kv-heads {} --head-dim {}: the fused "
        "projection is for Hopper, 1024 tokens or more, heads of 64 or 128, and widths "
        "that are a multiple of 8",
        tokens, options.width, options.heads, options.kv_heads, options.head_dim);
  }
  JsonLines lines(ctx, "cuBLASLt, fastest proposal", options.jsonl);
  const RopeTable table(kPositions, options.head_dim, 10000.0);
  fmt::print("{}, CUDA driver {}, D {}, {} + 2 x {} heads of {}; ms\n", ctx.device_name(),
             lines.driver(), options.width, options.heads, options.kv_heads, options.head_dim);
  fmt::print("{:>7}  {:>9} {:>9} {:>9}  {:>8} {:>8}  {:>7}   {}\n", "M", "product", "+ rotated",
             "fused", "of prod.", "of both", "TFLOP/s", "difference");
  for (const int64_t tokens : options.tokens) {
    lines.write(measure(ctx, stream, options, table, tokens));
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("The fused q/k/v projection on the GPU against cuBLASLt.");
  app.add_option("--tokens", options.tokens, "tokens, from 1024 on");
  app.add_option("--width", options.width, "width of x")->capture_default_str();
  app.add_option("--heads", options.heads, "query heads")->capture_default_str();
  app.add_option("--kv-heads", options.kv_heads, "key and value heads")->capture_default_str();
  app.add_option("--head-dim", options.head_dim, "columns of a head")->capture_default_str();
  app.add_option("--rounds", options.rounds, "timed rounds")->capture_default_str();
  app.add_option("--jsonl", options.jsonl, "file to append JSON lines to");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("qkv_cuda_bench", [&] { twell::run(options); });
}
