// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers, its launch, and how many tokens fit.
#include <algorithm>

#include "twell/ops/decode_layers/layers.cuh"

namespace twell {
namespace decode {
namespace {

template <int kTokens, int kLanes>
__global__ void __launch_bounds__(kAllThreads, 1)
    decode_layers_sm90_kernel(const __grid_constant__ DecodeLayers problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ typename Layers<kTokens, kLanes>::Shared shared;
  Layers<kTokens, kLanes>(problem, shared, memory).run(memory);
}

template <int kTokens>
int64_t shared_bytes(int64_t width, int64_t q_width, int64_t tokens, bool screens) {
  using Most = Layers<kTokens, 16>;
  return Most::shared_bytes(static_cast<int>(width), static_cast<int>(q_width),
                            static_cast<int>(tokens), screens) +
         static_cast<int64_t>(sizeof(typename Most::Shared));
}

bool has_screens(const DecodeLayers& problem) {
  return problem.tokens == 1 &&
         std::any_of(problem.layer, problem.layer + problem.layers,
                     [](const DecodeLayer& l) { return l.sparse && l.screen.rows != nullptr; });
}

template <int kTokens, int kLanes>
cudaError_t launch(const DecodeLayers& problem, int multiprocessors, cudaStream_t stream) {
  const auto kernel = decode_layers_sm90_kernel<kTokens, kLanes>;
  const auto shared = static_cast<int>(Layers<kTokens, kLanes>::shared_bytes(
      problem.width, problem.heads * problem.head_dim, problem.tokens, has_screens(problem)));
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(multiprocessors));
  config.blockDim = dim3(kAllThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, problem);
}

template <int kTokens>
cudaError_t launch(const DecodeLayers& problem, int multiprocessors, cudaStream_t stream) {
  if (problem.head_dim <= 64) return launch<kTokens, 8>(problem, multiprocessors, stream);
  return launch<kTokens, 16>(problem, multiprocessors, stream);
}

cudaError_t device_attribute(int& value, cudaDeviceAttr attribute) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(&value, attribute, device) : status;
}

}  // namespace
}  // namespace decode

int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim,
                                 bool screens) {
  int most = 0, multiprocessors = 0, major = 0;
  if (decode::device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) != cudaSuccess ||
      decode::device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount) != cudaSuccess ||
      decode::device_attribute(major, cudaDevAttrComputeCapabilityMajor) != cudaSuccess ||
      major != 9) {
    return 0;
  }
  if (width % 8 != 0 || width > decode::kMaxWidth || head_dim % decode::kGroup != 0 ||
      head_dim > 128 || (screens && !screens_width(width))) {
    return 0;
  }
  // What a CTA has: neurons, groups of q/k/v rows (of as many heads for keys and values, at most).
  if (ffn > int64_t{decode::kMaxNeurons} * multiprocessors ||
      3 * q_width > int64_t{decode::kMaxQkvGroups} * decode::kGroup * multiprocessors) {
    return 0;
  }
  if (screens) return decode::shared_bytes<1>(width, q_width, 1, true) <= most ? 1 : 0;
  for (int64_t tokens = kMaxDecodeTokens; tokens > 1; --tokens) {
    if (decode::shared_bytes<8>(width, q_width, tokens, false) <= most) return tokens;
  }
  return decode::shared_bytes<1>(width, q_width, 1, false) <= most ? 1 : 0;
}

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t status =
      decode::device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
  if (status != cudaSuccess) return status;
  if (problem.layers < 1 || problem.layers > kMaxDecodeLayers) return cudaErrorInvalidValue;
  const int64_t most =
      decode_layers_max_tokens(problem.width, int64_t{problem.heads} * problem.head_dim,
                               problem.ffn, problem.head_dim, decode::has_screens(problem));
  if (problem.tokens < 1 || problem.tokens > most) return cudaErrorInvalidValue;
  // The kernel of one token has a deeper ring, which wide models leave no room for.
  int bytes = 0;
  const cudaError_t limit =
      decode::device_attribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (limit != cudaSuccess) return limit;
  const bool one = problem.tokens == 1 &&
                   decode::shared_bytes<1>(problem.width, problem.heads * problem.head_dim, 1,
                                           decode::has_screens(problem)) <= bytes;
  return one ? decode::launch<1>(problem, multiprocessors, stream)
             : decode::launch<8>(problem, multiprocessors, stream);
}

}  // namespace twell
