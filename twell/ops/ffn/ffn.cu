// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_cuda.h"

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"
#include "twell/ops/skinny/batch_ops.h"
#include "twell/ops/skinny/layer_ops.h"

namespace twell {

// --- The dense layer ----------------------------------------------------------------------------

namespace {

// In a gated layer counting is a part of the multiplication. Without a gate it is a pass of its own
// over a sample of the tokens.
constexpr int64_t kSampleStride = 16;
constexpr int kThreads = 256;
// CTAs of the multiplication, four per SM of an H200: enough to use the memory, and few atomic
// additions to the sums, which as one per token took as long as the pass itself.
constexpr int64_t kMostCtas = 528;

// Counts active neurons of the tokens of one CTA.
class ActiveCounter {
 public:
  // Adds one token's counts of all threads of the CTA, which all call it.
  __device__ void add(int count, int64_t row, int32_t* row_nnz) {
    // Alternating rows, so that threads of the next token do not overwrite what is being read.
    __shared__ int of_warp[2][kThreads / 32];
    int* const counts = of_warp[tokens_ % 2];
    ++tokens_;
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int total = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) total += counts[warp];
    if (row_nnz != nullptr) row_nnz[row] = total;
    nnz_ += static_cast<unsigned long long>(total);
    most_ = max(most_, static_cast<unsigned long long>(total));
  }
  __device__ void store(ActivityCuda* counts) const {
    if (counts == nullptr || threadIdx.x != 0) return;
    atomicAdd(&counts->tokens, tokens_);
    atomicAdd(&counts->nnz, nnz_);
    atomicMax(&counts->max_row_nnz, most_);
  }

 private:
  unsigned long long tokens_ = 0;
  unsigned long long nnz_ = 0, most_ = 0;  // thread 0's
};

template <Activation kActivation>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) return x <= 0.0f ? 0.0f : x;  // a NaN stays
  if constexpr (kActivation == Activation::kRelu2) return x <= 0.0f ? 0.0f : x * x;
  if constexpr (kActivation == Activation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kActivation == Activation::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  }
  return x / (1.0f + expf(-1.702f * x));  // quick GELU
}

// CTAs take tokens in turn.
template <Activation kActivation>
__global__ void __launch_bounds__(kThreads) activate_multiply_kernel(ActivateMultiply p) {
  const int pieces = static_cast<int>(p.ffn / 8);
  const bool counted = p.row_nnz != nullptr || p.counts != nullptr;
  ActiveCounter counter;
  for (int64_t row = blockIdx.x * p.stride; row < p.tokens; row += gridDim.x * p.stride) {
    int count = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces; i += kThreads) {
      const int64_t at = row * pieces + i;
      const uint4 g = reinterpret_cast<const uint4*>(p.g)[at];
      const uint4 u = p.u != nullptr ? reinterpret_cast<const uint4*>(p.u)[at] : uint4{};
      uint4 h;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&g)[k]);
        float2 f = {activate<kActivation>(x.x), activate<kActivation>(x.y)};
        if constexpr (kActivation == Activation::kRelu2) {
          count += !(x.x <= 0.0f) + !(x.y <= 0.0f);  // the square may underflow
        } else {
          count += (f.x != 0.0f) + (f.y != 0.0f);
        }
        if (p.u != nullptr) {
          const float2 factor = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&u)[k]);
          f = {f.x * factor.x, f.y * factor.y};
        }
        reinterpret_cast<__nv_bfloat162*>(&h)[k] = __floats2bfloat162_rn(f.x, f.y);
      }
      if (p.h != nullptr) reinterpret_cast<uint4*>(p.h)[at] = h;
    }
    if (counted) counter.add(count, row, p.row_nnz);
  }
  counter.store(p.counts);
}

