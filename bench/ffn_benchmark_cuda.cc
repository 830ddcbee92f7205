// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>

#include "bench/harness_cuda.h"
#include "twell/base/rng.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {
namespace {

using Values = DeviceBuffer<__nv_bfloat16>;

constexpr int64_t kL2Copies = 4;         // copies of the weights for fewer tokens
constexpr int64_t kMostAsEngine = 2048;  // tokens; above, gate, up and down are also timed apart

// The operands of one layer: x, and weights of the usual scale.
struct DeviceLayer {
  Values x, w_gate, w_up, w_down;  // w_gate: empty without a gate
  Activation activation;
  FfnWeightsCuda weights() const { return {w_gate.data(), w_up.data(), w_down.data(), activation}; }
};

// A row with the fields that all executions of a pattern share.
FfnCudaRow row_of(const FfnPattern& pattern, FfnExecution execution) {
  FfnCudaRow row;
  row.pattern = pattern.name;
  row.execution = execution;
  row.tokens = pattern.tokens();
  row.nnz_per_token = pattern.nnz_per_token();
  row.max_row_nnz = pattern.max_row_nnz();
  return row;
}

void require_same(const FfnCudaRow& row) {
  // Each result is within a few bf16 roundings of the exact one. NaN fails this comparison.
  TWELL_CHECK(row.error < std::ldexp(1.0, -7), "{}: the {} execution differs by {} from dense",
              row.pattern, row.execution.name, row.error);
}

// Computes the derived fields from the timings; the first row is dense.
void finish(CudaContext& ctx, const FfnCudaBenchmark& options, const std::vector<Piece>& layers,
            double repeats, const GpuFfnChoice& choice, std::vector<FfnCudaRow>& rows) {
  const GpuEnergyMeter meter = energy_meter(ctx);
  for (size_t i = 0; i < rows.size(); ++i) {
    FfnCudaRow& row = rows[i];
    row.speedup = rows[0].layer.median / row.layer.median;
    const FfnExecution chosen = *choice.execution;
    row.chosen =
        !row.eight_bit && (chosen.sparse ? row.execution == chosen : !row.execution.sparse);
    row.reason = choice.reason;
    row.millijoules_per_token = joules_per_run(ctx, meter, layers[i], options.energy_seconds) *
                                1e3 / (repeats * static_cast<double>(row.tokens));
  }
}

GpuFfnChoice choice_of(const CudaContext& ctx, const FfnBenchmark& options, int64_t tokens,
                       FfnPolicy policy, const LayerActivity& activity) {
  const GpuFfnLayer layer = gpu_ffn_layer(gpu_device(ctx), {.width = options.width,
                                                            .ffn = options.ffn,
                                                            .gated = options.gated,
                                                            .activation = options.activation});
  return choose_gpu_ffn(layer, {.tokens = tokens, .policy = policy}, activity);
}

// --- Dense layers in 8 bits ---------------------------------------------------------------------

constexpr int64_t kErrorTokens = 256;

// A layer of normal x and weights with about nnz of F active neurons per token. Each row of x and
// of the gate contains one vector of signs, s: x = noise + s, w_gate = 0.02 noise + b s / D, so
// that the mean of the gate is b and no column is larger than the others.
DeviceLayer normal_layer(const FfnBenchmark& o, int64_t tokens, double nnz) {
  constexpr int64_t kBlock = (int64_t{1} << 20) + 7;  // values drawn; odd, so that rows differ
  const auto draw = [&](int64_t count, uint64_t stream) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = normal(o.seed, stream, i);
    return values;
  };
  const std::vector<float> signs = draw(o.width, 11), noise = draw(kBlock, 12);
  const auto matrix = [&](const std::vector<float>& from, int64_t rows, int64_t offset,
                          float deviation, float mean) {
    std::vector<__nv_bfloat16> values(static_cast<size_t>(rows * o.width));
    for (size_t i = 0; i < values.size(); ++i) {
      const float value = deviation * from[(static_cast<size_t>(offset) + i) % from.size()];
      const float sign = signs[i % static_cast<size_t>(o.width)] < 0.0f ? -1.0f : 1.0f;
      values[i] = __float2bfloat16(value + sign * mean);
    }
    return upload(values);
  };
  // x has twice the variance of its noise, so the gate's deviation is sqrt(2) of what gate_bias
  // assumes.
  const float b = std::sqrt(2.0f) * gate_bias(nnz, o.ffn, o.width);
  DeviceLayer layer{.x = matrix(draw(tokens * o.width, 13), tokens, 0, 1.0f, 1.0f),
                    .w_down = matrix(noise, o.ffn, kBlock / 3, 0.02f, 0.0f),
                    .activation = o.activation};
  (o.gated ? layer.w_gate : layer.w_up) =
      matrix(noise, o.ffn, 0, 0.02f, b / static_cast<float>(o.width));
  if (o.gated) layer.w_up = matrix(noise, o.ffn, 2 * kBlock / 3, 0.02f, 0.0f);
  return layer;
}

