// SPDX-License-Identifier: Apache-2.0
// The hybrid execution of the feed-forward layer in training on the GPU: the memory in which its
// kernels work, and the order in which they run: elementwise ones on tiles of tokens
// (hybrid_keep.cu), those of tiles of neurons (hybrid_neurons.cu), and products.
// Neurons and tokens have a fixed order everywhere, so that sums repeat bit for bit. All pointers
// of kernels are device memory.
//
// Kernels per chunk of tokens; those of unions are in ops/ffn/tile_union/tile_union_kernels.h:
//   forward   gate GEMM, find_unions, place_gates; up: u on the unions; keep; down
//   backward  up with d_y and w_down: d_h on the unions; expand; down with two products: d_x;
//             then by neuron: rank, neuron_unions, transpose, weight_grads
// An image is bf16 values of 128 rows by 64 columns per block, as WGMMA reads them: row-major, each
// row's eight pieces of 16 bytes permuted by XOR with row % 8.
#include <algorithm>
#include <cstdint>

#include "twell/base/rounding.h"
#include "twell/format/activity_cuda.h"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"
#include "twell/ops/ffn_train/ffn_train_parts.cuh"
#include "twell/ops/ffn_train/hybrid_kernels.cuh"

namespace twell::ffn_train {
namespace {

// --- clear_idle: gradients of neurons that never fire, where they are overwritten ---
constexpr int kClearThreads = 256;

// One CTA per neuron.
__global__ void __launch_bounds__(kClearThreads) clear_idle_kernel(WeightGrads grads) {
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  if (grads.neurons.nnz[blockIdx.x] != 0) return;
  const int pieces = grads.width / 4;
  for (int p = 0; p < grads.neurons.products; ++p) {
    auto* row = reinterpret_cast<float4*>(grads.grads[p]) + int64_t{blockIdx.x} * pieces;
    for (int i = threadIdx.x; i < pieces; i += kClearThreads) row[i] = float4{};
  }
}

cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream) {
  return gpu::launch_dependent(clear_idle_kernel, dim3(static_cast<unsigned>(grads.neurons.ffn)),
                               kClearThreads, 0, stream, grads);
}

constexpr int32_t kGateTile = 256;   // T of the gate's TwELL
constexpr int32_t kCompression = 8;  // C of it
constexpr int64_t kBlockValues = int64_t{kTileTokens} * kBlock;

// Sizes of the largest chunk of tokens.
struct ChunkShape {
  int64_t tokens, tiles, blocks, mask_words, neuron_tiles, token_blocks;

  explicit ChunkShape(const FfnTrainShapeCuda& shape)
      : tokens(std::min<int64_t>(shape.max_tokens, kChunkTokens)),
        tiles(TileUnionWorkspace::max_tiles(tokens)),
        blocks(ceil_div(shape.ffn, kBlock)),
        mask_words(ceil_div(shape.ffn, kGateTile) * 8),
        neuron_tiles(ceil_div(shape.ffn, kNeuronTile)),
        token_blocks(ceil_div(tokens, kBlock)) {}
  int64_t all_blocks() const { return tiles * blocks; }
  // A union has at most as many neurons as its tile has active pairs. Each tile rounds up to
  // blocks.
  int64_t most_blocks(int64_t pairs) const {
    return std::min(all_blocks(), ceil_div(pairs, kBlock) + tiles);
  }
};

// What one chunk of one layer keeps. Pointers are arrays off `carver`, null where it only counts.
struct SavedChunk {
  Tiles tiles{};
  Kept kept{};
  int64_t zero_bytes;  // from kept.state on, which must be 0 before forward

