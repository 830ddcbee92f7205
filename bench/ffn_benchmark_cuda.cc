// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark_cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "twell/base/cuda_testing.h"
#include "twell/base/gpu_energy.h"
#include "twell/base/rng.h"
#include "twell/ops/ffn/gate_gemm_cuda.h"

namespace twell {
namespace {

using Values = DeviceBuffer<__nv_bfloat16>;
using Piece = std::function<void()>;

constexpr int64_t kL2Copies = 4;  // of the weights for a few tokens
constexpr int kWarmUps = 2;

// bf16 from a uniform distribution of the given standard deviation: fast to draw, never zeros.
std::vector<__nv_bfloat16> random_operand(int64_t n, uint64_t seed, uint64_t stream, float scale) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i += 4) {
    const auto bits = philox(seed, stream, static_cast<uint64_t>(i));
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j) {
      const float u = static_cast<float>(bits[static_cast<size_t>(j)]) * 0x1p-32f - 0.5f;
      values[static_cast<size_t>(i + j)] = __float2bfloat16(u * std::sqrt(12.0f) * scale);
    }
  }
  return values;
}

double relative_difference(const Values& a, const Values& b) {
  const auto x = download(a), y = download(b);
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double u = __bfloat162float(x[i]), v = __bfloat162float(y[i]);
    difference += (u - v) * (u - v);
    size += v * v;
  }
  return size == 0.0 ? difference : std::sqrt(difference / size);
}

// Quantile of the standard normal, by bisection.
double normal_quantile(double p) {
  double low = -10.0, high = 10.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {}

  double milliseconds(const CudaGraph& graph) const {
    begin_.record(stream_);
    graph.launch(stream_);
    end_.record(stream_);
    end_.synchronize();
    return end_.milliseconds_since(begin_);
  }
  // Rounds run every piece once, so that all see the same clocks. `repeats`: how often the work is
  // in its piece.
  std::vector<FfnCudaTiming> rounds(int count, const std::vector<Piece>& pieces,
                                    double repeats) const {
    std::vector<CudaGraph> graphs;
    for (const Piece& piece : pieces) graphs.emplace_back(stream_, piece);
    std::vector<std::vector<double>> times(pieces.size());
    for (int round = -kWarmUps; round < count; ++round) {
      for (size_t i = 0; i < pieces.size(); ++i) {
        const double elapsed = milliseconds(graphs[i]) / repeats;
        if (round >= 0) times[i].push_back(elapsed);
      }
    }
    std::vector<FfnCudaTiming> result;
    for (auto& t : times) {
      std::sort(t.begin(), t.end());
      result.push_back({t[t.size() / 2], t[t.size() / 10], t[t.size() * 9 / 10]});
    }
    return result;
  }

 private:
  cudaStream_t stream_;
  CudaEvent begin_{CudaEvent::Timing::kOn}, end_{CudaEvent::Timing::kOn};
};

// Joules of one run of the piece, over at least `seconds`; 0 when there is no counter. The window
// begins and ends where the counter steps, which it does some ten times a second.
double joules_per_run(const CudaContext& ctx, const GpuEnergyMeter& meter, const Piece& piece,
                      double seconds) {
  if (seconds <= 0.0 || !meter.unavailable().empty()) return 0.0;
  const CudaGraph graph(ctx.stream(), piece);
  using Clock = std::chrono::steady_clock;
  int64_t runs = 0;
  // Keeps the GPU busy until the counter steps, and says what it stands at then.
  const auto next_step = [&] {
    const double before = meter.joules();
    double now = before;
    while (now == before) {
      for (int i = 0; i < 8; ++i, ++runs) graph.launch(ctx.stream());
      TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
      now = meter.joules();
    }
    return now;
  };
  next_step();
  const double from = next_step();
  const auto start = Clock::now();
  runs = 0;
  double to = from;
  while (to == from || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    to = next_step();
  }
  return (to - from) / static_cast<double>(runs);
}

GpuEnergyMeter energy_meter(const CudaContext& ctx) {
  char bus_id[32] = {};
  TWELL_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), ctx.device()));
  return GpuEnergyMeter(bus_id);
}

// Operands of one layer: x, and weights of the usual scale.
struct Layer {
  Values x, w_gate, w_up, w_down;
  FfnWeightsCuda weights() const { return {w_gate.data(), w_up.data(), w_down.data()}; }
};

