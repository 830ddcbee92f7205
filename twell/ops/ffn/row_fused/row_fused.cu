// SPDX-License-Identifier: Apache-2.0
// The row-fused execution of up and down, for GPUs of compute capability 8.0 and later. On Hopper
// it runs only where a caller asks for it.
//
//   light_rows  one warp per row; lists the heavy rows
//   heavy_rows  a heavy row's tiles are spread over the warps of several CTAs; counts all rows
#include <algorithm>
#include <type_traits>

#include "twell/base/error.h"
#include "twell/base/reduce.cuh"
#include "twell/format/twell_reader.cuh"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"

namespace twell {
namespace row_fused {
namespace {

using gpu::high_half;
using gpu::lane_id;
using gpu::low_half;
using gpu::warp_prefix;

// A warp lists this many non-zeros at a time; a row with more is heavy.
constexpr int kListed = 64;
// Columns that a warp accumulates: 64 f32 per lane. A wider y is computed in chunks, each of which
// computes h again.
constexpr int kChunk = 2048;
// With fewer heavy rows than this, rows are split into parts, so that about as many CTAs have work.
constexpr int kSplitTarget = 264;
constexpr int kMaxParts = 16;
// Parts of all split rows together: ceil(kSplitTarget / n) * n < kSplitTarget + n, n <
// kSplitTarget.
constexpr int kMaxPartials = 2 * kSplitTarget;

struct Counters {
  int32_t heavy_rows;  // 0 between calls
  int32_t ctas_done;   // 0 between calls
};

struct Problem {
  const uint32_t* words;   // TwELL [M, col_tiles, slots], T = 256
  const uint16_t* spill;   // [spill slots, 256]
  const int32_t* row_nnz;  // [M]
  int64_t rows;            // M
  int col_tiles;
  int slots;
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* w_up;    // [F, D], null without a gate
  const __nv_bfloat16* w_down;  // [F, D]
  __nv_bfloat16* y;             // [M, D]
  int width;                    // D
  int chunks;                   // ceil(D / kChunk)
  int32_t* heavy_rows;          // [M]
  Counters* counters;
  int32_t* parts_done;     // [kSplitTarget * chunks], 0 between calls
  float* partials;         // [kMaxPartials, D]
  bool squared;            // f(g) = g^2
  bool up_relu;            // dReLU
  bool add;                // y += instead of =
  ActivityCuda* activity;  // added to; may be null
};

// Non-zeros of one warp, in shared memory. The value is first the gate's, then h.
struct NonzeroList {
  int32_t neuron[kListed];
  float value[kListed];

  __device__ void set(int at, int neuron_index, uint32_t bf16_bits) {
    neuron[at] = neuron_index;
    value[at] = __uint_as_float(bf16_bits << 16);
  }
};

// Appends the non-zeros among N consecutive values per lane, from the warp's neuron `first` on.
template <int N>
__device__ int append_dense(const uint16_t (&values)[N], int first, int size, NonzeroList& list) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) count += (values[i] & 0x7fff) != 0;
  int total;
  int at = size + warp_prefix(count, total);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if ((values[i] & 0x7fff) != 0) list.set(at++, first + lane_id() * N + i, values[i]);
  }
  return size + total;
}

// Lists all non-zeros of a row that has at most kListed; returns their number.
__device__ int list_row(const Problem& problem, int64_t row, NonzeroList& list) {
  int size = 0;
  for (int base = 0; base < problem.col_tiles; base += 32) {
    const int tile = base + lane_id();
    const uint32_t* words = twell_reader::tile_words(problem, row, tile);
    // One load brings the count and the first three non-zeros.
    const uint4 head = tile < problem.col_tiles ? *reinterpret_cast<const uint4*>(words) : uint4{};
    const int count = static_cast<int>(head.x);
    const bool spilled = twell_reader::is_spilled(problem, count);
    int total;
    int at = size + warp_prefix(count, total);
    if (!spilled) {
      for (int i = 0; i < count; ++i) {
        const uint32_t word = i == 0 ? head.y : i == 1 ? head.z : i == 2 ? head.w : words[i + 1];
        list.set(at + i, twell_reader::neuron(word, tile), twell_reader::bf16_bits(word));
      }
    }
    for (uint32_t left = __ballot_sync(~0u, spilled); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const uint32_t slot = __shfl_sync(~0u, head.y, from);
      const int begin = __shfl_sync(~0u, at, from);
      const uint4 eight = *reinterpret_cast<const uint4*>(
          twell_reader::spilled_values(problem, slot) + lane_id() * 8);
      uint16_t values[8];
      *reinterpret_cast<uint4*>(values) = eight;
      append_dense(values, (base + from) * 256, begin, list);
    }
    size += total;
  }
  __syncwarp();
  return size;
}

