// SPDX-License-Identifier: Apache-2.0
// Times decode attention over a paged cache on the GPU, as attention_division() divides the keys
// and in other divisions. A row has the floor, which is reading keys and values at the bandwidth
// that the device states, and of the chosen and the fastest division: warps of a CTA x splits of a
// sequence x loads of a lane, microseconds, and the floor's share of them; then all divisions.
//   attention_decode_cuda_bench [--sequences S]... [--keys N]... [--heads H] [--kv-heads K]
//                               [--head-dim N] [--rounds N] [--cache-8bit]
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/base/rounding.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {
namespace {

struct Options {
  std::vector<int64_t> sequences{1, 8, 64}, keys{160, 2000, 16000};
  int64_t heads = 32, kv_heads = 8, head_dim = 64;
  int rounds = 15;
  bool eight_bits = false;
};

// Caches of enough layers, read one after the other, that none is left in the L2 cache.
constexpr int64_t kBytesOfAllLayers = int64_t{1} << 28;

// The chosen division, then those that the kernel has and the workspace has room for.
std::vector<AttentionDivision> divisions_of(const AttentionCuda& p, int64_t keys,
                                            int multiprocessors) {
  constexpr int64_t kLeastKeys = 220, kMostKeys = 2048;  // of a split
  std::vector<AttentionDivision> all = {attention_division(p, keys, multiprocessors)};
  for (const int warps : {1, 2, 4, 8}) {
    if (p.head_dim > 128 && warps > 4) continue;
    for (const int64_t splits : {1, 2, 4, 8, 16, 32, 64}) {
      const int64_t of_split = ceil_div(keys, splits);
      if (of_split > kMostKeys || (splits > 1 && of_split < kLeastKeys)) continue;
      if (splits > 1 &&
          splits * p.sequences.count > attention_partial_splits(p.sequences.count, keys)) {
        continue;
      }
      all.push_back({splits, warps});
      if (warps == 1 && p.heads == p.kv_heads) all.push_back({splits, warps, /*loads=*/4});
    }
  }
  return all;
}

void measure(CudaContext& ctx, const CudaStream& stream, const Options& options, int64_t sequences,
             int64_t keys, double bandwidth /* bytes per us */) {
  const int64_t width = options.heads * options.head_dim;
  const int64_t kv_width = options.kv_heads * options.head_dim;
  const int64_t blocks = ceil_div(keys, int64_t{kKvBlock});
  const int64_t rows = sequences * blocks * kKvBlock;
  const int64_t row_bytes = options.eight_bits ? kv_width + 4 * options.kv_heads : 2 * kv_width;
  const int64_t bytes = 2 * sequences * keys * row_bytes;
  const int64_t layers = std::clamp<int64_t>(kBytesOfAllLayers / bytes, 2, 256);
  const auto part = random_operand(1 << 20, 1, 1.0f);
  DeviceBuffer<__nv_bfloat16> k(layers * rows * kv_width), v(layers * rows * kv_width);
  // In 8 bits half of this memory is the bytes. Scales are 0, those of keys and then those of
  // values.
  const int64_t part_scales = options.eight_bits ? rows * options.kv_heads : 0;
  const DeviceBuffer<float> scales(2 * layers * part_scales);
  TWELL_CUDA_CHECK(cudaMemset(scales.data(), 0, static_cast<size_t>(scales.bytes())));
  for (int64_t at = 0; at < k.size(); at += 1 << 20) {
    const auto n = static_cast<size_t>(std::min<int64_t>(1 << 20, k.size() - at)) * 2;
    TWELL_CUDA_CHECK(cudaMemcpy(k.data() + at, part.data(), n, cudaMemcpyDefault));
    TWELL_CUDA_CHECK(cudaMemcpy(v.data() + at, part.data(), n, cudaMemcpyDefault));
  }
  const auto q = upload(random_operand(sequences * width, 2, 1.0f));
  const auto out = poisoned<__nv_bfloat16>(sequences * width);
  std::vector<int32_t> q_begin(static_cast<size_t>(sequences)),
      tables(static_cast<size_t>(sequences * blocks));
  std::iota(q_begin.begin(), q_begin.end(), 0);
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), std::mt19937(1));
  std::vector<int64_t> kv_begin;
  for (int64_t i = 0; i < sequences; ++i) kv_begin.push_back(i * blocks);
  const auto d_q_begin = upload(q_begin);
  const auto d_q_len = upload(std::vector<int32_t>(static_cast<size_t>(sequences), 1));
  const auto d_kv_len =
      upload(std::vector<int32_t>(static_cast<size_t>(sequences), static_cast<int32_t>(keys)));
  const auto d_kv_begin = upload(kv_begin);
  const auto d_tables = upload(tables);
  const auto layer = [&](int64_t i) {
    AttentionCuda p{.heads = options.heads,
                    .kv_heads = options.kv_heads,
                    .head_dim = options.head_dim,
                    .sequences = {.count = sequences,
                                  .max_q_len = 1,
                                  .max_kv_len = keys,
                                  .rows = sequences,
                                  .q_begin = d_q_begin.data(),
                                  .q_len = d_q_len.data(),
                                  .kv_len = d_kv_len.data(),
                                  .kv_begin = d_kv_begin.data(),
                                  .tables = d_tables.data(),
                                  .blocks = sequences * blocks},
                    .q = q.data(),
                    .q_stride = width,
                    .kv_stride = kv_width,
                    .out = out.data()};
    if (options.eight_bits) {
      float* const scales_of_layer = scales.data() + 2 * i * part_scales;
      const auto bytes_of = [&](const DeviceBuffer<__nv_bfloat16>& both) {
        return reinterpret_cast<int8_t*>(both.data()) + i * rows * kv_width;
      };
      p.k8 = {bytes_of(k), scales_of_layer};
      p.v8 = {bytes_of(v), scales_of_layer + part_scales};
    } else {
      p.k = k.data() + i * rows * kv_width;
      p.v = v.data() + i * rows * kv_width;
    }
    return p;
  };
  const AttentionWorkspaceCuda workspace(sequences, options.heads, options.head_dim, keys);
  const std::vector<AttentionDivision> divisions =
      divisions_of(layer(0), keys, ctx.multiprocessors());
  std::vector<Piece> pieces;
  for (const AttentionDivision& division : divisions) {
    pieces.push_back([&, division] {
      for (int64_t i = 0; i < layers; ++i) {
        TWELL_CUDA_CHECK(
            launch_attention_decode(layer(i), workspace.splits(division, sequences), ctx.stream()));
      }
    });
  }
  const auto times = time_pieces(stream.get(), options.rounds, pieces);
  const double floor = static_cast<double>(bytes) / bandwidth;
  std::string all;
  const auto text = [&](size_t i) {
    const double us = times[i].median * 1e3 / static_cast<double>(layers);
    const AttentionDivision& of = divisions[i];
    all += fmt::format(" {}x{}x{}:{:.1f}", of.warps, of.splits, of.loads, us);
    return fmt::format("{}x{}x{} {:7.1f} ({:.2f})", of.warps, of.splits, of.loads, us, floor / us);
  };
  const std::string chosen = text(0);
  all.clear();
  std::string best;
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = 1; i < divisions.size(); ++i) {
    const std::string this_one = text(i);
    if (times[i].median >= least) continue;
    least = times[i].median;
    best = this_one;
  }
  fmt::print("{}/{}x{} S {:3} keys {:5}: floor {:7.1f} chosen {} best {} |{}\n", options.heads,
             options.kv_heads, options.head_dim, sequences, keys, floor, chosen, best, all);
  std::fflush(stdout);
}

void run(const Options& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const double bandwidth = gpu_device(ctx).bandwidth;
  fmt::print("{}, {:.0f} GB/s\n", ctx.device_name(), bandwidth * 1e-3);
  for (const int64_t sequences : options.sequences) {
    for (const int64_t keys : options.keys) {
      measure(ctx, stream, options, sequences, keys, bandwidth);
    }
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("Decode attention on the GPU.");
  app.add_option("--sequences", options.sequences, "Sequences of a batch; repeatable");
  app.add_option("--keys", options.keys, "Keys of a sequence; repeatable");
  app.add_option("--heads", options.heads, "Query heads");
  app.add_option("--kv-heads", options.kv_heads, "Key/value heads");
  app.add_option("--head-dim", options.head_dim, "Columns of a head");
  app.add_flag("--cache-8bit", options.eight_bits, "Keys and values in 8 bits");
  app.add_option("--rounds", options.rounds, "Timed rounds of each division");
  CLI11_PARSE(app, argc, argv);
  return twell::run_benchmark("attention_decode_cuda_bench", [&] { twell::run(options); });
}