template <Activation kActivation>
cudaError_t launch(const ActivateMultiply& p, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>(std::min(ceil_div(p.tokens, p.stride), kMostCtas));
  activate_multiply_kernel<kActivation><<<ctas, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_activate_multiply(const ActivateMultiply& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  switch (p.activation) {
    case Activation::kRelu:
      return launch<Activation::kRelu>(p, stream);
    case Activation::kSilu:
      return launch<Activation::kSilu>(p, stream);
    case Activation::kGelu:
      return launch<Activation::kGelu>(p, stream);
    case Activation::kGeluTanh:
      return launch<Activation::kGeluTanh>(p, stream);
    case Activation::kQuickGelu:
      return launch<Activation::kQuickGelu>(p, stream);
    case Activation::kRelu2:
      return launch<Activation::kRelu2>(p, stream);
  }
  return cudaErrorInvalidValue;
}

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
                           __nv_bfloat16* gate, __nv_bfloat16* hidden, Activation activation,
                           bool add, bool biased)
    : tokens_(tokens),
      ffn_(ffn),
      width_(width),
      gated_(gated),
      biased_(biased),
      activation_(activation),
      gate_(gate),
      hidden_(hidden) {
  const bool relu = relu_in_epilogue();
  TWELL_CHECK(width % 8 == 0 && ffn % 8 == 0, "width {} and FFN size {} must be multiples of 8",
              width, ffn);
  const MatmulShapeCuda up{
      .rows = tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = relu && !gated};
  if (gated) {
    const MatmulShapeCuda shape{
        .rows = tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = relu};
    gate_plan_ = std::make_unique<MatmulPlanCuda>(ctx, shape);
  }
  up_plan_ = std::make_unique<MatmulPlanCuda>(ctx, up);
  const MatmulShapeCuda down{.rows = tokens, .cols = width, .inner = ffn, .add = add};
  down_plan_ = std::make_unique<MatmulPlanCuda>(ctx, down);
}

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
                           Activation activation, bool add)
    : DenseFfnCuda(ctx, tokens, width, ffn, gated, nullptr, nullptr, activation, add) {
  owned_ = DeviceBuffer<__nv_bfloat16>(tokens * ffn * (in_place() ? 1 : 2));
  hidden_ = owned_.data();
  if (!in_place()) gate_ = owned_.data() + tokens * ffn;
}

void DenseFfnCuda::tune(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                        __nv_bfloat16* y) {
  if (gated_) gate_plan_->tune(ctx, x, weights.w_gate, gate_);
  up_plan_->tune(ctx, x, weights.w_up, gated_ ? hidden_ : gate_values());
  down_plan_->tune(ctx, hidden_, weights.w_down, y);
}

void DenseFfnCuda::gate(CudaContext& ctx, const FfnWeightsCuda& weights,
                        const __nv_bfloat16* x) const {
  MatmulPlanCuda& plan = gated_ ? *gate_plan_ : *up_plan_;
  plan.run(ctx, x, gated_ ? weights.w_gate : weights.w_up, gate_values());
  if (biased_) add_bias(ctx, gated_ ? weights.b_gate : weights.b_up, ffn_, gate_values());
}

void DenseFfnCuda::add_bias(CudaContext& ctx, const __nv_bfloat16* bias, int64_t width,
                            __nv_bfloat16* x) const {
  TWELL_CUDA_CHECK(
      launch_bias_forward({.tokens = tokens_, .width = width, .bias = bias, .x = x}, ctx.stream()));
}

void DenseFfnCuda::up_down(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  if (gated_) {
    up_plan_->run(ctx, x, weights.w_up, hidden_);
    if (biased_) add_bias(ctx, weights.b_up, ffn_, hidden_);
  }
  if (!in_place() || counts.row_nnz != nullptr || counts.activity != nullptr) {
    const bool samples = in_place() && counts.row_nnz == nullptr;
    TWELL_CUDA_CHECK(
        launch_activate_multiply({.activation = activation_,
                                  .g = gate_values(),
                                  .u = gated_ ? hidden_ : nullptr,
                                  .h = in_place() ? nullptr : hidden_,
                                  .tokens = counts.tokens == 0 ? tokens_ : counts.tokens,
                                  .ffn = ffn_,
                                  .row_nnz = counts.row_nnz,
                                  .counts = counts.activity,
                                  .stride = samples ? kSampleStride : 1},
                                 ctx.stream()));
  }
  down_plan_->run(ctx, hidden_, weights.w_down, y);
  if (biased_) add_bias(ctx, weights.b_down, width_, y);
}