// Lists the non-zeros of a quarter of one (row, tile), at most kListed; returns their number.
__device__ int list_quarter(const Problem& problem, int64_t row, int tile, int quarter,
                            NonzeroList& list) {
  const uint32_t* words = twell_reader::tile_words(problem, row, tile);
  const int count = static_cast<int>(words[0]);
  int size;
  if (!twell_reader::is_spilled(problem, count)) {
    const int begin = count * quarter / 4, end = count * (quarter + 1) / 4;
    for (int i = begin + lane_id(); i < end; i += 32) {
      const uint32_t word = words[i + 1];
      list.set(i - begin, twell_reader::neuron(word, tile), twell_reader::bf16_bits(word));
    }
    size = end - begin;
  } else {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(
        twell_reader::spilled_values(problem, words[1]) + quarter * 64 + lane_id() * 2);
    const uint16_t values[2] = {static_cast<uint16_t>(two), static_cast<uint16_t>(two >> 16)};
    size = append_dense(values, tile * 256 + quarter * 64, 0, list);
  }
  __syncwarp();
  return size;
}

// Up to Pieces * 256 consecutive values of a row: piece i of a lane is 8 values at (i * 32 + lane)
// * 8.
template <int Pieces>
struct RowPiece {
  uint4 part[Pieces];

  // Loads them, zeros from `columns` on. They are read once, so they bypass the L1.
  __device__ __forceinline__ void load(const __nv_bfloat16* from, int columns) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int at = (i * 32 + lane_id()) * 8;
      part[i] = at < columns ? __ldcs(reinterpret_cast<const uint4*>(from + at)) : uint4{};
    }
  }
  // This lane's part of the dot product.
  __device__ __forceinline__ float dot(const RowPiece& other) const {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const uint32_t a[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
      const uint32_t b[4] = {other.part[i].x, other.part[i].y, other.part[i].z, other.part[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        even = fmaf(low_half(a[j]), low_half(b[j]), even);
        odd = fmaf(high_half(a[j]), high_half(b[j]), odd);
      }
    }
    return even + odd;
  }
  __device__ __forceinline__ void add_to(float (&acc)[Pieces][8], float factor) const {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const uint32_t a[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc[i][2 * j] = fmaf(factor, low_half(a[j]), acc[i][2 * j]);
        acc[i][2 * j + 1] = fmaf(factor, high_half(a[j]), acc[i][2 * j + 1]);
      }
    }
  }
};

// The weight rows of a list of non-zeros, in order of use: rows of w_up, a chunk of columns at a
// time, then one chunk of rows of w_down. They are loaded Depth rows ahead, also across the change
// from w_up to w_down, into a ring buffer in shared memory, since registers would not hold them.
// Each lane loads what it reads itself, so no synchronisation is needed.
template <int Pieces, int Depth>
class WeightRows {
 public:
  static constexpr int kRowBytes = Pieces * 32 * 16;
  static constexpr int kRingBytes = Depth * kRowBytes;  // per warp

  // begin: first column of the chunk of w_down.
  __device__ __forceinline__ WeightRows(const Problem& problem, const NonzeroList& list, int size,
                                        int begin, uint8_t* ring)
      : problem_(problem),
        list_(list),
        size_(size),
        begin_(begin),
        up_chunks_(problem.w_up != nullptr ? problem.chunks : 0),
        ring_(ring + lane_id() * 16) {
#pragma unroll
    for (int i = 0; i < Depth; ++i) request(i);
  }

