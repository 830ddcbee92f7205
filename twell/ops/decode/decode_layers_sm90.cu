// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers, its launch, and how many tokens fit.
#include <algorithm>

#include "twell/ops/decode/layers.cuh"

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

// The current device; all zeros where it runs none of the kernels.
struct Device {
  int shared_bytes = 0, multiprocessors = 0;

  Device() {
    int major = 0;
    if (device_attribute(major, cudaDevAttrComputeCapabilityMajor) != cudaSuccess || major != 9 ||
        device_attribute(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin) != cudaSuccess ||
        device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount) != cudaSuccess) {
      shared_bytes = multiprocessors = 0;
    }
  }
};

struct Shape {
  int64_t width, q_width, ffn, head_dim;

  // Whatever the number of tokens.
  bool suits(const Device& device) const {
    // What a CTA has: neurons, groups of q/k/v rows (of as many heads for keys and values, at
    // most).
    return width % 8 == 0 && width <= kMaxWidth && head_dim % kGroup == 0 && head_dim <= 128 &&
           ffn <= int64_t{kMaxNeurons} * device.multiprocessors &&
           3 * q_width <= int64_t{kMaxQkvGroups} * kGroup * device.multiprocessors;
  }
  // The kernel of up to kTokens.
  template <int kTokens>
  bool fits(const Device& device, int64_t tokens, bool screens) const {
    return shared_bytes<kTokens>(width, q_width, tokens, screens) <= device.shared_bytes;
  }
  int64_t max_tokens(const Device& device) const {
    if (!suits(device)) return 0;
    for (int64_t tokens = kMaxDecodeTokens; tokens > 1; --tokens) {
      if (fits<8>(device, tokens, false)) return tokens;
    }
    return fits<1>(device, 1, false) ? 1 : 0;
  }
  bool takes_screens(const Device& device) const {
    return suits(device) && screens_width(width) && fits<1>(device, 1, true);
  }
};

}  // namespace
}  // namespace decode

int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim) {
  return decode::Shape{width, q_width, ffn, head_dim}.max_tokens(decode::Device());
}

bool decode_layers_take_screens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim) {
  return decode::Shape{width, q_width, ffn, head_dim}.takes_screens(decode::Device());
}

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream) {
  if (problem.layers < 1 || problem.layers > kMaxDecodeLayers) return cudaErrorInvalidValue;
  const decode::Device device;
  const decode::Shape shape{problem.width, int64_t{problem.heads} * problem.head_dim, problem.ffn,
                            problem.head_dim};
  const bool screens = decode::has_screens(problem);
  if (problem.tokens < 1 || problem.tokens > shape.max_tokens(device) ||
      (screens && !shape.takes_screens(device))) {
    return cudaErrorInvalidValue;
  }
  // The kernel of one token has a deeper ring, which wide models leave no room for.
  return problem.tokens == 1 && shape.fits<1>(device, 1, screens)
             ? decode::launch<1>(problem, device.multiprocessors, stream)
             : decode::launch<8>(problem, device.multiprocessors, stream);
}

}  // namespace twell
