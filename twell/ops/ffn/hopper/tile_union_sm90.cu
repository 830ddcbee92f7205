// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/hopper/tile_union_down_sm90.cuh"
#include "twell/ops/ffn/hopper/tile_union_up_sm90.cuh"

namespace twell::tile_union {
namespace {

template <bool Gated>
cudaError_t launch_up(const Up& up, int ctas, cudaStream_t stream) {
  const auto kernel = up::tile_union_up_sm90_kernel<Gated>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, up::kSharedBytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(kernel, dim3(ctas), up::kCtaThreads<Gated>, up::kSharedBytes,
                                stream, up);
}

}  // namespace

cudaError_t launch_up_sm90(const Up& up, int ctas, cudaStream_t stream) {
  return up.product == nullptr ? launch_up<true>(up, ctas, stream)
                               : launch_up<false>(up, ctas, stream);
}

cudaError_t launch_down_sm90(const Down& down, int ctas, cudaStream_t stream) {
  const DownProblem problem{down.tiles,
                            {down.tiles.activations, down.activations2},
                            {down.weight, down.weight2},
                            down.y,
                            down.taken,
                            down.width,
                            down.add};
  return down.tiles.ready != nullptr ? gathered::launch<true>(problem, ctas, stream)
                                     : gathered::launch(problem, ctas, stream);
}

}  // namespace twell::tile_union