// TwELL of the pattern with random positive values, and the same gate dense.
struct PatternOnDevice {
  TwellShape shape;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<BF16> spill;
  DeviceBuffer<int32_t> row_nnz;
  TwellPacked packed;

  PatternOnDevice(const FfnPattern& pattern, int64_t ffn, uint64_t seed, __nv_bfloat16* dense)
      : shape{static_cast<int64_t>(pattern.row_nnz.size()), ffn, 256, 8} {
    const auto tiles = static_cast<size_t>(shape.tiles());
    std::vector<uint32_t> host_words(static_cast<size_t>(shape.words()), 0xffffffffu);
    std::vector<BF16> host_spill;
    std::vector<uint16_t> all(static_cast<size_t>(shape.rows * ffn));
    std::vector<std::vector<uint32_t>> entries(tiles);
    size_t next = 0;
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (auto& tile : entries) tile.clear();
      for (int i = 0; i < pattern.row_nnz[static_cast<size_t>(row)]; ++i, ++next) {
        const int64_t column = pattern.column[next];
        const uint16_t bits = to_bf16(0.05f + uniform(seed, 1, next)).bits;
        entries[static_cast<size_t>(column / 256)].push_back(
            TwellWord<uint32_t>::from_bits(column, bits));
        all[static_cast<size_t>(row * ffn + column)] = bits;
      }
      for (size_t t = 0; t < tiles; ++t) {
        uint32_t* out = host_words.data() + shape.offset(row, static_cast<int64_t>(t));
        out[0] = static_cast<uint32_t>(entries[t].size());
        if (static_cast<int64_t>(entries[t].size()) <= shape.capacity()) {
          std::copy(entries[t].begin(), entries[t].end(), out + 1);
          continue;
        }
        const size_t slot = host_spill.size() / 256;
        out[1] = static_cast<uint32_t>(slot);
        host_spill.resize(host_spill.size() + 256);
        for (const uint32_t entry : entries[t]) {
          host_spill[slot * 256 + entry % 256] = BF16{static_cast<uint16_t>(entry >> 16)};
        }
      }
    }
    if (host_spill.empty()) host_spill.resize(256);
    words = upload(host_words);
    spill = upload(host_spill);
    row_nnz = upload(pattern.row_nnz);
    packed = {shape, words.data(), spill.data(), static_cast<int64_t>(host_spill.size() / 256),
              row_nnz.data()};
    TWELL_CUDA_CHECK(cudaMemcpy(dense, all.data(), all.size() * 2, cudaMemcpyHostToDevice));
    synchronize_default_stream();
  }
};

// What all rows of a pattern share.
FfnCudaRow row_of(const FfnPattern& pattern, FfnExecution execution) {
  FfnCudaRow row;
  row.pattern = pattern.name;
  row.execution = execution;
  row.tokens = static_cast<int64_t>(pattern.row_nnz.size());
  row.nnz_per_token =
      static_cast<double>(pattern.column.size()) / static_cast<double>(pattern.row_nnz.size());
  row.max_row_nnz = *std::max_element(pattern.row_nnz.begin(), pattern.row_nnz.end());
  return row;
}

void require_same(const FfnCudaRow& row) {
  // Each side is within a few bf16 roundings of exact. Written so that NaN fails.
  TWELL_CHECK(row.error < std::ldexp(1.0, -7), "{}: the {} execution differs by {} from dense",
              row.pattern, ffn_execution_name(row.execution), row.error);
}

// Fills in what follows from the timings, which dense leads.
void finish(CudaContext& ctx, const FfnCudaBenchmark& options, const std::vector<Piece>& layers,
            double repeats, const GpuFfnChoice& choice, std::vector<FfnCudaRow>& rows) {
  const GpuEnergyMeter meter = energy_meter(ctx);
  for (size_t i = 0; i < rows.size(); ++i) {
    FfnCudaRow& row = rows[i];
    row.speedup = rows[0].layer.median_ms / row.layer.median_ms;
    row.chosen = row.execution == choice.execution;
    row.reason = choice.reason;
    row.millijoules_per_token = joules_per_run(ctx, meter, layers[i], options.energy_seconds) *
                                1e3 / (repeats * static_cast<double>(row.tokens));
  }
}