  __device__ __forceinline__ RowPiece<Pieces> take() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Depth - 1) : "memory");
    RowPiece<Pieces> row;
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      row.part[i] = *reinterpret_cast<const uint4*>(ring_ + slot_ * kRowBytes + i * 512);
    }
    request(slot_);
    slot_ = (slot_ + 1) % Depth;
    return row;
  }

 private:
  __device__ __forceinline__ void request(int slot) {
    if (chunk_ <= up_chunks_) {
      const bool up = chunk_ < up_chunks_;
      const int first = up ? chunk_ * kChunk : begin_;
      const __nv_bfloat16* row = (up ? problem_.w_up : problem_.w_down) +
                                 int64_t{list_.neuron[next_]} * problem_.width + first;
      const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(ring_)) + slot * kRowBytes;
#pragma unroll
      for (int i = 0; i < Pieces; ++i) {
        const int at = (i * 32 + lane_id()) * 8;
        const int bytes = first + at < problem_.width ? 16 : 0;  // 0: zeros
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 512),
                     "l"(bytes > 0 ? row + at : row), "r"(bytes)
                     : "memory");
      }
      if (++next_ == size_) {
        next_ = 0;
        ++chunk_;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  const Problem& problem_;
  const NonzeroList& list_;
  int size_, begin_, up_chunks_;
  uint8_t* ring_;
  int slot_ = 0, next_ = 0, chunk_ = 0;  // of the next row to load
};

// acc += h times columns [begin, begin + Pieces * 256) of w_down, for the list's `size` > 0
// non-zeros; h = f(g) * (x w_up^T) in f32, rounded once to bf16. x: the first chunk of the row's.
template <int Pieces, int Depth>
__device__ __forceinline__ void multiply_list(const Problem& problem, RowPiece<Pieces>& x,
                                              int64_t row, NonzeroList& list, int size, int begin,
                                              uint8_t* ring, float (&acc)[Pieces][8]) {
  WeightRows<Pieces, Depth> rows(problem, list, size, begin, ring);
  if (problem.w_up != nullptr || problem.squared) {
    // Lane l holds those of non-zeros l and l + 32.
    float up_low = problem.w_up != nullptr ? 0.0f : 1.0f, up_high = up_low;
    for (int first = 0; first < problem.width && problem.w_up != nullptr; first += kChunk) {
      if (first > 0) x.load(problem.x + row * problem.width + first, problem.width - first);
      for (int i = 0; i < size; ++i) {
        const float sum = warp_sum(rows.take().dot(x));
        up_low += i == lane_id() ? sum : 0.0f;
        up_high += i == lane_id() + 32 ? sum : 0.0f;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = half * 32 + lane_id();
      const float g = i < size ? list.value[i] : 0.0f;
      const float u = gpu::relu_if(problem.up_relu, half == 0 ? up_low : up_high);
      const float h = (problem.squared ? g * g : g) * u;
      if (i < size) list.value[i] = __bfloat162float(__float2bfloat16(h));
    }
    __syncwarp();
  }
  for (int i = 0; i < size; ++i) rows.take().add_to(acc, list.value[i]);
}

// Stores columns [begin, begin + Pieces * 256) of a row of y, eight at a time.
template <int Pieces>
__device__ __forceinline__ void store_row(const Problem& problem, int64_t row, int begin,
                                          const float (&acc)[Pieces][8]) {
#pragma unroll
  for (int i = 0; i < Pieces; ++i) {
    const int at = begin + (i * 32 + lane_id()) * 8;
    if (at >= problem.width) continue;
    auto* to = reinterpret_cast<uint4*>(problem.y + row * problem.width + at);
    uint4 packed{};
    if (problem.add) packed = *to;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 before = problem.add ? __bfloat1622float2(pairs[j]) : float2{};
      pairs[j] = __floats2bfloat162_rn(before.x + acc[i][2 * j], before.y + acc[i][2 * j + 1]);
    }
    __stcs(to, packed);
  }
}

