// SPDX-License-Identifier: Apache-2.0
// First kernel of the layer for 9 to 64 tokens: a cluster of four CTAs makes the gate of up to
// 192 neurons, and h of those that fire. Each CTA has a quarter of the width, of which it keeps
// its slice of x in shared memory for both products; tokens are the 64-row operand of WGMMA.
//   gate: the rows of the first weight through the copy engine, in a ring; partial sums to the CTA
//         that has their tokens; which neurons fire to all four
//   up:   the slices of the rows of w_up that fire, gathered into the same ring; partial sums as
//         before; h = gate * up
// Rows of w_down of neurons that fire are asked into the L2 for the next kernel. A launch runs its
// code once, so that fetching it counts: loops are not unrolled where nothing is gained.
#include <algorithm>

#include "twell/ops/ffn/hopper/gate_up_hidden_sm90.cuh"

namespace twell::few_token {
namespace gate_up {
namespace {

class Kernel : public Up {
 public:
  using Up::Up;

  __device__ __forceinline__ void run() {
    prepare();
    begin();
    meet();
    if (warp_ != kProducer) wait_for_previous_kernel();
    if (warp_ == 0) {
      set_released();
      // Not before: launching a kernel would come before the end of the one in front.
      allow_next_kernel();
    }
    const int clusters = static_cast<int>(gridDim.x) / kSplit;
    const int passes = (p_.ffn + q_.neurons - 1) / q_.neurons;
    for (int pass = static_cast<int>(blockIdx.x) / kSplit; pass < passes; pass += clusters) {
      first_ = pass * q_.neurons;
      gate();
      list();
      if (total_ > 0) {
        hidden();
      } else {
        publish();
      }
      fence_async_shared();  // the ring goes back to the copy engine
      if (pass + clusters < passes) __syncthreads();
      first_pass_ = false;
    }
    count();
  }
};

__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(160)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Kernel::Shared shared;
  Kernel(params, shared, memory).run();
}

// The kernel behind this one has to fit beside it: that takes all of the shared memory.
cudaError_t allow_shared_memory() {
  const auto* kernel = reinterpret_cast<const void*>(gate_up_sm90_kernel);
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
}

}  // namespace
}  // namespace gate_up

cudaError_t count_gate_up_clusters_sm90(int* clusters) {
  using namespace gate_up;
  const cudaError_t status = allow_shared_memory();
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kSplit);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel, &config);
}

cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int clusters, cudaStream_t stream) {
  using namespace gate_up;
  const cudaError_t status = allow_shared_memory();
  if (status != cudaSuccess) return status;
  return launch_dependent(gate_up_sm90_kernel, dim3(clusters * kSplit), kThreads, kBytes, stream,
                          params);
}

}  // namespace twell::few_token