GpuFfnChoice choice_of(const CudaContext& ctx, const FfnBenchmark& options, int64_t tokens,
                       FfnPolicy policy, const LayerActivity& activity) {
  const GpuFfnLayer layer{.width = options.width,
                          .ffn = options.ffn,
                          .gated = options.gated,
                          .device = gpu_device(ctx)};
  return choose_gpu_ffn(layer, {.tokens = tokens, .policy = policy}, activity);
}

// Many tokens: the given pattern after the gate, random operands in the gate GEMM.
std::vector<FfnCudaRow> replayed(CudaContext& ctx, const FfnCudaBenchmark& options,
                                 const FfnPattern& pattern) {
  const FfnBenchmark& o = options.layer;
  const auto tokens = static_cast<int64_t>(pattern.row_nnz.size());
  TWELL_REQUIRE(o.gated,
                "a pattern of {} tokens can be replayed in a gated layer only; fewer tokens run a "
                "non-gated one",
                tokens);
  auto host_x = random_operand(tokens * o.width, o.seed, 1, 1.0f);
  auto host_gate = random_operand(o.ffn * o.width, o.seed, 4, 0.02f);
  // x[:, 0] is 1 and w_gate[:, 0] the bias; the rest of a gate has deviation 0.02 sqrt(D - 1).
  const double share = static_cast<double>(pattern.column.size()) /
                       (static_cast<double>(tokens) * static_cast<double>(o.ffn));
  const auto bias = static_cast<float>(0.02 * std::sqrt(static_cast<double>(o.width - 1)) *
                                       normal_quantile(std::clamp(share, 1e-6, 1.0 - 1e-6)));
  for (size_t i = 0; i < host_x.size(); i += static_cast<size_t>(o.width)) {
    host_x[i] = __float2bfloat16(1.0f);
  }
  for (size_t i = 0; i < host_gate.size(); i += static_cast<size_t>(o.width)) {
    host_gate[i] = __float2bfloat16(bias);
  }
  const Layer layer{upload(host_x), upload(host_gate),
                    upload(random_operand(o.ffn * o.width, o.seed, 2, 0.02f)),
                    upload(random_operand(o.ffn * o.width, o.seed, 3, 0.02f))};
  const FfnWeightsCuda weights = layer.weights();
  const __nv_bfloat16* x = layer.x.data();

  DenseFfnCuda dense(ctx, tokens, o.width, o.ffn, true);
  const Values dense_y = poisoned<__nv_bfloat16>(tokens * o.width);
  const Values y = poisoned<__nv_bfloat16>(tokens * o.width);
  dense.tune(ctx, weights, x, dense_y.data());
  const PatternOnDevice gate(pattern, o.ffn, o.seed, dense.gate_values());
  dense.up_down(ctx, weights, x, dense_y.data());
  const DeviceBuffer<ActivityCuda> counts = upload(std::vector<ActivityCuda>(1));
  SparseUpDownCuda up_down{.tokens = tokens,
                           .width = o.width,
                           .ffn = o.ffn,
                           .gate = gate.packed,
                           .x = x,
                           .w_up = weights.w_up,
                           .w_down = weights.w_down,
                           .y = y.data(),
                           .activity = counts.data()};

  const TwellShape shape{tokens, o.ffn, 256, 8};
  const DeviceBuffer<uint32_t> words(shape.words());
  const DeviceBuffer<BF16> spill(shape.max_spill_slots() * shape.tile);
  const DeviceBuffer<int32_t> row_nnz(tokens);
  const GateGemmCuda gate_gemm{
      tokens,         o.width,
      o.ffn,          x,
      weights.w_gate, {shape, words.data(), spill.data(), shape.max_spill_slots(), row_nnz.data()}};
  TileUnionWorkspace unions(tokens, o.ffn);
  RowFusedWorkspace rows_workspace(ctx, tokens, o.width);
  const Piece tile_union = [&] { tile_union_up_down_cuda(ctx, up_down, unions); };
  const Piece row_fused = [&] { row_fused_up_down_cuda(ctx, up_down, rows_workspace); };

  std::vector<FfnCudaRow> rows = {row_of(pattern, FfnExecution::kDense),
                                  row_of(pattern, FfnExecution::kTileUnion),
                                  row_of(pattern, FfnExecution::kRowFused)};
  const Piece* sparse[] = {&tile_union, &row_fused};
  for (size_t i = 0; i < 2; ++i) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(y.bytes()), ctx.stream()));
    (*sparse[i])();
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    rows[i + 1].error = relative_difference(y, dense_y);
    require_same(rows[i + 1]);
    if (i == 0) up_down.activity = nullptr;
  }
  const GpuFfnChoice choice =
      choice_of(ctx, o, tokens, FfnPolicy::kAuto, layer_activity(download(counts)[0], o.ffn));

  // Behind the gate GEMM, tiles of the pattern are taken as that gets tiles of its own done.
  GateGemmCuda followed_gate = gate_gemm;
  followed_gate.progress = unions.progress(tokens);
  SparseUpDownCuda following = up_down;
  following.follows_gate = true;
  const std::vector<Piece> layers = {[&] { dense.forward(ctx, weights, x, dense_y.data()); },
                                     [&] {
                                       gate_gemm_cuda(ctx, followed_gate);
                                       tile_union_up_down_cuda(ctx, following, unions);
                                     },
                                     [&] {
                                       gate_gemm_cuda(ctx, gate_gemm);
                                       row_fused();
                                     }};
  std::vector<Piece> pieces = {
      [&] { dense.gate(ctx, weights, x); }, [&] { gate_gemm_cuda(ctx, gate_gemm); },
      [&] { dense.up_down(ctx, weights, x, dense_y.data()); }, tile_union, row_fused};
  pieces.insert(pieces.end(), layers.begin(), layers.end());
  const auto times = Stopwatch(ctx.stream()).rounds(o.repeats, pieces, 1.0);
  for (size_t i = 0; i < 3; ++i) {
    rows[i].gate = times[i == 0 ? 0 : 1];
    rows[i].up_down = times[2 + i];
    rows[i].layer = times[5 + i];
  }
  finish(ctx, options, layers, 1.0, choice, rows);
  return rows;
}

