// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/kv_bytes_cuda.h"

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"

namespace twell {
namespace {

constexpr int kCopyThreads = 128;
constexpr int kLaneValues = 8;            // values of a lane
constexpr uint32_t kNotFinite = 0x7f80u;  // bf16 from these bits on, without the sign

// kLanes lanes of a warp take a head of a token's keys or values.
template <int kLanes>
__global__ void __launch_bounds__(kCopyThreads) kv_store_bytes_kernel(KvStoreBytes p) {
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const int64_t item =
      (int64_t{blockIdx.x} * kCopyThreads + static_cast<int>(threadIdx.x)) / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kLaneValues;
  const int heads = static_cast<int>(p.kv_heads);
  const int64_t token = item / (2 * heads);
  const int part = static_cast<int>(item % (2 * heads)), head = part % heads;
  const bool is_key = part < heads, inside = token < p.tokens && column < p.head_dim;
  uint4 values{};
  if (inside) {
    values = *reinterpret_cast<const uint4*>((is_key ? p.k : p.v) + token * p.stride +
                                             head * p.head_dim + column);
  }
  // Bits of positive floats have the order of the floats, and those of infinity and NaN are the
  // largest.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = gpu::word(values, i) & 0x7fff7fffu;
    largest = max(largest, max(pair & 0xffffu, pair >> 16));
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if (!inside) return;
  const bool finite = largest < kNotFinite;
  const float magnitude = __uint_as_float(largest << 16);
  const float inverse = finite && largest > 0 ? 127.0f / magnitude : 0.0f;
  const auto byte = [&](float value) {
    const float steps = finite ? fminf(fmaxf(value * inverse, -127.0f), 127.0f) : 0.0f;
    return static_cast<uint32_t>(__float2int_rn(steps)) & 0xffu;
  };
  uint32_t bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = gpu::word(values, 2 * i), high = gpu::word(values, 2 * i + 1);
    bytes[i] = byte(gpu::low_half(low)) | byte(gpu::high_half(low)) << 8 |
               byte(gpu::low_half(high)) << 16 | byte(gpu::high_half(high)) << 24;
  }
  const int64_t row = p.cache_rows[token];
  // Pointers are chosen, not the structs of them: those would be copied to local memory.
  int8_t* const data = is_key ? p.keys.data : p.values.data;
  float* const scales = is_key ? p.keys.scales : p.values.scales;
  *reinterpret_cast<uint2*>(data + (row * heads + head) * p.head_dim + column) = {bytes[0],
                                                                                  bytes[1]};
  if (column == 0) {
    scales[kv_scale(row, head, heads)] = finite ? magnitude / 127.0f : __uint_as_float(0x7fc00000u);
  }
}

// A CTA takes a head of a sequence's block of keys or values.
__global__ void __launch_bounds__(kCopyThreads) kv_load_bytes_kernel(KvLoadBytes p) {
  const int block = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y);
  const int heads = static_cast<int>(p.kv_heads), part = static_cast<int>(blockIdx.z);
  const int left = p.kv_len[sequence] - block * kKvBlock;
  if (left <= 0) return;
  const int head = part % heads;
  const KvBytes& from = part < heads ? p.keys : p.values;
  const int64_t from_row = int64_t{kKvBlock} * p.tables[p.kv_begin[sequence] + block];
  const int64_t to_row = kKvBlock * (p.first[sequence] + block);
  const float* scales = from.scales + kv_scale(from_row, head, heads);
  const int64_t width = heads * p.head_dim;
  const int8_t* rows = from.data + from_row * width + head * p.head_dim;
  __nv_bfloat16* to = (part < heads ? p.k : p.v) + to_row * width + head * p.head_dim;
  const int pieces = static_cast<int>(p.head_dim) / kLaneValues;
  for (int i = static_cast<int>(threadIdx.x); i < kKvBlock * pieces; i += kCopyThreads) {
    const int row = i / pieces, column = i % pieces * kLaneValues;
    uint4 values{};
    if (row < left) {
      const float scale = scales[row];
      const auto bytes = *reinterpret_cast<const uint2*>(rows + row * width + column);
      const auto value = [&](uint32_t of, int at) {
        return scale * static_cast<float>(static_cast<int8_t>(of >> (8 * at)));
      };
      values = {gpu::bf16x2(value(bytes.x, 0), value(bytes.x, 1)),
                gpu::bf16x2(value(bytes.x, 2), value(bytes.x, 3)),
                gpu::bf16x2(value(bytes.y, 0), value(bytes.y, 1)),
                gpu::bf16x2(value(bytes.y, 2), value(bytes.y, 3))};
    }
    *reinterpret_cast<uint4*>(to + row * width + column) = values;
  }
}

// A CTA takes a sequence's rows of a layer.
__global__ void __launch_bounds__(kCopyThreads) kv_clear_behind_kernel(KvClearBehind p) {
  const int sequence = static_cast<int>(blockIdx.x), kv_len = p.kv_len[sequence];
  const int used = kv_len % kKvBlock;
  if (used == 0) return;  // also an empty sequence, which has no block
  const int32_t block = p.tables[p.kv_begin[sequence] + kv_len / kKvBlock];
  auto* const rows = reinterpret_cast<uint4*>(p.v + blockIdx.y * p.layer_size +
                                              int64_t{kv_row(block, used)} * p.width);
  const int pieces = (kKvBlock - used) * static_cast<int>(p.width / kLaneValues);
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kCopyThreads) rows[i] = uint4{};
}

template <int kLanes>
cudaError_t launch_store(const KvStoreBytes& p, cudaStream_t stream) {
  const int64_t ctas = ceil_div(p.tokens * 2 * p.kv_heads * kLanes, int64_t{kCopyThreads});
  return gpu::launch_dependent(kv_store_bytes_kernel<kLanes>, dim3(static_cast<unsigned>(ctas)),
                               kCopyThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_kv_store_bytes(const KvStoreBytes& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.head_dim % kLaneValues != 0 || p.head_dim > 32 * kLaneValues) return cudaErrorInvalidValue;
  if (p.head_dim <= 8 * kLaneValues) return launch_store<8>(p, stream);
  if (p.head_dim <= 16 * kLaneValues) return launch_store<16>(p, stream);
  return launch_store<32>(p, stream);
}

cudaError_t launch_kv_load_bytes(const KvLoadBytes& p, cudaStream_t stream) {
  if (p.sequences == 0 || p.max_kv_len == 0) return cudaSuccess;
  if (p.head_dim % kLaneValues != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.max_kv_len, int64_t{kKvBlock})),
                  static_cast<unsigned>(p.sequences), static_cast<unsigned>(2 * p.kv_heads));
  kv_load_bytes_kernel<<<grid, kCopyThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_kv_clear_behind(const KvClearBehind& p, cudaStream_t stream) {
  if (p.sequences == 0 || p.layers == 0) return cudaSuccess;
  if (p.width % kLaneValues != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(p.sequences), static_cast<unsigned>(p.layers));
  kv_clear_behind_kernel<<<grid, kCopyThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