void DenseFfnCuda::forward(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  gate(ctx, weights, x);
  up_down(ctx, weights, x, y, counts);
}

// --- The choice of executions -------------------------------------------------------------------

namespace {

constexpr int64_t kTwellTile = 256;
constexpr int32_t kCompression = 8;
// One chunk of so many behind a screen is checked, on so many of its tokens, so that checks take a
// small part of the time.
constexpr int64_t kScreenCheck = 64;
constexpr int64_t kCheckedTokens = 128;
constexpr int64_t kMuchMemory = int64_t{5} << 30;
constexpr int64_t kMostMemory = int64_t{16} << 30;

TwellShape twell_shape(int64_t tokens, int64_t ffn) {
  return {.rows = tokens, .cols = ffn, .tile = int32_t{kTwellTile}, .compression = kCompression};
}

// The part of the workspace that grows with the tokens of a chunk.
int64_t chunk_bytes(int64_t tokens, int64_t ffn) {
  const TwellShape shape = twell_shape(tokens, ffn);
  return shape.words() * int64_t{sizeof(uint32_t)} +
         shape.max_spill_slots() * kTwellTile * int64_t{sizeof(__nv_bfloat16)} +
         tokens * int64_t{sizeof(int32_t)} + TileUnionWorkspace::bytes_needed(tokens, ffn);
}

}  // namespace

LayerActivity layer_activity(const ActivityCuda& counts, int64_t ffn, LayerActivity before) {
  if (counts.tokens > 0) {
    before.nnz_per_token = static_cast<double>(counts.nnz) / static_cast<double>(counts.tokens);
  }
  if (counts.unions > 0) {
    const auto unions = static_cast<double>(counts.unions);
    before.union_share =
        static_cast<double>(counts.union_neurons) / (unions * static_cast<double>(ffn));
    before.largest_union = static_cast<double>(counts.largest_union) /
                           static_cast<double>(counts.union_calls) / static_cast<double>(ffn);
    before.extra_tiles = std::max(unions / (static_cast<double>(counts.tokens) / 128.0) - 1.0, 0.0);
    before.union_growth = union_growth(before, ffn);
  }
  if (counts.candidate_unions > 0) {
    before.candidate_share = static_cast<double>(counts.candidate_union_neurons) /
                             static_cast<double>(counts.candidate_unions) /
                             static_cast<double>(ffn);
  }
  return before;
}

FfnPlansCuda::FfnPlansCuda(CudaContext& ctx, int64_t layers, int64_t ffn, FfnPolicy policy)
    : ffn_(ffn), counts_(layers), plans_(static_cast<size_t>(layers)) {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(counts_.data(), 0, static_cast<size_t>(counts_.bytes()), ctx.stream()));
  for (int64_t layer = 0; layer < layers; ++layer) {
    plans_[static_cast<size_t>(layer)].plan.policy = policy;
    plans_[static_cast<size_t>(layer)].counts = counts_.data() + layer;
  }
}