// A dense layer in 8 bits, and the quantised copies of its weights.
struct Layer8Bit {
  Dense8Bit kind;
  std::unique_ptr<DenseFfn8BitCuda> layer;
  std::vector<FfnWeights8BitCuda> weights;
};

// The layers that can run, tuned on the first of the copies; appends why others cannot.
std::vector<Layer8Bit> layers_8bit(CudaContext& ctx, const FfnBenchmark& o, int64_t tokens,
                                   std::span<const FfnWeightsCuda> copies, const __nv_bfloat16* x,
                                   const Values& y, std::vector<std::string>& left_out) {
  std::vector<Layer8Bit> layers;
  for (const Dense8Bit kind : {Dense8Bit::kFp8, Dense8Bit::kInt8}) {
    auto layer = std::make_unique<DenseFfn8BitCuda>(ctx, kind, tokens, o.width, o.ffn, o.gated,
                                                    o.activation);
    if (!layer->unavailable().empty()) {
      left_out.push_back(fmt::format("{}: {}", dense_8bit_name(kind), layer->unavailable()));
      continue;
    }
    Layer8Bit& added = layers.emplace_back(Layer8Bit{kind, std::move(layer), {}});
    for (const FfnWeightsCuda& copy : copies) {
      added.weights.emplace_back(ctx, kind, copy, o.width, o.ffn);
    }
    added.layer->tune(ctx, added.weights[0], x, y.data());
  }
  return layers;
}

// Rows of 8-bit layers with their errors, without times.
std::vector<FfnCudaRow> rows_8bit(CudaContext& ctx, const FfnBenchmark& o,
                                  const FfnPattern& pattern, std::span<const Layer8Bit> layers) {
  if (layers.empty()) return {};
  const int64_t tokens = std::min(pattern.tokens(), kErrorTokens);
  const DeviceLayer operands = normal_layer(o, tokens, pattern.nnz_per_token());
  const Values dense_y = poisoned<__nv_bfloat16>(tokens * o.width);
  const Values y = poisoned<__nv_bfloat16>(tokens * o.width);
  DenseFfnCuda dense(ctx, tokens, o.width, o.ffn, o.gated, o.activation);
  dense.forward(ctx, operands.weights(), operands.x.data(), dense_y.data());
  std::vector<FfnCudaRow> rows;
  for (const Layer8Bit& timed : layers) {
    FfnCudaRow& row = rows.emplace_back(row_of(pattern, FfnExecution::kDense));
    row.eight_bit = timed.kind;
    row.arithmetic = timed.layer->arithmetic();
    DenseFfn8BitCuda layer(ctx, timed.kind, tokens, o.width, o.ffn, o.gated, o.activation);
    TWELL_CHECK(layer.unavailable().empty(), "{} of {} tokens: {}", row.name(), tokens,
                layer.unavailable());
    const FfnWeights8BitCuda weights(ctx, timed.kind, operands.weights(), o.width, o.ffn);
    layer.forward(ctx, weights, operands.x.data(), y.data());
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    row.error = relative_difference(y, dense_y);
    TWELL_CHECK(std::isfinite(row.error), "{}: the {} layer gives values that are not finite",
                row.pattern, row.name());
  }
  return rows;
}

// --- Tile-union in fp8 --------------------------------------------------------------------------

// Rows of a matrix in e4m3.
struct ByteRows {
  // Enqueues the quantisation of `from`.
  ByteRows(CudaContext& ctx, const __nv_bfloat16* from, int64_t rows_in, int64_t cols_in)
      : rows(rows_in), cols(cols_in), values(rows * cols), scales(rows) {
    quantise(ctx, from);
  }
  void quantise(CudaContext& ctx, const __nv_bfloat16* from) const {
    TWELL_CUDA_CHECK(launch_quantise_rows(
        {.rows = rows, .cols = cols, .x = from, .values = values.data(), .scales = scales.data()},
        ctx.stream()));
  }
  ByteRowsCuda view() const { return {values.data(), scales.data()}; }

