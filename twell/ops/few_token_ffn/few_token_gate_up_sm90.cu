// SPDX-License-Identifier: Apache-2.0
// First kernel of the layer for 9 tokens and more: a cluster of four CTAs makes the gate of up to
// 192 neurons, and h of those that fire. Each CTA has a quarter of the width, of which it keeps
// its slice of x in shared memory for both products; tokens are the 64-row operand of WGMMA.
//   gate: the rows of the first weight through the copy engine, in a ring; partial sums to the CTA
//         that has their tokens; which neurons fire to all four
//   up:   the slices of the rows of w_up that fire, gathered into the same ring; partial sums as
//         before; h = gate * up
// Rows of w_down of neurons that fire are asked into the L2 for the next kernel. A launch runs its
// code once, so that fetching it counts: loops are not unrolled where nothing is gained.
#include <algorithm>

#include "twell/ops/few_token_ffn/gate_up_hidden_sm90.cuh"

namespace twell::few_token {
namespace gate_up {
namespace {

template <int Tiles>
class Kernel : public Up<Tiles> {
  using Base = Up<Tiles>;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->prepare();
    this->begin();
    this->meet();
    if (warp_ != Base::kProducer) wait_for_previous_kernel();
    if (warp_ == 0) {
      this->set_released();
      // Not before: launching a kernel would come before the end of the one in front.
      allow_next_kernel();
    }
    const int clusters = static_cast<int>(gridDim.x) / kSplit;
    const int passes = (p_.ffn + q_.neurons - 1) / q_.neurons;
    for (int pass = static_cast<int>(blockIdx.x) / kSplit; pass < passes; pass += clusters) {
      first_ = pass * q_.neurons;
      this->gate();
      this->list();
      if (total_ > 0) {
        this->hidden();
      } else {
        this->publish();
      }
      fence_async_shared();  // the ring goes back to the copy engine
      if (pass + clusters < passes) __syncthreads();
      first_pass_ = false;
    }
    this->count();
  }

 private:
  using Base::first_;
  using Base::first_pass_;
  using Base::p_;
  using Base::q_;
  using Base::total_;
  using Base::warp_;
};

template <int Tiles>
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(Tiles == 1 ? 160 : 168)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ typename Kernel<Tiles>::Shared shared;
  Kernel<Tiles>(params, shared, memory).run();
}

// The kernel behind this one has to fit beside it: that takes all of the shared memory.
template <int Tiles>
cudaError_t allow_shared_memory() {
  const auto* kernel = reinterpret_cast<const void*>(gate_up_sm90_kernel<Tiles>);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<Tiles>::kBytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
}

template <int Tiles>
cudaError_t count_clusters(int* clusters) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kSplit);
  config.blockDim = dim3(Layout<Tiles>::kThreads);
  config.dynamicSmemBytes = Layout<Tiles>::kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel<Tiles>, &config);
}

template <int Tiles>
cudaError_t launch(const SplitGateUp& params, int clusters, cudaStream_t stream) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  return launch_dependent(gate_up_sm90_kernel<Tiles>, dim3(clusters * kSplit),
                          Layout<Tiles>::kThreads, Layout<Tiles>::kBytes, stream, params);
}

}  // namespace
}  // namespace gate_up

cudaError_t count_gate_up_clusters_sm90(int tiles, int* clusters) {
  return tiles == 1 ? gate_up::count_clusters<1>(clusters) : gate_up::count_clusters<2>(clusters);
}

cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int tiles, int clusters,
                                cudaStream_t stream) {
  return tiles == 1 ? gate_up::launch<1>(params, clusters, stream)
                    : gate_up::launch<2>(params, clusters, stream);
}

}  // namespace twell::few_token