// A few tokens: a layer whose own gate fires as in the pattern. The rows of x are orthogonal up to
// rounding, of length sqrt(D), so w_gate = G^T x / D.
Layer firing_layer(const FfnBenchmark& o, const FfnPattern& pattern, uint64_t copy) {
  const auto tokens = static_cast<int64_t>(pattern.row_nnz.size());
  std::vector<float> x(static_cast<size_t>(tokens * o.width));
  // Gram-Schmidt on random directions.
  for (int64_t m = 0; m < tokens; ++m) {
    float* row = x.data() + m * o.width;
    for (int64_t d = 0; d < o.width; ++d) {
      row[d] = normal(o.seed, 20, static_cast<uint64_t>(m * o.width + d));
    }
    for (int64_t other = 0; other < m; ++other) {
      const float* done = x.data() + other * o.width;
      const float along = std::inner_product(row, row + o.width, done, 0.0f) /
                          std::inner_product(done, done + o.width, done, 0.0f);
      for (int64_t d = 0; d < o.width; ++d) row[d] -= along * done[d];
    }
  }
  std::vector<float> gate(static_cast<size_t>(tokens * o.ffn), -1.0f);
  size_t next = 0;
  for (int64_t m = 0; m < tokens; ++m) {
    for (int i = 0; i < pattern.row_nnz[static_cast<size_t>(m)]; ++i) {
      gate[static_cast<size_t>(m * o.ffn + pattern.column[next++])] = 1.0f;
    }
  }
  std::vector<__nv_bfloat16> w_firing(static_cast<size_t>(o.ffn * o.width));
  std::vector<float> row(static_cast<size_t>(o.width));
  const float scale = 1.0f / static_cast<float>(o.width);
  for (int64_t n = 0; n < o.ffn; ++n) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (int64_t m = 0; m < tokens; ++m) {
      const float g = gate[static_cast<size_t>(m * o.ffn + n)] * scale;
      for (int64_t d = 0; d < o.width; ++d) {
        row[static_cast<size_t>(d)] += g * x[static_cast<size_t>(m * o.width + d)];
      }
    }
    for (int64_t d = 0; d < o.width; ++d) {
      w_firing[static_cast<size_t>(n * o.width + d)] =
          __float2bfloat16(row[static_cast<size_t>(d)]);
    }
  }
  std::vector<__nv_bfloat16> x_bf16(x.size());
  std::transform(x.begin(), x.end(), x_bf16.begin(),
                 [](float value) { return __float2bfloat16(value); });
  const auto other = [&](uint64_t stream) {
    return upload(random_operand(o.ffn * o.width, o.seed + copy, stream, 0.02f));
  };
  Layer layer;
  layer.x = upload(x_bf16);
  if (o.gated) {
    layer.w_gate = upload(w_firing);
    layer.w_up = other(2);
  } else {
    layer.w_up = upload(w_firing);
  }
  layer.w_down = other(3);
  return layer;
}