  SavedChunk(const FfnTrainShapeCuda& shape, HybridCapacityCuda capacity, Carver& carver) {
    const ChunkShape chunk(shape);
    const int64_t begin = carver.bytes();
    kept.state = carver.take<KeptState>(1);
    tiles.counts = carver.take<tile_union::Counts>(1);
    tiles.marked = carver.take<int32_t>(chunk.tiles);
    zero_bytes = carver.bytes() - begin;
    kept.capacity = capacity.pairs;
    kept.block_capacity = static_cast<int>(capacity.blocks);
    kept.values = carver.take<uint32_t>(capacity.pairs);
    kept.masks = carver.take<uint4>(int64_t{kept.block_capacity} * kBlock);
    kept.offsets = carver.take<uint32_t>(kept.block_capacity);
    tiles.tokens = carver.take<int32_t>(chunk.tiles * kTileTokens);
    tiles.mask = carver.take<uint32_t>(chunk.tiles * chunk.mask_words);
    tiles.before = carver.take<uint32_t>(chunk.tiles * chunk.mask_words);
    tiles.union_size = carver.take<int32_t>(chunk.tiles);
    tiles.first_block = carver.take<int32_t>(chunk.tiles);
    tiles.union_ids = carver.take<int32_t>(chunk.all_blocks() * kBlock);
    tiles.order = carver.take<int32_t>(chunk.tiles);
    tiles.up_items =
        carver.take<int2>(chunk.tiles * ceil_div(chunk.blocks, tile_union::kMaxChunkBlocks));
    tiles.heavy = carver.take<uint4>(chunk.tiles);
    tiles.blocks = static_cast<int>(chunk.blocks);
  }
};

// Memory of one chunk in flight, arrays off `carver` too.
struct HybridWorkspace {
  double* l1_parts;  // [blocks]
  // On tiles of tokens, [blocks, kTileTokens, kBlock]: g, then h; u, then d_u; d_h, then d_g.
  __nv_bfloat16* images[3];
  uint4* masks;      // [blocks, kBlock]
  TwellPacked gate;  // in the memory of neurons.images, which are needed later
  NeuronTiles neurons{};
  int64_t zero_bytes;  // from neurons.nnz on, which must be 0 before backward

  HybridWorkspace(const FfnTrainShapeCuda& shape, Carver& carver) {
    const ChunkShape chunk(shape);
    carver.take<std::byte>(256);  // the dense execution's ticket, which stays 0
    l1_parts = carver.take<double>(chunk.all_blocks());
    for (auto& image : images) {
      image = carver.take<__nv_bfloat16>(chunk.all_blocks() * kBlockValues);
    }
    masks = carver.take<uint4>(chunk.all_blocks() * kBlock);

    neurons.ffn = static_cast<int>(shape.ffn);
    neurons.max_tiles = static_cast<int>(chunk.neuron_tiles);
    neurons.words = static_cast<int>(chunk.tiles) * (kTileTokens / 32);
    neurons.products = shape.gated ? 3 : 2;
    neurons.columns = static_cast<int>(ceil_div(shape.width, tile_union::kColumns));
    const int64_t zero_begin = carver.bytes();
    neurons.nnz = carver.take<int32_t>(shape.ffn);
    neurons.size = carver.take<int32_t>(chunk.neuron_tiles);
    neurons.turns =
        carver.take<int32_t>(chunk.neuron_tiles * neurons.products * neurons.columns * 2);
    neurons.counts = carver.take<NeuronCounts>(1);
    zero_bytes = carver.bytes() - zero_begin;
    neurons.order = carver.take<int32_t>(chunk.neuron_tiles * kNeuronTile);
    neurons.mask = carver.take<uint32_t>(chunk.neuron_tiles * neurons.words);
    neurons.positions = carver.take<int32_t>(chunk.neuron_tiles * chunk.tiles * kNeuronTile);
    neurons.first_block = carver.take<int32_t>(chunk.neuron_tiles);
    neurons.ids = carver.take<int32_t>(chunk.neuron_tiles * chunk.token_blocks * kBlock);
    neurons.entries = carver.take<int4>(chunk.neuron_tiles * chunk.token_blocks);

    const int64_t shared_begin = carver.bytes();
    const int64_t image = chunk.neuron_tiles * chunk.token_blocks * kNeuronTile * kBlock;
    auto* first = carver.take<__nv_bfloat16>(neurons.products * image);
    for (int p = 0; p < neurons.products; ++p) {
      neurons.images[p] = first != nullptr ? first + p * image : nullptr;
    }
    gate.shape = {chunk.tokens, shape.ffn, kGateTile, kCompression};
    Carver over = device_carver(reinterpret_cast<std::byte*>(first));
    gate.words = over.take<uint32_t>(gate.shape.words());
    gate.spill_slots = gate.shape.max_spill_slots();
    gate.spill = over.take<BF16>(gate.spill_slots * kGateTile);
    gate.row_nnz = over.take<int32_t>(chunk.tokens);
    const int64_t missing = shared_begin + over.bytes() - carver.bytes();
    if (missing > 0) carver.take<std::byte>(missing);
  }
  static HybridWorkspace of(const FfnTrainWorkspaceCuda& workspace) {
    Carver carver = device_carver(workspace.memory);
    return {workspace.shape, carver};
  }
};

// A chunk of a call: its tiles, with images in the workspace, and its gate.
struct HybridChunk {
  int64_t begin, tokens;
  bool portable;  // on kernels for every GPU
  Tiles tiles;
  Kept kept;
  int64_t zero_bytes;        // from kept.state on, which must be 0 before forward
  TwellPacked made;          // output of the gate GEMM
  tile_union::Gate pattern;  // what later kernels read: `made`, or the activations to replay