void FfnPlansCuda::update(CudaContext& ctx) {
  ++revision_;
  std::vector<ActivityCuda> counts(plans_.size());
  const auto bytes = static_cast<size_t>(counts_.bytes());
  TWELL_CUDA_CHECK(
      cudaMemcpyAsync(counts.data(), counts_.data(), bytes, cudaMemcpyDeviceToHost, ctx.stream()));
  TWELL_CUDA_CHECK(cudaMemsetAsync(counts_.data(), 0, bytes, ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  for (size_t layer = 0; layer < plans_.size(); ++layer) {
    FfnPlanCuda& plan = plans_[layer];
    const ActivityCuda& count = counts[layer];
    plan.activity = layer_activity(count, ffn_, plan.activity);
    plan.plan.tokens += static_cast<int64_t>(count.tokens);
    plan.plan.nnz += static_cast<int64_t>(count.nnz);
    plan.plan.max_row_nnz =
        std::max(plan.plan.max_row_nnz, static_cast<int64_t>(count.max_row_nnz));
    plan.plan.checked_pairs += static_cast<int64_t>(count.checked_pairs);
    plan.plan.missed_pairs += static_cast<int64_t>(count.missed_pairs);
  }
}

int64_t FfnWorkspaceCuda::chunk_tokens(const CudaContext& ctx, int64_t max_tokens, int64_t ffn) {
  // Eight rounds of gate GEMM tiles (256 tokens per pair of SMs) make the last, partly filled round
  // and the launches of a chunk cheap. Four where eight would take much memory.
  const int64_t four_rounds = std::max(ctx.multiprocessors() / 2, 1) * int64_t{4 * 256};
  int64_t most = chunk_bytes(2 * four_rounds, ffn) <= kMuchMemory ? 2 * four_rounds : four_rounds;
  while (most > 128 && chunk_bytes(most, ffn) > kMostMemory) most = ceil_div(most / 2, 128) * 128;
  const int64_t chunks = std::max<int64_t>(ceil_div(max_tokens, most), 1);
  return std::min(ceil_div(ceil_div(max_tokens, chunks), 128) * 128, most);
}

FfnWorkspaceCuda::FfnWorkspaceCuda(CudaContext& ctx, int64_t max_tokens, int64_t width, int64_t ffn,
                                   bool gated)
    : max_tokens_(max_tokens),
      chunk_tokens_(chunk_tokens(ctx, max_tokens, ffn)),
      layer_{.width = width,
             .ffn = ffn,
             .gated = gated,
             .row_tokens = layer_ops::max_tokens(width),
             .device = gpu_device(ctx)},
      words_(twell_shape(chunk_tokens_, ffn).words()),
      gate_(twell_shape(chunk_tokens_, ffn).max_spill_slots() * kTwellTile),
      row_nnz_(chunk_tokens_),
      tile_union_(chunk_tokens_, ffn),
      row_fused_(ctx, chunk_tokens_, width),
      few_tokens_(ffn) {
  // Words are read 16 bytes at a time, and the last ones of a tile may never be written.
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(words_.data(), 0, static_cast<size_t>(words_.bytes()), ctx.stream()));
}

FfnWorkspaceCuda::~FfnWorkspaceCuda() = default;

int64_t FfnWorkspaceCuda::bytes_needed(const CudaContext& ctx, int64_t max_tokens, int64_t ffn) {
  return chunk_bytes(chunk_tokens(ctx, max_tokens, ffn), ffn);
}

int64_t FfnWorkspaceCuda::bytes() const {
  return words_.bytes() + gate_.bytes() + row_nnz_.bytes() + tile_union_.bytes() +
         row_fused_.bytes() + few_tokens_.bytes();
}

// The executions of one chunk of tokens.
class FfnCallCuda {
 public:
  FfnCallCuda(CudaContext& ctx, const FfnForwardCuda& chunk, FfnPlanCuda& plan,
              FfnWorkspaceCuda& workspace)
      : ctx_(ctx), chunk_(chunk), plan_(plan), workspace_(workspace) {}

  void run(GpuFfnLaunch launch) const {
    switch (launch) {
      case GpuFfnLaunch::kDenseRows:
        return dense_rows();
      case GpuFfnLaunch::kDenseBatch:
        return dense_batch();
      case GpuFfnLaunch::kDenseGemms:
        return dense_gemms();
      case GpuFfnLaunch::kDecodeRows:
      case GpuFfnLaunch::kSmallBatch:
        return few_token_ffn_cuda(ctx_, batch(), workspace_.few_tokens_);
      case GpuFfnLaunch::kMediumBatch:
        return medium_batch_ffn_cuda(ctx_, batch(), workspace_.gate_.data(),
                                     workspace_.tile_union_);
      case GpuFfnLaunch::kTileUnion:
        return tile_union();
      case GpuFfnLaunch::kScreened:
        return screened();
      case GpuFfnLaunch::kRowFused:
        return row_fused_up_down_cuda(ctx_, packed_gate(), workspace_.row_fused_);
    }
  }

 private:
  // Up to 8 tokens: norm, gate and up as one kernel, down by cuBLASLt.
  void dense_rows() const {
    TWELL_CUDA_CHECK(layer_ops::launch_gate_up(gate_up(), ctx_.stream()));
    matmul_cuda(ctx_,
                {.rows = chunk_.tokens,
                 .cols = workspace_.width(),
                 .inner = workspace_.ffn(),
                 .add = chunk_.add},
                workspace_.gate_.data(), chunk_.weights.w_down, chunk_.y);
  }

  // 9 to 64 tokens: gate and up as one kernel, down as another.
  void dense_batch() const {
    TWELL_CUDA_CHECK(batch_ops::launch_gate_up(gate_up(), ctx_.stream()));
    TWELL_CUDA_CHECK(batch_ops::launch_down({.input = {.tokens = chunk_.tokens,
                                                       .width = workspace_.ffn(),
                                                       .x = workspace_.gate_.data(),
                                                       .constant_weights = true},
                                             .cols = workspace_.width(),
                                             .w = chunk_.weights.w_down,
                                             .residual = residual(),
                                             .y = chunk_.y},
                                            ctx_.stream()));
  }

  void dense_gemms() const {
    std::unique_ptr<DenseFfnCuda>& dense =
        workspace_
            .dense_[{chunk_.rows, chunk_.weights.activation, chunk_.add, chunk_.weights.biased()}];
    if (!dense) {
      dense = std::make_unique<DenseFfnCuda>(
          ctx_, chunk_.rows, workspace_.width(), workspace_.ffn(), workspace_.gated(),
          workspace_.gate_.data(), workspace_.tile_union_.values(), chunk_.weights.activation,
          chunk_.add, chunk_.weights.biased());
    }
    dense->forward(ctx_, chunk_.weights, chunk_.x, chunk_.y,
                   {.tokens = chunk_.tokens, .row_nnz = chunk_.row_nnz, .activity = plan_.counts});
  }

  void tile_union() const {
    const bool follows = workspace_.gated();
    SparseUpDownCuda problem =
        packed_gate(follows ? workspace_.tile_union_.progress(chunk_.tokens) : GateProgress{});
    problem.follows_gate = follows;
    tile_union_up_down_cuda(ctx_, problem, workspace_.tile_union_);
  }

  // Candidates lie where other executions have TwELL's words, of which they need a quarter.
  void screened() const {
    screened_ffn_cuda(ctx_,
                      {.tokens = chunk_.tokens,
                       .width = workspace_.width(),
                       .ffn = workspace_.ffn(),
                       .rotated = chunk_.rotated,
                       .screen = chunk_.weights.screen,
                       .x = chunk_.x,
                       .w_gate = chunk_.weights.w_gate,
                       .w_up = chunk_.weights.w_up,
                       .w_down = chunk_.weights.w_down,
                       .y = chunk_.y,
                       .add = chunk_.add,
                       .squared = squared(),
                       .y_rows = chunk_.y_rows,
                       .candidates = {workspace_.words_.data(), workspace_.row_nnz_.data()},
                       .row_nnz = chunk_.row_nnz,
                       .activity = plan_.counts},
                      workspace_.tile_union_);
    const bool due = plan_.screened_calls++ % kScreenCheck == 0;
    if (due && plan_.counts != nullptr) check_screen();
  }

  // Compares the candidates of a few tokens, other ones each time, with the gate GEMM's result.
  void check_screen() const {
    FfnWorkspaceCuda& w = workspace_;
    const int64_t most = std::min<int64_t>(kCheckedTokens, chunk_.tokens / 2);
    const int64_t checks = plan_.screened_calls / kScreenCheck;
    const int64_t begin = checks * kCheckedTokens % (chunk_.tokens - most);
    const TwellShape shape = twell_shape(most, w.ffn());
    // The gate's memory, of [chunk, F] values, is free: first the spill slots, then the words.
    const int64_t spills = shape.max_spill_slots() * kTwellTile;
    const TwellPacked gate{.shape = shape,
                           .words = reinterpret_cast<uint32_t*>(w.gate_.data() + spills),
                           .spill = reinterpret_cast<BF16*>(w.gate_.data()),
                           .spill_slots = shape.max_spill_slots(),
                           .row_nnz = w.row_nnz_.data()};
    gate_gemm_cuda(ctx_, {.tokens = most,
                          .width = w.width(),
                          .ffn = w.ffn(),
                          .x = chunk_.x + begin * w.width(),
                          .w_gate = chunk_.weights.w_gate,
                          .out = gate});
    TWELL_CUDA_CHECK(launch_check_screen(gate, w.words_.data() + begin * shape.tiles() * 8,
                                         plan_.counts, ctx_.stream()));
  }

  bool squared() const { return chunk_.weights.activation == Activation::kRelu2; }
  const __nv_bfloat16* residual() const { return chunk_.add ? chunk_.y : nullptr; }
  BatchFfnCuda batch() const {
    return {.tokens = chunk_.tokens,
            .width = workspace_.width(),
            .ffn = workspace_.ffn(),
            .x = chunk_.x,
            .w_gate = chunk_.weights.w_gate,
            .w_up = chunk_.weights.w_up,
            .w_down = chunk_.weights.w_down,
            .y = chunk_.y,
            .norm = chunk_.norm,
            .eps = chunk_.eps,
            .add = chunk_.add,
            .activity = plan_.counts,
            .squared = squared(),
            .weights_are_constant = true};
  }
  // Gate and up of up to 64 tokens into gate_.
  layer_ops::GateUp gate_up() const {
    return {.input = {.tokens = chunk_.tokens,
                      .width = workspace_.width(),
                      .x = chunk_.x,
                      .norm = chunk_.norm,
                      .eps = chunk_.eps,
                      .constant_weights = true},
            .ffn = workspace_.ffn(),
            .w_gate = workspace_.gated() ? chunk_.weights.w_gate : nullptr,
            .w_up = chunk_.weights.w_up,
            .h = workspace_.gate_.data(),
            .squared = squared(),
            .activity = plan_.counts};
  }
  // Runs the gate GEMM and returns the problem of what follows it.
  SparseUpDownCuda packed_gate(const GateProgress& progress = {}) const {
    FfnWorkspaceCuda& w = workspace_;
    const TwellShape shape = twell_shape(chunk_.tokens, w.ffn());
    const TwellPacked gate{
        .shape = shape,
        .words = w.words_.data(),
        .spill = reinterpret_cast<BF16*>(w.gate_.data()),
        .spill_slots = shape.max_spill_slots(),
        .row_nnz = chunk_.row_nnz != nullptr ? chunk_.row_nnz : w.row_nnz_.data()};
    const FfnWeightsCuda& weights = chunk_.weights;
    const GateGemmCuda problem{.tokens = chunk_.tokens,
                               .width = w.width(),
                               .ffn = w.ffn(),
                               .x = chunk_.x,
                               .w_gate = w.gated() ? weights.w_gate : weights.w_up,
                               .out = gate,
                               .progress = progress};
    if (ctx_.compute_capability() == 90) {
      gate_gemm_cuda(ctx_, problem);
    } else {
      gate_gemm_sm80_cuda(ctx_, problem);
    }
    return {.tokens = chunk_.tokens,
            .width = w.width(),
            .ffn = w.ffn(),
            .gate = gate,
            .x = chunk_.x,
            .w_up = w.gated() ? weights.w_up : nullptr,
            .w_down = weights.w_down,
            .y = chunk_.y,
            .add = chunk_.add,
            .squared = squared(),
            .y_rows = chunk_.y_rows,
            .activity = plan_.counts};
  }

  CudaContext& ctx_;
  const FfnForwardCuda& chunk_;
  FfnPlanCuda& plan_;
  FfnWorkspaceCuda& workspace_;
};

GpuDevice gpu_device(const CudaContext& ctx) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, ctx.device()));
    return static_cast<double>(value);
  };
  GpuDevice device{.compute_capability = ctx.compute_capability(),
                   .multiprocessors = ctx.multiprocessors()};
  const double khz = attribute(cudaDevAttrClockRate);
  // Memory transfers twice per clock, one bit per line.
  const double bytes_per_ms = 2.0 * attribute(cudaDevAttrMemoryClockRate) *
                              attribute(cudaDevAttrGlobalMemoryBusWidth) / 8.0;
  // Drivers of virtual machines may report 0.
  if (khz > 0.0) device.clock_ghz = khz * 1e-6;
  if (bytes_per_ms > 0.0) device.bandwidth = bytes_per_ms * 1e-3;
  return device;
}

