// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_cuda.h"

#include <algorithm>
#include <optional>

#include "twell/base/gpu_code.h"
#include "twell/base/rounding.h"

namespace twell {
namespace {

constexpr int64_t kMuchMemory = int64_t{5} << 30;
constexpr int64_t kMostMemory = int64_t{16} << 30;

// The part of the workspace that grows with the tokens of a chunk.
int64_t chunk_bytes(int64_t tokens, int64_t ffn) {
  const TwellShape shape = ffn_twell_shape(tokens, ffn);
  return shape.words() * int64_t{sizeof(uint32_t)} +
         shape.max_spill_slots() * kTwellTile * int64_t{sizeof(__nv_bfloat16)} +
         tokens * int64_t{sizeof(int32_t)} + TileUnionWorkspace::bytes_needed(tokens, ffn);
}

GpuDevice ask_driver(const CudaContext& ctx) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, ctx.device()));
    return value;
  };
  return gpu_device_of(
      {.name = ctx.device_name(),
       .compute_capability = ctx.compute_capability(),
       .multiprocessors = ctx.multiprocessors(),
       .clock_khz = attribute(cudaDevAttrClockRate),
       .memory_clock_khz = attribute(cudaDevAttrMemoryClockRate),
       .memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth),
       .shared_memory = seen_shared_memory(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))});
}

// FfnBuffersCuda::w_down.
int64_t down_bytes(bool gated, int64_t width, int64_t ffn) {
  return (gated ? int64_t{1} : int64_t{sizeof(__nv_bfloat16)}) * ffn * width;
}

}  // namespace

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
      buffers_{
          .layer = gpu_ffn_layer(gpu_device(ctx), {.width = width, .ffn = ffn, .gated = gated}),
          .words = DeviceBuffer<uint32_t>(ffn_twell_shape(chunk_tokens_, ffn).words()),
          .gate = DeviceBuffer<__nv_bfloat16>(
              ffn_twell_shape(chunk_tokens_, ffn).max_spill_slots() * kTwellTile),
          .row_nnz = DeviceBuffer<int32_t>(chunk_tokens_),
          .tile_union = TileUnionWorkspace(chunk_tokens_, ffn),
          .row_fused = RowFusedWorkspace(ctx, chunk_tokens_, width),
          .few_tokens = FewTokenWorkspace(ffn, width),
          .hidden_scales = {},
          .w_down = {},
          .dense = {}} {
  // Words are read 16 bytes at a time, and the last ones of a tile may never be written.
  DeviceBuffer<uint32_t>& words = buffers_.words;
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(words.data(), 0, static_cast<size_t>(words.bytes()), ctx.stream()));
}

void FfnWorkspaceCuda::make_for_bytes() {
  buffers_.hidden_scales = DeviceBuffer<float>(chunk_tokens_);
  buffers_.w_down = DeviceBuffer<uint8_t>(down_bytes(buffers_.layer.gated, width(), ffn()));
}

int64_t FfnWorkspaceCuda::bytes_for_bytes(const CudaContext& ctx, int64_t max_tokens, int64_t width,
                                          int64_t ffn, bool gated) {
  return 4 * chunk_tokens(ctx, max_tokens, ffn) + down_bytes(gated, width, ffn);
}

int64_t FfnWorkspaceCuda::bytes_needed(const CudaContext& ctx, int64_t max_tokens, int64_t ffn) {
  return chunk_bytes(chunk_tokens(ctx, max_tokens, ffn), ffn);
}

int64_t FfnWorkspaceCuda::bytes() const {
  return buffers_.words.bytes() + buffers_.gate.bytes() + buffers_.row_nnz.bytes() +
         buffers_.tile_union.bytes() + buffers_.row_fused.bytes() + buffers_.few_tokens.bytes();
}

GpuDevice gpu_device(const CudaContext& ctx) {
  // The driver takes a millisecond or two to say how fast the clocks are, as long as a layer takes.
  struct Known {
    std::optional<GpuDevice> device;
  };
  std::optional<GpuDevice>& known = ctx.service<Known>().device;
  if (!known) known = ask_driver(ctx);
  return *known;
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
  plan.plan.execution = *plan.last->choice.execution;
  return plan.last->choice;
}

namespace {

const GpuFfnChoice& choose(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                           const FfnWorkspaceCuda& workspace) {
  GpuFfnLayer layer = workspace.layer();
  layer.activation = problem.weights.activation;
  layer.biased = problem.weights.biased();
  if (problem.in_bytes()) layer.weights = GpuWeights::kFp8;
  if (problem.weights.screen.values != nullptr && problem.rotated.values != nullptr) {
    layer.screen = problem.weights.screen.bound;
  }
  return choose_ffn_cuda(layer,
                         {.tokens = problem.tokens,
                          .norm = problem.norm != nullptr,
                          .counts_rows = problem.row_nnz != nullptr},
                         plan);
}

}  // namespace

bool ffn_reads_rotated(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                       const FfnWorkspaceCuda& workspace) {
  return problem.tokens > 0 && choose(problem, plan, workspace).execution->limits.screened;
}

bool ffn_maps_rows(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                   const FfnWorkspaceCuda& workspace) {
  return problem.tokens > 0 && choose(problem, plan, workspace).execution->limits.maps_rows;
}

void ffn_forward_cuda(CudaContext& ctx, const FfnForwardCuda& problem, FfnPlanCuda& plan,
                      FfnWorkspaceCuda& workspace) {
  TWELL_CHECK(problem.tokens <= workspace.max_tokens(), "{} tokens in a workspace for {}",
              problem.tokens, workspace.max_tokens());
  if (problem.tokens == 0) return;
  TWELL_CHECK(!problem.in_bytes() || workspace.takes_bytes(),
              "a feed-forward layer in e4m3 needs a workspace made for it");
  TWELL_CHECK(problem.x != problem.y || (problem.norm != nullptr && problem.add),
              "an FFN may overwrite x only with its norm, adding to it");
  const GpuFfnChoice& choice = choose(problem, plan, workspace);
  TWELL_CHECK(problem.y_rows == nullptr || choice.execution->limits.maps_rows,
              "{} does not take rows in another order", choice.reason);
  const GpuFfnExecution& execution = *choice.execution;
  const int64_t most = std::min(execution.launch_tokens, workspace.chunk_tokens());
  const int64_t unit = most < 128 ? 1 : 128;
  const int64_t step =
      ceil_div(ceil_div(problem.tokens, ceil_div(problem.tokens, most)), unit) * unit;
  for (int64_t begin = 0; begin < problem.tokens; begin += step) {
    FfnForwardCuda chunk = problem;
    chunk.tokens = std::min(step, problem.tokens - begin);
    chunk.rows = std::clamp(problem.rows - begin, chunk.tokens, step);
    if (chunk.in_bytes()) {
      chunk.x_bytes.values += begin * workspace.width();
      chunk.x_bytes.scales += begin;
    } else {
      chunk.x += begin * workspace.width();
    }
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
    execution.launch({ctx, chunk, plan, workspace.buffers()});
  }
}

}  // namespace twell
