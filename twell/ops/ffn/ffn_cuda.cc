// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_cuda.h"

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/decode/layer_ops.h"
#include "twell/ops/ffn/gate_gemm_cuda.h"
#include "twell/ops/ffn/portable/gate_gemm_sm80_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

constexpr int64_t kTwellTile = 256;
constexpr int32_t kCompression = 8;
constexpr int64_t kMuchMemory = int64_t{5} << 30;

TwellShape twell_shape(int64_t tokens, int64_t ffn) {
  return {.rows = tokens, .cols = ffn, .tile = int32_t{kTwellTile}, .compression = kCompression};
}

// Of the workspace's memory, what grows with the tokens of a chunk.
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
    before.extra_tiles = std::max(unions / (static_cast<double>(counts.tokens) / 128.0) - 1.0, 0.0);
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
  }
}

int64_t FfnWorkspaceCuda::chunk_tokens(const CudaContext& ctx, int64_t max_tokens, int64_t ffn) {
  // Eight rounds of gate GEMM tiles, 256 tokens per pair of multiprocessors, for each column tile:
  // enough to make the last, partly filled round cheap, and what is launched per chunk. Four where
  // eight would take much memory.
  const int64_t four_rounds = std::max(ctx.multiprocessors() / 2, 1) * int64_t{4 * 256};
  const int64_t most =
      chunk_bytes(2 * four_rounds, ffn) <= kMuchMemory ? 2 * four_rounds : four_rounds;
  const int64_t chunks = std::max<int64_t>(ceil_div(max_tokens, most), 1);
  return std::min(ceil_div(ceil_div(max_tokens, chunks), 128) * 128, most);
}

