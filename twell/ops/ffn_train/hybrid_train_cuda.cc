// SPDX-License-Identifier: Apache-2.0
// The hybrid execution of the feed-forward layer in training on the GPU: the order of its kernels.
#include "twell/ops/ffn/gate_gemm_cuda.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"
#include "twell/ops/ffn_train/hybrid_memory_cuda.h"
#include "twell/sm90/tensor_map.h"

namespace twell::ffn_train {
namespace {

tile_union::Up up_product(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                          const __nv_bfloat16* x, const __nv_bfloat16* weight,
                          __nv_bfloat16* product, int32_t* taken,
                          tile_union::Condition condition = nullptr) {
  tile_union::Up up{};
  up.x = x + chunk.begin * shape.width;
  up.map_x = sm90::matrix_tensor_map(up.x, chunk.tokens, shape.width, tile_union::kTileTokens);
  up.tiles = chunk.tiles;
  up.weight = weight;
  up.product = product;
  up.taken = taken;
  up.width = static_cast<int>(shape.width);
  up.condition = condition;
  return up;
}

GateGemmCuda gate_gemm(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                       const FfnTrainWeightsCuda& weights, const __nv_bfloat16* x) {
  return {.tokens = chunk.tokens,
          .width = shape.width,
          .ffn = shape.ffn,
          .x = x + chunk.begin * shape.width,
          .w_gate = shape.gated ? weights.w_gate : weights.w_up,
          .out = chunk.made};
}

void forward_chunk(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                   const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                   const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  KeptState* state = chunk.kept.state;
  TWELL_CUDA_CHECK(cudaMemsetAsync(state, 0, sizeof(KeptState), stream));
  gate_gemm_cuda(ctx, gate_gemm(chunk, shape, problem.weights, problem.x));
  TWELL_CUDA_CHECK(
      tile_union::launch_split_rows(chunk.pattern, chunk.tiles, &state->activity, stream));
  TWELL_CUDA_CHECK(
      tile_union::launch_build_unions(chunk.pattern, chunk.tiles, &state->activity, ctas, stream));
  if (shape.gated) {
    TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
        up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1], &state->up_taken),
        ctas, stream));
  }
  TWELL_CUDA_CHECK(launch_keep({.tiles = chunk.tiles,
                                .u = shape.gated ? work.images[1] : nullptr,
                                .kept = chunk.kept,
                                .l1_parts = work.l1_parts,
                                .counts = problem.counts,
                                .active = problem.active},
                               ctas, stream));
  TWELL_CUDA_CHECK(tile_union::launch_down_sm90({.tiles = chunk.tiles,
                                                 .weight = problem.weights.w_down,
                                                 .y = problem.y + chunk.begin * shape.width,
                                                 .taken = &state->down_taken,
                                                 .width = static_cast<int>(shape.width)},
                                                ctas, stream));
}

// g and u of a chunk again, where not everything could be kept.
void recompute(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
               const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
               const HybridWorkspace& work) {
  const tile_union::Condition overflow = &chunk.kept.state->overflow;
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  GateGemmCuda gate = gate_gemm(chunk, shape, problem.weights, problem.x);
  gate.condition = overflow;
  gate_gemm_cuda(ctx, gate);
  TWELL_CUDA_CHECK(
      tile_union::launch_build_unions(chunk.pattern, chunk.tiles, nullptr, ctas, stream, overflow));
  if (!shape.gated) return;
  TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
      up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1],
                 &work.neurons.counts->again_taken, overflow),
      ctas, stream));
}

void backward_chunk(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                    const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                    const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  const FfnTrainWeightsCuda& weights = problem.weights;
  const auto& [h, d_u, d_g] = work.images;
  const __nv_bfloat16* x = problem.x + chunk.begin * shape.width;
  const __nv_bfloat16* d_y = problem.d_y + chunk.begin * shape.width;
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(work.neurons.nnz, 0, static_cast<size_t>(work.zero_bytes), stream));
  recompute(ctx, problem, shape, chunk, work);
  TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
      up_product(chunk, shape, problem.d_y, weights.w_down, d_g, &work.neurons.counts->up_taken),
      ctas, stream));
  TWELL_CUDA_CHECK(launch_expand({.tiles = chunk.tiles,
                                  .d_u = shape.gated ? d_u : nullptr,
                                  .d_g = d_g,
                                  .kept = chunk.kept,
                                  .masks = work.masks,
                                  .neuron_nnz = work.neurons.nnz,
                                  .l1_scale = problem.l1_scale},
                                 ctas, stream));
  tile_union::Down down{};
  down.tiles = chunk.tiles;
  down.tiles.activations = d_g;
  down.weight = shape.gated ? weights.w_gate : weights.w_up;
  if (shape.gated) {
    down.activations2 = d_u;
    down.weight2 = weights.w_up;
  }
  down.y = problem.d_x + chunk.begin * shape.width;
  down.taken = &work.neurons.counts->down_taken;
  down.width = static_cast<int>(shape.width);
  TWELL_CUDA_CHECK(tile_union::launch_down_sm90(down, ctas, stream));

  // Without a gate d_g is the gradient of x w_up^T.
  Transpose transpose{chunk.tiles, chunk.kept, work.masks, {d_g, d_u, h}, work.neurons};
  WeightGrads grads{work.neurons,
                    {x, x, d_y},
                    {problem.grads.w_gate, problem.grads.w_up, problem.grads.w_down},
                    static_cast<int>(shape.width),
                    problem.grads.add || chunk.begin > 0};
  if (!shape.gated) {
    transpose.images[1] = h;
    grads.right[1] = d_y;
    grads.grads[0] = problem.grads.w_up;
    grads.grads[1] = problem.grads.w_down;
  }
  if (!grads.add) TWELL_CUDA_CHECK(launch_clear_idle(grads, stream));
  TWELL_CUDA_CHECK(launch_rank_neurons(work.neurons, stream));
  TWELL_CUDA_CHECK(launch_neuron_unions(transpose, ctas, stream));
  TWELL_CUDA_CHECK(launch_transpose(transpose, ctas, stream));
  TWELL_CUDA_CHECK(launch_weight_grads_sm90(grads, ctas, stream));
}

}  // namespace

void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const TwellPacked& replay = problem.replay;
  TWELL_CHECK(replay.words == nullptr ||
                  (replay.shape.rows >= problem.tokens && replay.shape.cols == saved.shape.ffn &&
                   replay.shape.tile == kGateTile && replay.shape.slots() >= 4),
              "replayed TwELL of [{}, {}] for [{}, {}]", replay.shape.rows, replay.shape.cols,
              problem.tokens, saved.shape.ffn);
  const HybridWorkspace work = HybridWorkspace::of(workspace);
  for (int64_t i = 0; i * kChunkTokens < problem.tokens; ++i) {
    const HybridChunk chunk(saved, work, i, problem.tokens, replay);
    forward_chunk(ctx, problem, saved.shape, chunk, work);
  }
  saved.replay = replay;
}

void hybrid_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                          FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const HybridWorkspace work = HybridWorkspace::of(workspace);
  for (int64_t i = 0; i * kChunkTokens < problem.tokens; ++i) {
    const HybridChunk chunk(saved, work, i, problem.tokens, saved.replay);
    backward_chunk(ctx, problem, saved.shape, chunk, work);
  }
}

}  // namespace twell::ffn_train