  HybridChunk(const FfnSavedCuda& saved, const HybridWorkspace& work, int64_t index,
              int64_t all_tokens, const TwellPacked& replay)
      : begin(index * kChunkTokens),
        tokens(std::min<int64_t>(kChunkTokens, all_tokens - begin)),
        portable(saved.shape.portable) {
    Carver carver = device_carver(saved.memory);
    for (int64_t i = 0; i < index; ++i) SavedChunk(saved.shape, saved.capacity, carver);
    const SavedChunk own(saved.shape, saved.capacity, carver);
    tiles = own.tiles;
    kept = own.kept;
    zero_bytes = own.zero_bytes;
    tiles.activations = work.images[0];
    tiles.max_tiles = static_cast<int>(TileUnionWorkspace::max_tiles(tokens));
    if (portable) tiles.chunk_blocks = tile_union::kPortableBlocks;
    made = work.gate;
    made.shape.rows = tokens;
    TwellPacked used = made;
    if (replay.words != nullptr) {
      used = replay;
      used.shape.rows = tokens;
      used.words += begin * used.shape.row_words();
      used.row_nnz += begin;
    }
    pattern = {used.words,
               reinterpret_cast<const uint4*>(used.spill),
               used.row_nnz,
               static_cast<int>(tokens),
               static_cast<int>(used.shape.tiles()),
               used.shape.slots()};
  }
};

tile_union::Up up_product(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                          const __nv_bfloat16* x, const __nv_bfloat16* weight,
                          __nv_bfloat16* product, int32_t* taken,
                          tile_union::Condition condition = nullptr) {
  tile_union::Up up{};
  up.x = x + chunk.begin * shape.width;
  if (!chunk.portable) {
    up.map_x = gpu::matrix_tensor_map(up.x, chunk.tokens, shape.width, tile_union::kTileTokens);
  }
  up.tiles = chunk.tiles;
  up.weight = weight;
  up.product = product;
  up.taken = taken;
  up.width = static_cast<int>(shape.width);
  up.condition = condition;
  return up;
}

GateGemmCuda gate_gemm(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                       const FfnWeightsCuda& weights, const __nv_bfloat16* x) {
  return {.tokens = chunk.tokens,
          .width = shape.width,
          .ffn = shape.ffn,
          .x = x + chunk.begin * shape.width,
          .w_gate = shape.gated ? weights.w_gate : weights.w_up,
          .out = chunk.made,
          .cut = bf16_cut(weights.activation, weights.threshold)};
}

void run_gate(CudaContext& ctx, const HybridChunk& chunk, const GateGemmCuda& problem) {
  chunk.portable ? gate_gemm_sm80_cuda(ctx, problem) : gate_gemm_cuda(ctx, problem);
}
cudaError_t launch_up(const HybridChunk& chunk, const tile_union::Up& up, int ctas,
                      cudaStream_t stream) {
  return chunk.portable ? tile_union::launch_up_sm80(up, ctas, stream)
                        : tile_union::launch_up_sm90(up, ctas, stream);
}
cudaError_t launch_down(const HybridChunk& chunk, const tile_union::Down& down, int ctas,
                        cudaStream_t stream) {
  return chunk.portable ? tile_union::launch_down_sm80(down, ctas, stream)
                        : tile_union::launch_down_sm90(down, ctas, stream);
}

void forward_chunk(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                   const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                   const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  KeptState* state = chunk.kept.state;
  TWELL_CUDA_CHECK(cudaMemsetAsync(state, 0, static_cast<size_t>(chunk.zero_bytes), stream));
  run_gate(ctx, chunk, gate_gemm(chunk, shape, problem.weights, problem.x));
  TWELL_CUDA_CHECK(tile_union::launch_find_unions(chunk.pattern, chunk.tiles, &state->activity,
                                                  nullptr, 0, ctas, stream));
  TWELL_CUDA_CHECK(tile_union::launch_place_gates(chunk.pattern, chunk.tiles, ctas, stream));
  if (shape.gated) {
    TWELL_CUDA_CHECK(launch_up(
        chunk,
        up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1], &state->up_taken),
        ctas, stream));
  }
  TWELL_CUDA_CHECK(launch_keep({.tiles = chunk.tiles,
                                .u = shape.gated ? work.images[1] : nullptr,
                                .kept = chunk.kept,
                                .l1_parts = work.l1_parts,
                                .counts = problem.counts,
                                .active = problem.active,
                                .squared = problem.weights.activation == Activation::kRelu2,
                                .up_relu = problem.weights.activation == Activation::kDRelu},
                               ctas, stream));
  TWELL_CUDA_CHECK(launch_down(chunk,
                               {.tiles = chunk.tiles,
                                .weight = problem.weights.w_down,
                                .y = problem.y + chunk.begin * shape.width,
                                .taken = &state->down_taken,
                                .width = static_cast<int>(shape.width)},
                               ctas, stream));
}