const GpuFfnChoice& choose_ffn_cuda(const GpuFfnLayer& layer, const GpuFfnCall& call,
                                    FfnPlanCuda& plan) {
  GpuFfnCall of_plan = call;
  of_plan.policy = plan.plan.policy;
  if (!plan.last || plan.last->layer != layer || plan.last->call != of_plan ||
      plan.last->activity != plan.activity || plan.plan.reason.empty()) {
    plan.last = {layer, of_plan, plan.activity, choose_gpu_ffn(layer, of_plan, plan.activity)};
    plan.plan.reason = plan.last->choice.reason;
  }
  plan.plan.execution = plan.last->choice.execution;
  return plan.last->choice;
}

namespace {

const GpuFfnChoice& choose(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                           const FfnWorkspaceCuda& workspace) {
  GpuFfnLayer layer = workspace.layer();
  layer.activation = problem.weights.activation;
  layer.biased = problem.weights.biased();
  if (problem.weights.screen.values != nullptr && problem.rotated.values != nullptr) {
    layer.screen = problem.weights.screen.bound;
  }
  return choose_ffn_cuda(layer,
                         {.tokens = problem.tokens,
                          .norm = problem.norm != nullptr,
                          .counts_rows = problem.row_nnz != nullptr},
                         plan);
}

bool maps_rows(GpuFfnLaunch launch) {
  return launch == GpuFfnLaunch::kTileUnion || launch == GpuFfnLaunch::kScreened;
}

}  // namespace