  int64_t rows, cols;
  DeviceBuffer<uint8_t> values;
  DeviceBuffer<float> scales;
};

// The operands of a layer in e4m3; w_down as a checkpoint has it, [D, F], with a row per neuron, as
// a loaded model has it too, and for layers without a gate widened.
class ByteLayer {
 public:
  ByteLayer(CudaContext& ctx, const DeviceLayer& layer, int64_t tokens, const FfnBenchmark& o)
      : x_(ctx, layer.x.data(), tokens, o.width),
        gate_(ctx, o.gated ? layer.w_gate.data() : layer.w_up.data(), o.ffn, o.width),
        up_(ctx, layer.w_up.data(), o.ffn, o.width),
        wide_(o.ffn * o.width),
        down_(ctx, transposed(ctx, layer, o), o.width, o.ffn),
        down_rows_(o.ffn * o.width) {
    TWELL_CUDA_CHECK(launch_transpose_bytes(down_.values.data(), o.width, o.ffn, down_rows_.data(),
                                            ctx.stream()));
  }

  // What a call does before its products.
  void prepare_gate(CudaContext& ctx, const __nv_bfloat16* x) const { x_.quantise(ctx, x); }
  void prepare_down(CudaContext& ctx, bool gated) const {
    if (gated) return;
    TWELL_CUDA_CHECK(launch_widen_rows({.rows = down_.cols,
                                        .cols = down_.rows,
                                        .x = {down_rows_.data(), nullptr},
                                        .out = wide_.data()},
                                       ctx.stream()));
  }
  GateGemmCuda gate(GateGemmCuda problem) const {
    problem.x_bytes = x_.view();
    problem.w_gate_bytes = gate_.view();
    return problem;
  }
  SparseUpDownCuda up_down(SparseUpDownCuda problem) const {
    if (problem.w_up != nullptr) {
      problem.x_bytes = x_.view();
      problem.w_up_bytes = up_.view();
      problem.w_down_bytes = down_rows_.data();
    }
    problem.w_down = wide_.data();
    problem.y_scales = down_.scales.data();
    return problem;
  }

 private:
  // In wide_, which holds w_down itself later.
  const __nv_bfloat16* transposed(CudaContext& ctx, const DeviceLayer& layer,
                                  const FfnBenchmark& o) const {
    TWELL_CUDA_CHECK(
        launch_transpose(layer.w_down.data(), o.ffn, o.width, wide_.data(), ctx.stream()));
    return wide_.data();
  }

  ByteRows x_, gate_, up_;
  Values wide_;
  ByteRows down_;
  DeviceBuffer<uint8_t> down_rows_;
};

// --- The measurements ---------------------------------------------------------------------------