FfnWorkspaceCuda::FfnWorkspaceCuda(CudaContext& ctx, int64_t max_tokens, int64_t width, int64_t ffn,
                                   bool gated)
    : max_tokens_(max_tokens),
      chunk_tokens_(chunk_tokens(ctx, max_tokens, ffn)),
      width_(width),
      ffn_(ffn),
      gated_(gated),
      words_(twell_shape(chunk_tokens_, ffn).words()),
      gate_(twell_shape(chunk_tokens_, ffn).max_spill_slots() * kTwellTile),
      row_nnz_(chunk_tokens_),
      tile_union_(chunk_tokens_, ffn),
      row_fused_(ctx, chunk_tokens_, width),
      few_tokens_(ffn) {
  // Words are read 16 bytes at a time, of which a tile's last ones may never be written.
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

// The choice, plain arithmetic, does not know the kernels.
static_assert(kFewTokens == kMaxFewTokens);

// The executions of one chunk of tokens.
class FfnCallCuda {
 public:
  FfnCallCuda(CudaContext& ctx, const FfnForwardCuda& chunk, FfnPlanCuda& plan,
              FfnWorkspaceCuda& workspace)
      : ctx_(ctx), chunk_(chunk), plan_(plan), workspace_(workspace) {}

  // Up to 8 tokens: kernels that read each weight once at memory speed.
  bool few_rows_dense() const {
    if (!ffn_fuses_norm(ctx_, chunk_.tokens, workspace_.width_) || chunk_.row_nnz != nullptr ||
        chunk_.weights.activation != Activation::kRelu) {
      return false;
    }
    TWELL_CUDA_CHECK(
        layer_ops::launch_gate_up({.input = {.tokens = chunk_.tokens,
                                             .width = workspace_.width_,
                                             .x = chunk_.x,
                                             .norm = chunk_.norm,
                                             .eps = chunk_.eps,
                                             .constant_weights = true},
                                   .ffn = workspace_.ffn_,
                                   .w_gate = workspace_.gated_ ? chunk_.weights.w_gate : nullptr,
                                   .w_up = chunk_.weights.w_up,
                                   .h = workspace_.gate_.data(),
                                   .activity = plan_.counts},
                                  ctx_.stream()));
    // `down` takes 11 us for one token of a 2048 x 5632 layer, but 41 for eight; cuBLASLt takes 9.
    if (chunk_.tokens > 1) {
      matmul_cuda(ctx_,
                  {.rows = chunk_.tokens,
                   .cols = workspace_.width_,
                   .inner = workspace_.ffn_,
                   .add = chunk_.add},
                  workspace_.gate_.data(), chunk_.weights.w_down, chunk_.y);
      return true;
    }
    TWELL_CUDA_CHECK(layer_ops::launch_down_sm90({.tokens = chunk_.tokens,
                                                  .width = workspace_.width_,
                                                  .ffn = workspace_.ffn_,
                                                  .h = workspace_.gate_.data(),
                                                  .w = chunk_.weights.w_down,
                                                  .residual = residual(),
                                                  .y = chunk_.y,
                                                  .constant_weights = true},
                                                 ctx_.stream()));
    return true;
  }

  void dense() const {
    if (few_rows_dense()) return;
    std::unique_ptr<DenseFfnCuda>& dense =
        workspace_.dense_[{chunk_.tokens, chunk_.weights.activation, chunk_.add}];
    if (!dense) {
      dense = std::make_unique<DenseFfnCuda>(
          ctx_, chunk_.tokens, workspace_.width_, workspace_.ffn_, workspace_.gated_,
          workspace_.gate_.data(), workspace_.tile_union_.values(), chunk_.weights.activation,
          chunk_.add);
    }
    dense->forward(ctx_, chunk_.weights, chunk_.x, chunk_.y,
                   {.row_nnz = chunk_.row_nnz, .activity = plan_.counts});
  }

  void tile_union() const {
    const bool follows = workspace_.gated_;
    SparseUpDownCuda problem =
        packed_gate(follows ? workspace_.tile_union_.progress(chunk_.tokens) : GateProgress{});
    problem.follows_gate = follows;
    tile_union_up_down_cuda(ctx_, problem, workspace_.tile_union_);
  }

  void row_fused() const {
    const bool hopper = ctx_.compute_capability() == 90;
    if (hopper && chunk_.tokens <= kFewTokens && chunk_.row_nnz == nullptr) {
      few_token_ffn_cuda(ctx_,
                         {.tokens = chunk_.tokens,
                          .width = workspace_.width_,
                          .ffn = workspace_.ffn_,
                          .x = chunk_.x,
                          .w_gate = chunk_.weights.w_gate,
                          .w_up = chunk_.weights.w_up,
                          .w_down = chunk_.weights.w_down,
                          .y = chunk_.y,
                          .norm = chunk_.norm,
                          .eps = chunk_.eps,
                          .residual = residual(),
                          .activity = plan_.counts,
                          .weights_are_constant = true},
                         workspace_.few_tokens_);
      return;
    }
    row_fused_up_down_cuda(ctx_, packed_gate(), workspace_.row_fused_);
  }

 private:
  const __nv_bfloat16* residual() const { return chunk_.add ? chunk_.y : nullptr; }
  // Runs the gate GEMM; what is left to do is the returned problem.
  SparseUpDownCuda packed_gate(const GateProgress& progress = {}) const {
    FfnWorkspaceCuda& w = workspace_;
    const TwellShape shape = twell_shape(chunk_.tokens, w.ffn_);
    const TwellPacked gate{
        .shape = shape,
        .words = w.words_.data(),
        .spill = reinterpret_cast<BF16*>(w.gate_.data()),
        .spill_slots = shape.max_spill_slots(),
        .row_nnz = chunk_.row_nnz != nullptr ? chunk_.row_nnz : w.row_nnz_.data()};
    const FfnWeightsCuda& weights = chunk_.weights;
    const GateGemmCuda problem{.tokens = chunk_.tokens,
                               .width = w.width_,
                               .ffn = w.ffn_,
                               .x = chunk_.x,
                               .w_gate = w.gated_ ? weights.w_gate : weights.w_up,
                               .out = gate,
                               .progress = progress};
    if (ctx_.compute_capability() == 90) {
      gate_gemm_cuda(ctx_, problem);
    } else {
      gate_gemm_sm80_cuda(ctx_, problem);
    }
    return {.tokens = chunk_.tokens,
            .width = w.width_,
            .ffn = w.ffn_,
            .gate = gate,
            .x = chunk_.x,
            .w_up = w.gated_ ? weights.w_up : nullptr,
            .w_down = weights.w_down,
            .y = chunk_.y,
            .add = chunk_.add,
            .activity = plan_.counts};
  }

  CudaContext& ctx_;
  const FfnForwardCuda& chunk_;
  FfnPlanCuda& plan_;
  FfnWorkspaceCuda& workspace_;
};

bool ffn_fuses_norm(const CudaContext& ctx, int64_t tokens, int64_t width) {
  return ctx.compute_capability() == 90 && tokens >= 1 && tokens <= layer_ops::max_tokens(width);
}

FfnExecution choose_ffn_cuda(const CudaContext& ctx, int64_t tokens, Activation activation,
                             FfnPlanCuda& plan, const FfnWorkspaceCuda& workspace) {
  const GpuLayerShape shape{.width = workspace.width(),
                            .ffn = workspace.ffn(),
                            .gated = workspace.gated(),
                            .multiprocessors = ctx.multiprocessors(),
                            .hopper = ctx.compute_capability() == 90};
  GpuChoice choice{FfnExecution::kDense, "the activation leaves no zeros"};
  if (activation == Activation::kRelu) {
    choice = choose_gpu_execution(shape, tokens, plan.plan.policy, plan.activity);
  }
  plan.plan.execution = choice.execution;
  plan.plan.reason = std::move(choice.reason);
  return choice.execution;
}

void ffn_forward_cuda(CudaContext& ctx, const FfnForwardCuda& problem, FfnPlanCuda& plan,
                      FfnWorkspaceCuda& workspace) {
  TWELL_CHECK(problem.tokens <= workspace.max_tokens(), "{} tokens in a workspace for {}",
              problem.tokens, workspace.max_tokens());
  TWELL_CHECK(problem.norm == nullptr || (ffn_fuses_norm(ctx, problem.tokens, workspace.width()) &&
                                          problem.row_nnz == nullptr),
              "norm as part of the FFN of {} tokens", problem.tokens);
  if (problem.tokens == 0) return;
  const FfnExecution execution =
      choose_ffn_cuda(ctx, problem.tokens, problem.weights.activation, plan, workspace);
  const int64_t chunks = ceil_div(problem.tokens, workspace.chunk_tokens());
  const int64_t step = ceil_div(ceil_div(problem.tokens, chunks), 128) * 128;
  for (int64_t begin = 0; begin < problem.tokens; begin += step) {
    FfnForwardCuda chunk = problem;
    chunk.tokens = std::min(step, problem.tokens - begin);
    chunk.x += begin * workspace.width();
    chunk.y += begin * workspace.width();
    if (chunk.row_nnz != nullptr) chunk.row_nnz += begin;
    const FfnCallCuda call(ctx, chunk, plan, workspace);
    switch (execution) {
      case FfnExecution::kDense:
        call.dense();
        break;
      case FfnExecution::kTileUnion:
        call.tile_union();
        break;
      case FfnExecution::kRowFused:
        call.row_fused();
        break;
    }
  }
}

}  // namespace twell