// Computes g and u of a chunk again, on the device's condition that not everything could be kept.
void recompute(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
               const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
               const HybridWorkspace& work) {
  const tile_union::Condition overflow = &chunk.kept.state->overflow;
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  GateGemmCuda gate = gate_gemm(chunk, shape, problem.weights, problem.x);
  gate.condition = overflow;
  run_gate(ctx, chunk, gate);
  TWELL_CUDA_CHECK(
      tile_union::launch_place_gates(chunk.pattern, chunk.tiles, ctas, stream, overflow));
  if (!shape.gated) return;
  TWELL_CUDA_CHECK(
      launch_up(chunk,
                up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1],
                           &work.neurons.counts->again_taken, overflow),
                ctas, stream));
}

void backward_chunk(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                    const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                    const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  const FfnWeightsCuda& weights = problem.weights;
  const auto& [h, d_u, d_g] = work.images;
  const __nv_bfloat16* x = problem.x + chunk.begin * shape.width;
  const __nv_bfloat16* d_y = problem.d_y + chunk.begin * shape.width;
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(work.neurons.nnz, 0, static_cast<size_t>(work.zero_bytes), stream));
  recompute(ctx, problem, shape, chunk, work);
  TWELL_CUDA_CHECK(launch_up(
      chunk,
      up_product(chunk, shape, problem.d_y, weights.w_down, d_g, &work.neurons.counts->up_taken),
      ctas, stream));
  TWELL_CUDA_CHECK(launch_expand({.tiles = chunk.tiles,
                                  .d_u = shape.gated ? d_u : nullptr,
                                  .d_g = d_g,
                                  .kept = chunk.kept,
                                  .masks = work.masks,
                                  .neuron_nnz = work.neurons.nnz,
                                  .l1_scale = problem.l1_scale,
                                  .squared = weights.activation == Activation::kRelu2,
                                  .up_relu = weights.activation == Activation::kDRelu},
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
  TWELL_CUDA_CHECK(launch_down(chunk, down, ctas, stream));

  // Without a gate d_g holds the gradient of x w_up^T.
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
  TWELL_CUDA_CHECK(chunk.portable ? launch_weight_grads_sm80(grads, ctas, stream)
                                  : launch_weight_grads_sm90(grads, ctas, stream));
}

}  // namespace

int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacityCuda capacity) {
  Carver carver = device_carver();
  for (int64_t begin = 0; begin < shape.max_tokens; begin += kChunkTokens) {
    SavedChunk(shape, capacity, carver);
  }
  return carver.bytes();
}

int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  HybridWorkspace(shape, carver);
  return carver.bytes();
}

HybridCapacityCuda hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz,
                                   double union_neurons) {
  // 1.5 times what is expected, because chunks and steps differ.
  constexpr double kSlack = 1.5;
  const ChunkShape chunk(shape);
  const auto tokens = static_cast<double>(chunk.tokens);
  // The index of a block's first value has 32 bits.
  const double most =
      std::min(tokens * static_cast<double>(shape.ffn), static_cast<double>(UINT32_MAX));
  HybridCapacityCuda capacity;
  capacity.pairs = static_cast<int64_t>(std::min(std::max(nnz, 1.0) * kSlack * tokens, most));
  // Each tile rounds up to whole blocks; one more block covers that.
  const double blocks_of_tile = kSlack * std::max(union_neurons, 1.0) / kBlock + 1.0;
  const auto expected = static_cast<int64_t>(blocks_of_tile * static_cast<double>(chunk.tiles));
  const auto set_blocks = [&] {
    const int64_t possible = chunk.most_blocks(capacity.pairs);
    capacity.blocks = union_neurons < 0.0 ? possible : std::min(possible, expected);
  };
  set_blocks();
  const int64_t dense = dense_saved_bytes(shape);
  while (capacity.pairs > 0 && hybrid_saved_bytes(shape, capacity) > dense) {
    capacity.pairs /= 2;
    set_blocks();
  }
  return capacity;
}

void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem, FfnSavedCuda& saved,
                         FfnTrainWorkspaceCuda& workspace) {
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
                          FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  const HybridWorkspace work = HybridWorkspace::of(workspace);
  for (int64_t i = 0; i * kChunkTokens < problem.tokens; ++i) {
    const HybridChunk chunk(saved, work, i, problem.tokens, saved.replay);
    backward_chunk(ctx, problem, saved.shape, chunk, work);
  }
}

}  // namespace twell::ffn_train