// For many tokens: the gate GEMM runs on random operands, the rest of the layer on the pattern.
FfnCudaResult replayed(CudaContext& ctx, const FfnCudaBenchmark& options,
                       const FfnPattern& pattern) {
  const FfnBenchmark& o = options.layer;
  const auto tokens = pattern.tokens();
  auto host_x = random_operand(tokens * o.width, 1, 1.0f, o.seed);
  auto host_gate = random_operand(o.ffn * o.width, 4, 0.02f, o.seed);
  fill_first_column(host_x, o.width, 1.0f);
  fill_first_column(host_gate, o.width, gate_bias(pattern.nnz_per_token(), o.ffn, o.width));
  DeviceLayer layer{.x = upload(host_x),
                    .w_down = upload(random_operand(o.ffn * o.width, 3, 0.02f, o.seed)),
                    .activation = o.activation};
  if (o.gated) {
    layer.w_gate = upload(host_gate);
    layer.w_up = upload(random_operand(o.ffn * o.width, 2, 0.02f, o.seed));
  } else {
    layer.w_up = upload(host_gate);
  }
  const FfnWeightsCuda weights = layer.weights();
  const __nv_bfloat16* x = layer.x.data();

  DenseFfnCuda dense(ctx, tokens, o.width, o.ffn, o.gated, o.activation);
  const Values dense_y = poisoned<__nv_bfloat16>(tokens * o.width);
  const Values y = poisoned<__nv_bfloat16>(tokens * o.width);
  dense.tune(ctx, weights, x, dense_y.data());
  const TwellBuffersCuda gate = pattern_to_device(pattern, o.ffn, o.seed, dense.gate_values());
  dense.up_down(ctx, weights, x, dense_y.data());
  const DeviceBuffer<ActivityCuda> counts = upload(std::vector<ActivityCuda>(1));
  SparseUpDownCuda up_down{.tokens = tokens,
                           .width = o.width,
                           .ffn = o.ffn,
                           .gate = gate.view(),
                           .x = x,
                           .w_up = o.gated ? weights.w_up : nullptr,
                           .w_down = weights.w_down,
                           .y = y.data(),
                           .squared = o.activation == Activation::kRelu2,
                           .activity = counts.data()};

  const TwellBuffersCuda made(gate.shape);  // output of the gate GEMM
  const GateGemmCuda gate_gemm{
      tokens, o.width, o.ffn, x, o.gated ? weights.w_gate : weights.w_up, made.view()};
  TileUnionWorkspace unions(tokens, o.ffn);
  RowFusedWorkspace rows_workspace(ctx, tokens, o.width);
  // When tile-union follows the gate GEMM, it processes a tile of the pattern once the GEMM has
  // finished that tile. Only gated layers do.
  GateGemmCuda followed_gate = gate_gemm;
  if (o.gated) followed_gate.progress = unions.progress(tokens);
  const auto following = [&o](SparseUpDownCuda problem) {
    problem.follows_gate = o.gated;
    return problem;
  };

  FfnCudaResult result;
  std::vector<FfnCudaRow>& rows = result.rows;
  rows = {row_of(pattern, FfnExecution::kDense)};
  // These time each row's gate, its up and down, and its whole layer.
  std::vector<Piece> gates = {[&] { dense.gate(ctx, weights, x); }};
  std::vector<Piece> rests = {[&] { dense.up_down(ctx, weights, x, dense_y.data()); }};
  std::vector<Piece> layers = {[&] { dense.forward(ctx, weights, x, dense_y.data()); }};
  const bool hopper = ctx.compute_capability() == 90;
  const Piece portable_gate = [&] { gate_gemm_sm80_cuda(ctx, gate_gemm); };
  const Piece own_gate = hopper ? Piece([&] { gate_gemm_cuda(ctx, gate_gemm); }) : portable_gate;
  // Adds a row whose result is checked; the first one counts activity.
  const auto add_row = [&](FfnExecution execution, const Piece& gate_piece, const Piece& rest) {
    FfnCudaRow& row = rows.emplace_back(row_of(pattern, execution));
    TWELL_CUDA_CHECK(cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(y.bytes()), ctx.stream()));
    rest();
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    row.error = relative_difference(y, dense_y);
    require_same(row);
    up_down.activity = nullptr;
    gates.push_back(gate_piece);
    rests.push_back(rest);
    layers.emplace_back([gate_piece, rest] {
      gate_piece();
      rest();
    });
  };
  const Piece portable_union = [&] { portable_union_up_down_cuda(ctx, up_down, unions); };
  if (hopper) {
    add_row(FfnExecution::kTileUnion, own_gate,
            [&] { tile_union_up_down_cuda(ctx, up_down, unions); });
    layers.back() = [&] {
      gate_gemm_cuda(ctx, followed_gate);
      tile_union_up_down_cuda(ctx, following(up_down), unions);
    };
  } else {
    add_row(*find_gpu_ffn("portable-union"), portable_gate, portable_union);
  }
  add_row(FfnExecution::kRowFused, own_gate,
          [&] { row_fused_up_down_cuda(ctx, up_down, rows_workspace); });
  if (hopper) add_row(*find_gpu_ffn("portable-union"), portable_gate, portable_union);
  const GpuFfnChoice choice =
      choice_of(ctx, o, tokens, FfnPolicy::kAuto, layer_activity(download(counts)[0], o.ffn));

  std::optional<ByteLayer> bytes;
  GateGemmCuda byte_gate, byte_followed_gate;
  SparseUpDownCuda byte_up_down;
  if (hopper && o.width % 16 == 0 && o.ffn % 16 == 0) {
    bytes.emplace(ctx, layer, tokens, o);
    byte_gate = bytes->gate(gate_gemm);
    byte_followed_gate = bytes->gate(followed_gate);
    byte_up_down = bytes->up_down(up_down);
    FfnCudaRow& row = rows.emplace_back(row_of(pattern, FfnExecution::kTileUnion));
    row.eight_bit = Dense8Bit::kFp8;
    row.arithmetic =
        o.gated ? "e4m3 x e4m3, f32 sums" : "e4m3 x e4m3, f32 sums; h and w_down in bf16";
    TWELL_CUDA_CHECK(cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(y.bytes()), ctx.stream()));
    bytes->prepare_down(ctx, o.gated);
    tile_union_up_down_cuda(ctx, byte_up_down, unions);
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    row.error = relative_difference(y, dense_y);
    // Products of two operands that are each rounded to four significant bits.
    TWELL_CHECK(row.error < 0.1, "{}: {} differs by {} from dense", row.pattern, row.name(),
                row.error);
    gates.push_back([&] {
      bytes->prepare_gate(ctx, x);
      gate_gemm_cuda(ctx, byte_gate);
    });
    rests.push_back([&] {
      bytes->prepare_down(ctx, o.gated);
      tile_union_up_down_cuda(ctx, byte_up_down, unions);
    });
    layers.push_back([&] {
      bytes->prepare_gate(ctx, x);
      bytes->prepare_down(ctx, o.gated);
      gate_gemm_cuda(ctx, byte_followed_gate);
      tile_union_up_down_cuda(ctx, following(byte_up_down), unions);
    });
  }
  const std::vector<Layer8Bit> eight_bit =
      layers_8bit(ctx, o, tokens, {&weights, 1}, x, y, result.left_out);
  for (FfnCudaRow& row : rows_8bit(ctx, o, pattern, eight_bit)) rows.push_back(std::move(row));
  for (const Layer8Bit& l : eight_bit) {
    gates.push_back([&, &l = l] { l.layer->gate(ctx, l.weights[0], x); });
    rests.push_back([&, &l = l] { l.layer->up_down(ctx, l.weights[0], y.data()); });
    layers.push_back([&, &l = l] { l.layer->forward(ctx, l.weights[0], x, y.data()); });
  }
  std::vector<Piece> pieces = gates;
  pieces.insert(pieces.end(), rests.begin(), rests.end());
  pieces.insert(pieces.end(), layers.begin(), layers.end());
  const auto times = time_pieces(ctx.stream(), o.repeats, pieces);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].gate = times[i];
    rows[i].up_down = times[gates.size() + i];
    rows[i].layer = times[gates.size() + rests.size() + i];
  }
  finish(ctx, options, layers, 1.0, choice, rows);
  return result;
}