bool ffn_reads_rotated(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                       const FfnWorkspaceCuda& workspace) {
  return problem.tokens > 0 && choose(problem, plan, workspace).launch == GpuFfnLaunch::kScreened;
}

bool ffn_maps_rows(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                   const FfnWorkspaceCuda& workspace) {
  return problem.tokens > 0 && maps_rows(choose(problem, plan, workspace).launch);
}

void ffn_forward_cuda(CudaContext& ctx, const FfnForwardCuda& problem, FfnPlanCuda& plan,
                      FfnWorkspaceCuda& workspace) {
  TWELL_CHECK(problem.tokens <= workspace.max_tokens(), "{} tokens in a workspace for {}",
              problem.tokens, workspace.max_tokens());
  if (problem.tokens == 0) return;
  TWELL_CHECK(problem.x != problem.y || (problem.norm != nullptr && problem.add),
              "an FFN may overwrite x only with its norm, adding to it");
  const GpuFfnChoice& choice = choose(problem, plan, workspace);
  TWELL_CHECK(problem.y_rows == nullptr || maps_rows(choice.launch),
              "{} does not take rows in another order", choice.reason);
  const bool few = choice.launch == GpuFfnLaunch::kSmallBatch;
  const int64_t most = few ? kMaxFewTokens : workspace.chunk_tokens(), unit = few ? 1 : 128;
  const int64_t step =
      ceil_div(ceil_div(problem.tokens, ceil_div(problem.tokens, most)), unit) * unit;
  for (int64_t begin = 0; begin < problem.tokens; begin += step) {
    FfnForwardCuda chunk = problem;
    chunk.tokens = std::min(step, problem.tokens - begin);
    chunk.rows = std::clamp(problem.rows - begin, chunk.tokens, step);
    chunk.x += begin * workspace.width();
    if (chunk.y_rows == nullptr) {
      chunk.y += begin * workspace.width();
    } else {
      chunk.y_rows += begin;
    }
    if (chunk.row_nnz != nullptr) chunk.row_nnz += begin;
    if (chunk.rotated.values != nullptr) {
      chunk.rotated.values += begin * workspace.width();
      chunk.rotated.bounds += begin;
    }
    FfnCallCuda(ctx, chunk, plan, workspace).run(choice.launch);
  }
}

}  // namespace twell