constexpr int kLightWarps = 4;
// On 12.0 ptxas 13.0 would spill by its own choice of registers (0), which is best on other GPUs.
#if __CUDA_ARCH__ >= 1200
constexpr int kLeastLightCtas = 1;
#else
constexpr int kLeastLightCtas = 0;
#endif
constexpr int kHeavyWarps = 8;
// Weight rows loaded ahead. At D = 2048 the ring buffers take 48 and 64 KiB per CTA.
constexpr int kLightDepth = 3;
constexpr int kHeavyDepth = 2;
constexpr int kQuarters = 4;  // a quarter of a tile is the unit of work of a heavy row

// One warp per (row, chunk of columns).
template <int Pieces>
__global__ void __launch_bounds__(kLightWarps * 32, kLeastLightCtas)
    light_rows_kernel(const Problem problem) {
  extern __shared__ __align__(16) uint8_t rings[];
  __shared__ NonzeroList lists[kLightWarps];
  const int64_t row = int64_t{blockIdx.x} * kLightWarps + threadIdx.x / 32;
  const int chunk = blockIdx.y;
  if (row >= problem.rows) return;
  const int nnz = problem.row_nnz[row];
  if (nnz > kListed) {
    if (chunk == 0 && lane_id() == 0) {
      problem.heavy_rows[atomicAdd(&problem.counters->heavy_rows, 1)] = static_cast<int32_t>(row);
    }
    return;
  }
  if (nnz == 0 && problem.add) return;
  float acc[Pieces][8] = {};
  if (nnz > 0) {
    RowPiece<Pieces> x;
    if (problem.w_up != nullptr) x.load(problem.x + row * problem.width, problem.width);
    NonzeroList& list = lists[threadIdx.x / 32];
    const int size = list_row(problem, row, list);
    uint8_t* ring = rings + threadIdx.x / 32 * WeightRows<Pieces, kLightDepth>::kRingBytes;
    multiply_list<Pieces, kLightDepth>(problem, x, row, list, size, chunk * kChunk, ring, acc);
  }
  store_row(problem, row, chunk * kChunk, acc);
}

// Adds the warps' accumulators into warp 0's in a fixed order, halving the number of warps.
template <int Pieces>
__device__ void reduce_warps(float (&acc)[Pieces][8], float* shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int half = kHeavyWarps / 2; half > 0; half /= 2) {
    float4* slot = reinterpret_cast<float4*>(shared) + (warp % half) * Pieces * 64 + lane_id();
    __syncthreads();
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < Pieces * 2; ++i) {
        const float* a = &acc[i / 2][i % 2 * 4];
        slot[i * 32] = make_float4(a[0], a[1], a[2], a[3]);
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < Pieces * 2; ++i) {
        const float4 v = slot[i * 32];
        float* a = &acc[i / 2][i % 2 * 4];
        a[0] += v.x;
        a[1] += v.y;
        a[2] += v.z;
        a[3] += v.w;
      }
    }
  }
}

// Writes this part's sums; the last part to finish also writes the row of y.
template <int Pieces>
__device__ void finish_part(const Problem& problem, int64_t row, int heavy, int chunk, int part,
                            int parts, float (&acc)[Pieces][8]) {
  __shared__ bool last;
  const int begin = chunk * kChunk;
  float* partials = problem.partials + int64_t{heavy} * parts * problem.width;
  if (threadIdx.x < 32) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int at = begin + (i * 32 + lane_id()) * 8;
      if (at >= problem.width) continue;
      auto* to = reinterpret_cast<float4*>(partials + int64_t{part} * problem.width + at);
      to[0] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      to[1] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      int32_t* done = problem.parts_done + int64_t{heavy} * problem.chunks + chunk;
      last = atomicAdd(done, 1) == parts - 1;
      if (last) *done = 0;  // for the next call
      __threadfence();
    }
  }
  __syncthreads();
  if (!last) return;
  const int end = min(problem.width, begin + Pieces * 256);
  for (int at = begin + threadIdx.x * 4; at < end; at += kHeavyWarps * 32 * 4) {
    auto* to = reinterpret_cast<__nv_bfloat162*>(problem.y + row * problem.width + at);
    float4 sum{};
    if (problem.add) {
      const float2 low = __bfloat1622float2(to[0]), high = __bfloat1622float2(to[1]);
      sum = {low.x, low.y, high.x, high.y};
    }
    for (int i = 0; i < parts; ++i) {
      const float4 v =
          __ldcg(reinterpret_cast<const float4*>(partials + int64_t{i} * problem.width + at));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    to[0] = __floats2bfloat162_rn(sum.x, sum.y);
    to[1] = __floats2bfloat162_rn(sum.z, sum.w);
  }
}

