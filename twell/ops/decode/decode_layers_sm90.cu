// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers: its workspace, what it takes, its launch.
#include <algorithm>

#include "twell/base/carver.h"
#include "twell/ops/decode/decode_launch_sm90.h"
#include "twell/ops/decode/decode_layers_sm90.cuh"

namespace twell {
namespace decode {
namespace {

DecodeWorkspace carve(const DecodeWorkspaceShape& s, Carver& carver) {
  DecodeWorkspace w;
  if (s.tokens == 0) return w;
  const int64_t heads = s.tokens * s.heads;
  const HeadParts parts(static_cast<int>(s.heads), static_cast<int>(s.kv_heads),
                        static_cast<int>(s.head_dim));
  const int64_t segments = parts.most_segments(s.max_length, static_cast<int>(s.multiprocessors));
  w.x = carver.take<uint64_t>(s.tokens * s.width);
  w.qkv = carver.take<uint64_t>(s.tokens * (s.heads + 2 * s.kv_heads) * s.head_dim / 2);
  w.attended = carver.take<uint64_t>(heads * s.head_dim / 2);
  w.segment_values = carver.take<uint64_t>(heads * segments * s.head_dim);
  w.segment_sums = carver.take<uint64_t>(heads * segments * 2);
  w.segments = static_cast<int>(segments);
  w.fired = carver.take<uint64_t>(s.multiprocessors);
  w.tagged_parts = carver.take<uint64_t>(s.multiprocessors * s.width);
  w.parts = carver.take<float>(s.multiprocessors * s.tokens * s.width);
  w.state = carver.take<uint32_t>(3);
  return w;
}

bool has_screens(const DecodeLayers& problem) {
  return problem.tokens == 1 && !problem.weights_in_bytes &&
         std::any_of(problem.layer, problem.layer + problem.layers,
                     [](const DecodeLayer& l) { return l.sparse && l.screen.rows != nullptr; });
}

// The current device; zeros where it cannot run the kernel.
struct Device {
  int shared_bytes = 0, multiprocessors = 0;

  Device() {
    int major = 0;
    if (gpu::device_attribute(major, cudaDevAttrComputeCapabilityMajor) != cudaSuccess ||
        major != 9 ||
        gpu::device_attribute(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin) !=
            cudaSuccess ||
        gpu::device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount) != cudaSuccess) {
      shared_bytes = multiprocessors = 0;
    }
  }
};

struct Shape {
  int64_t width, q_width, ffn, head_dim;
  bool in_bytes = false;  // the weights

  // Whether the shape fits, apart from shared memory.
  bool suits(const Device& device) const {
    // Arrays in shared memory hold a CTA's neurons, q/k/v groups and items of attention. q, k and v
    // have at most 3 H heads.
    return width % (in_bytes ? 16 : 8) == 0 && (!in_bytes || q_width % 16 == 0) &&
           width <= kMaxWidth && head_dim % kGroup == 0 && head_dim <= 128 &&
           ffn <= int64_t{kMaxNeurons} * device.multiprocessors &&
           q_width <= head_dim * device.multiprocessors &&
           3 * q_width <= int64_t{kMaxQkvGroups} * kGroup * device.multiprocessors;
  }
  // Whether the shared memory of the kernel for kTokens fits.
  template <int kTokens>
  bool fits(const Device& device, int64_t tokens, bool screens) const {
    const int64_t bytes =
        in_bytes ? shared_bytes<kTokens, uint8_t>(width, q_width, tokens, screens)
                 : shared_bytes<kTokens, __nv_bfloat16>(width, q_width, tokens, screens);
    return bytes <= device.shared_bytes;
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

int64_t decode_workspace_bytes(const DecodeWorkspaceShape& shape) {
  Carver carver(nullptr, 256);
  decode::carve(shape, carver);
  return carver.bytes();
}

DecodeWorkspace decode_workspace(const DecodeWorkspaceShape& shape, void* memory) {
  Carver carver(memory, 256);
  return decode::carve(shape, carver);
}

int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim,
                                 bool weights_in_bytes) {
  return decode::Shape{width, q_width, ffn, head_dim, weights_in_bytes}.max_tokens(
      decode::Device());
}

bool decode_layers_take_screens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim) {
  return decode::Shape{width, q_width, ffn, head_dim}.takes_screens(decode::Device());
}

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream) {
  constexpr int kFewestStages = 4;  // of a ring buffer
  if (problem.layers < 1 || problem.layers > kMaxDecodeLayers || problem.sparse_requests < 1 ||
      problem.sparse_requests > kFewestStages) {
    return cudaErrorInvalidValue;
  }
  const decode::Device device;
  const decode::Shape shape{problem.width, int64_t{problem.heads} * problem.head_dim, problem.ffn,
                            problem.head_dim, problem.weights_in_bytes};
  const bool screens = decode::has_screens(problem);
  if (problem.tokens < 1 || problem.tokens > shape.max_tokens(device) ||
      (screens && !shape.takes_screens(device))) {
    return cudaErrorInvalidValue;
  }
  // The kernel for one token has a deeper ring buffer, for which very wide models leave no room.
  const bool one = problem.tokens == 1 && shape.fits<1>(device, 1, screens);
  const auto launch =
      problem.weights_in_bytes
          ? (problem.cache_in_bytes ? decode::launch_bytes_bytes : decode::launch_bytes_wide)
          : (problem.cache_in_bytes ? decode::launch_wide_bytes : decode::launch_wide_wide);
  return launch(problem, device.multiprocessors, one, screens, stream);
}

}  // namespace twell