std::vector<FfnCudaRow> few_tokens(CudaContext& ctx, const FfnCudaBenchmark& options,
                                   const FfnPattern& pattern) {
  const FfnBenchmark& o = options.layer;
  const auto tokens = static_cast<int64_t>(pattern.row_nnz.size());
  std::vector<Layer> copies;
  for (int64_t copy = 0; copy < kL2Copies; ++copy) {
    copies.push_back(firing_layer(o, pattern, static_cast<uint64_t>(copy)));
  }
  DenseFfnCuda dense(ctx, tokens, o.width, o.ffn, o.gated);
  const Values dense_y = poisoned<__nv_bfloat16>(tokens * o.width);
  const Values y = poisoned<__nv_bfloat16>(tokens * o.width);
  dense.tune(ctx, copies[0].weights(), copies[0].x.data(), dense_y.data());
  dense.forward(ctx, copies[0].weights(), copies[0].x.data(), dense_y.data());

  FfnPlansCuda plans(ctx, 1, o.ffn, FfnPolicy::kRowFused);
  FfnWorkspaceCuda workspace(ctx, tokens, o.width, o.ffn, o.gated);
  const auto run = [&](const Layer& layer) {
    ffn_forward_cuda(
        ctx, {.tokens = tokens, .weights = layer.weights(), .x = layer.x.data(), .y = y.data()},
        plans[0], workspace);
  };
  run(copies[0]);
  plans.update(ctx);
  std::vector<FfnCudaRow> rows = {row_of(pattern, FfnExecution::kDense),
                                  row_of(pattern, plans[0].plan.execution)};
  rows[1].error = relative_difference(y, dense_y);
  require_same(rows[1]);
  TWELL_CHECK(plans[0].plan.nnz == static_cast<int64_t>(pattern.column.size()),
              "{}: the gate fires {} times, expected {}", pattern.name, plans[0].plan.nnz,
              pattern.column.size());
  const GpuFfnChoice choice = choice_of(ctx, o, tokens, FfnPolicy::kAuto, plans[0].activity);
  const std::vector<Piece> layers = {[&] {
                                       for (const Layer& layer : copies) {
                                         dense.forward(ctx, layer.weights(), layer.x.data(),
                                                       dense_y.data());
                                       }
                                     },
                                     [&] {
                                       for (const Layer& layer : copies) run(layer);
                                     }};
  const auto times = Stopwatch(ctx.stream()).rounds(o.repeats, layers, kL2Copies);
  for (size_t i = 0; i < 2; ++i) rows[i].layer = times[i];
  finish(ctx, options, layers, kL2Copies, choice, rows);
  return rows;
}

}  // namespace

std::vector<FfnCudaRow> benchmark_ffn_cuda(CudaContext& ctx, const FfnCudaBenchmark& options,
                                           const FfnPattern& pattern) {
  const FfnBenchmark& o = options.layer;
  TWELL_REQUIRE(!pattern.row_nnz.empty(), "the pattern {} has no tokens", pattern.name);
  TWELL_REQUIRE(o.width > 0 && o.width % 8 == 0 && o.ffn > 0 && o.ffn % 8 == 0,
                "width {} and FFN size {} must be positive multiples of 8 on a GPU", o.width,
                o.ffn);
  for (const uint32_t column : pattern.column) {
    TWELL_REQUIRE(static_cast<int64_t>(column) < o.ffn, "{}: neuron {} of a layer of {}",
                  pattern.name, column, o.ffn);
  }
  TWELL_REQUIRE(ctx.compute_capability() == 90,
                "this benchmark times Hopper kernels, {} is of compute capability {}.{}",
                ctx.device_name(), ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  const auto tokens = static_cast<int64_t>(pattern.row_nnz.size());
  const GpuFfnChoice sparse = choice_of(ctx, o, tokens, FfnPolicy::kTileUnion, {});
  return sparse.execution == FfnExecution::kTileUnion ? replayed(ctx, options, pattern)
                                                      : few_tokens(ctx, options, pattern);
}

}  // namespace twell