// Adds the counts of this CTA's share of the rows to the layer's.
__device__ void count_rows(const Problem& problem) {
  unsigned long long sum = 0;
  int most = 0;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < problem.rows;
       row += int64_t{gridDim.x} * blockDim.x) {
    sum += static_cast<unsigned long long>(problem.row_nnz[row]);
    most = max(most, problem.row_nnz[row]);
  }
  sum = warp_sum(sum);
  most = __reduce_max_sync(~0u, most);
  if (lane_id() == 0 && most > 0) {
    atomicAdd(&problem.activity->nnz, sum);
    atomicMax(&problem.activity->max_row_nnz, static_cast<unsigned long long>(most));
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&problem.activity->tokens, static_cast<unsigned long long>(problem.rows));
  }
}

// One CTA per (heavy row, part, chunk); its warps take quarters of tiles round-robin.
template <int Pieces>
__global__ void __launch_bounds__(kHeavyWarps * 32) heavy_rows_kernel(const Problem problem) {
  __shared__ NonzeroList lists[kHeavyWarps];
  extern __shared__ __align__(16) uint8_t rings[];  // later the buffer of reduce_warps
  using Rows = WeightRows<Pieces, kHeavyDepth>;
  static_assert(kHeavyWarps * Rows::kRingBytes >= kHeavyWarps / 2 * Pieces * 1024);
  if (problem.activity != nullptr) count_rows(problem);
  const int count = problem.counters->heavy_rows;
  const int warp = threadIdx.x / 32;
  const int units = problem.col_tiles * kQuarters;
  int parts = 1;
  if (count > 0 && count < kSplitTarget) {
    parts = min(min((kSplitTarget + count - 1) / count, kMaxParts),
                (units + kHeavyWarps - 1) / kHeavyWarps);
  }
  const int64_t items = int64_t{count} * parts * problem.chunks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int chunk = static_cast<int>(item % problem.chunks);
    const int part = static_cast<int>(item / problem.chunks % parts);
    const int heavy = static_cast<int>(item / problem.chunks / parts);
    const int64_t row = problem.heavy_rows[heavy];
    NonzeroList& list = lists[warp];
    float acc[Pieces][8] = {};
    for (int unit = part * kHeavyWarps + warp; unit < units; unit += parts * kHeavyWarps) {
      const int size = list_quarter(problem, row, unit / kQuarters, unit % kQuarters, list);
      if (size > 0) {
        RowPiece<Pieces> x;
        if (problem.w_up != nullptr) x.load(problem.x + row * problem.width, problem.width);
        multiply_list<Pieces, kHeavyDepth>(problem, x, row, list, size, chunk * kChunk,
                                           rings + warp * Rows::kRingBytes, acc);
      }
      __syncwarp();  // before the list is overwritten
    }
    reduce_warps(acc, reinterpret_cast<float*>(rings));
    if (parts > 1) {
      finish_part(problem, row, heavy, chunk, part, parts, acc);
    } else if (warp == 0) {
      store_row(problem, row, chunk * kChunk, acc);
    }
    __syncthreads();
  }
  // The last CTA clears the list for the next call, when no CTA reads the count any more.
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&problem.counters->ctas_done, 1) == static_cast<int>(gridDim.x) - 1) {
      problem.counters->heavy_rows = 0;
      problem.counters->ctas_done = 0;
    }
  }
}