// A layer whose own gate fires as the pattern does.
DeviceLayer firing_layer(const FfnBenchmark& o, const FiringColumns& columns, int64_t tokens,
                         uint64_t copy) {
  const auto with_columns = [&](int64_t rows, uint64_t stream, float deviation,
                                const std::vector<BF16>& first) {
    auto matrix = random_operand(rows * o.width, stream, deviation, o.seed + copy);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<void*>(matrix.data() + row * o.width),
                  first.data() + row * columns.period,
                  static_cast<size_t>(columns.period) * sizeof(BF16));
    }
    return upload(matrix);
  };
  const auto other = [&](uint64_t stream) {
    return upload(random_operand(o.ffn * o.width, stream, 0.02f, o.seed + copy));
  };
  DeviceLayer layer{.x = with_columns(tokens, 1, 1.0f, columns.x), .activation = o.activation};
  (o.gated ? layer.w_gate : layer.w_up) = with_columns(o.ffn, 4, 0.02f, columns.weight);
  if (o.gated) layer.w_up = other(2);
  layer.w_down = other(3);
  return layer;
}

// For up to kMostAsEngine tokens: the layer as the engine runs it, dense and sparse, in turn on
// copies of the weights that together exceed the L2 cache.
FfnCudaResult as_engine(CudaContext& ctx, const FfnCudaBenchmark& options,
                        const FfnPattern& asked) {
  const FfnBenchmark& o = options.layer;
  const auto tokens = asked.tokens();
  const FiringColumns columns = firing_columns(asked, tokens, o.width, o.ffn);
  FfnPattern pattern = asked;
  if (columns.period < tokens) {
    pattern = repeated(repeated(asked, 0, columns.period), 0, tokens);
    pattern.name += fmt::format(", the first {} repeated", columns.period);
  }
  std::vector<DeviceLayer> copies;
  for (int64_t copy = 0; copy < kL2Copies; ++copy) {
    copies.push_back(firing_layer(o, columns, tokens, static_cast<uint64_t>(copy)));
  }
  DenseFfnCuda dense(ctx, tokens, o.width, o.ffn, o.gated, o.activation);
  const Values dense_y = poisoned<__nv_bfloat16>(tokens * o.width);
  const Values y = poisoned<__nv_bfloat16>(tokens * o.width);
  dense.tune(ctx, copies[0].weights(), copies[0].x.data(), dense_y.data());
  dense.forward(ctx, copies[0].weights(), copies[0].x.data(), dense_y.data());

  FfnPlansCuda plans(ctx, 1, o.ffn, FfnPolicy::kSparse);
  FfnWorkspaceCuda workspace(ctx, tokens, o.width, o.ffn, o.gated);
  const auto run = [&](const DeviceLayer& layer) {
    ffn_forward_cuda(
        ctx, {.tokens = tokens, .weights = layer.weights(), .x = layer.x.data(), .y = y.data()},
        plans[0], workspace);
  };
  run(copies[0]);
  plans.update(ctx);
  run(copies[0]);  // as its activity asks for
  FfnCudaResult result;
  std::vector<FfnCudaRow>& rows = result.rows;
  rows = {row_of(pattern, FfnExecution::kDense), row_of(pattern, plans[0].plan.execution)};
  rows[1].error = relative_difference(y, dense_y);
  require_same(rows[1]);
  TWELL_CHECK(plans[0].plan.nnz == static_cast<int64_t>(pattern.columns.size()),
              "{}: the gate fires {} times, expected {}", pattern.name, plans[0].plan.nnz,
              pattern.columns.size());
  const GpuFfnChoice choice = choice_of(ctx, o, tokens, FfnPolicy::kAuto, plans[0].activity);
  std::vector<Piece> layers = {[&] {
                                 for (const DeviceLayer& layer : copies) {
                                   dense.forward(ctx, layer.weights(), layer.x.data(),
                                                 dense_y.data());
                                 }
                               },
                               [&] {
                                 for (const DeviceLayer& layer : copies) run(layer);
                               }};
  std::vector<FfnWeightsCuda> weights;
  for (const DeviceLayer& layer : copies) weights.push_back(layer.weights());
  const std::vector<Layer8Bit> eight_bit =
      layers_8bit(ctx, o, tokens, weights, copies[0].x.data(), y, result.left_out);
  for (FfnCudaRow& row : rows_8bit(ctx, o, pattern, eight_bit)) rows.push_back(std::move(row));
  for (const Layer8Bit& l : eight_bit) {
    layers.push_back([&, &l = l] {
      for (size_t copy = 0; copy < copies.size(); ++copy) {
        l.layer->forward(ctx, l.weights[copy], copies[copy].x.data(), y.data());
      }
    });
  }
  const auto times = time_pieces(ctx.stream(), o.repeats, layers);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Timing& t = times[i];
    rows[i].layer = {t.median / kL2Copies, t.p10 / kL2Copies, t.p90 / kL2Copies};
  }
  finish(ctx, options, layers, kL2Copies, choice, rows);
  return result;
}

}  // namespace

FfnCudaResult benchmark_ffn_cuda(CudaContext& ctx, const FfnCudaBenchmark& options,
                                 const FfnPattern& pattern) {
  const FfnBenchmark& o = options.layer;
  TWELL_REQUIRE(!pattern.row_nnz.empty(), "the pattern {} has no tokens", pattern.name);
  TWELL_REQUIRE(o.width > 0 && o.width % 8 == 0 && o.ffn > 0 && o.ffn % 8 == 0,
                "width {} and FFN size {} must be positive multiples of 8 on a GPU", o.width,
                o.ffn);
  for (const uint32_t column : pattern.columns) {
    TWELL_REQUIRE(static_cast<int64_t>(column) < o.ffn, "{}: neuron {} of a layer of {}",
                  pattern.name, column, o.ffn);
  }
  TWELL_REQUIRE(ctx.compute_capability() >= 80,
                "the kernels are for GPUs of compute capability 8.0 and later, {} is of {}.{}",
                ctx.device_name(), ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  return pattern.tokens() > kMostAsEngine ? replayed(ctx, options, pattern)
                                          : as_engine(ctx, options, pattern);
}

}  // namespace twell