template <typename Launch>
cudaError_t dispatch(int width, const Launch& launch) {
  if (width <= 256) return launch(std::integral_constant<int, 1>());
  if (width <= 512) return launch(std::integral_constant<int, 2>());
  if (width <= 1024) return launch(std::integral_constant<int, 4>());
  return launch(std::integral_constant<int, 8>());
}
static_assert(kChunk == 8 * 256);

cudaError_t launch_light_rows(const Problem& problem, cudaStream_t stream) {
  return dispatch(problem.width, [&](auto pieces) {
    const dim3 grid(static_cast<unsigned>((problem.rows + kLightWarps - 1) / kLightWarps),
                    static_cast<unsigned>(problem.chunks));
    constexpr int kPieces = decltype(pieces)::value;
    constexpr int kShared = kLightWarps * WeightRows<kPieces, kLightDepth>::kRingBytes;
    const cudaError_t status = cudaFuncSetAttribute(
        light_rows_kernel<kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    light_rows_kernel<kPieces><<<grid, kLightWarps * 32, kShared, stream>>>(problem);
    return cudaGetLastError();
  });
}

cudaError_t launch_heavy_rows(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  return dispatch(problem.width, [&](auto pieces) {
    constexpr int kPieces = decltype(pieces)::value;
    constexpr int kShared = kHeavyWarps * WeightRows<kPieces, kHeavyDepth>::kRingBytes;
    const cudaError_t status = cudaFuncSetAttribute(
        heavy_rows_kernel<kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    heavy_rows_kernel<kPieces><<<2 * multiprocessors, kHeavyWarps * 32, kShared, stream>>>(problem);
    return cudaGetLastError();
  });
}

constexpr int64_t kCounterWords = sizeof(Counters) / sizeof(int32_t);

int64_t chunk_count(int64_t width) { return (width + kChunk - 1) / kChunk; }

}  // namespace
}  // namespace row_fused

using row_fused::chunk_count;
using row_fused::kCounterWords;

RowFusedWorkspace::RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width)
    : max_tokens_(max_tokens),
      max_width_(max_width),
      heavy_rows_(max_tokens),
      counters_(kCounterWords + row_fused::kSplitTarget * chunk_count(max_width)),
      partials_(row_fused::kMaxPartials * max_width) {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(counters_.data(), 0, static_cast<size_t>(counters_.bytes()), ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
}

void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace) {
  check_packed_ffn(ctx, problem.tokens, problem.width, problem.ffn, problem.gate,
                   /*portable=*/true);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens_ && problem.width <= workspace.max_width_,
              "row-fused: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.width,
              workspace.max_tokens_, workspace.max_width_);
  if (problem.tokens == 0) return;
  const TwellPacked& packed = problem.gate;
  int32_t* counters = workspace.counters_.data();
  const row_fused::Problem kernels{packed.words,
                                   reinterpret_cast<const uint16_t*>(packed.spill),
                                   packed.row_nnz,
                                   problem.tokens,
                                   static_cast<int>(packed.shape.tiles()),
                                   packed.shape.slots(),
                                   problem.x,
                                   problem.w_up,
                                   problem.w_down,
                                   problem.y,
                                   static_cast<int>(problem.width),
                                   static_cast<int>(chunk_count(problem.width)),
                                   workspace.heavy_rows_.data(),
                                   reinterpret_cast<row_fused::Counters*>(counters),
                                   counters + kCounterWords,
                                   workspace.partials_.data(),
                                   problem.squared,
                                   problem.up_relu,
                                   problem.add,
                                   problem.activity};
  TWELL_CUDA_CHECK(row_fused::launch_light_rows(kernels, ctx.stream()));
  TWELL_CUDA_CHECK(row_fused::launch_heavy_rows(kernels, ctx.multiprocessors(), ctx.stream()));
}

}  // namespace twell
