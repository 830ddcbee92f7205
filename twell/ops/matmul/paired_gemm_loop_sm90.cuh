// SPDX-License-Identifier: Apache-2.0
// Building blocks of GEMMs a [M, K] b [N, K]^T on paired CTAs for Hopper. Persistent; clusters of
// two CTAs, each CTA computes an output tile of 128 rows by 256 columns; the two CTAs of a cluster
// share their columns and each load half of b's tile, multicast to both.
//   warpgroup 0     one thread fills a ring buffer of kStages k-steps with TMA
//   warpgroups 1,2  64 rows each: WGMMA, and between k-steps the last tile's epilogue
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "twell/base/error.h"
#include "twell/base/rounding.h"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/wgmma.cuh"

namespace twell::paired_gemm {

inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;  // 128 bytes, the widest swizzle
inline constexpr int kCluster = 2;
inline constexpr int kStages = 4;  // 4 x 48 KiB of the 227 KiB a CTA can have
inline constexpr int kThreads = 384;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr uint32_t kBytesA = kTileM * kTileK * 2;
inline constexpr uint32_t kBytesB = kTileN * kTileK * 2;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// Ring buffer, its 2 * kStages barriers, and slack to align it to the 1024-byte swizzle atom.
inline constexpr uint32_t kRingBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;

// Cluster tiles in the order they are taken: sweeps over N within a group of row tiles, so that
// concurrent tiles share few rows of a and few rows of b.
struct TileOrder {
  int m_pairs, n_tiles, group;
  __host__ __device__ int count() const { return m_pairs * n_tiles; }
  __device__ int m_pair(int index) const {
    const int first = first_of(index), rows = rows_from(first);
    return first + index % per_group() % rows;
  }
  __device__ int n_tile(int index) const {
    const int rows = rows_from(first_of(index));
    return index % per_group() / rows;
  }

 private:
  __device__ int per_group() const { return group * n_tiles; }
  __device__ int first_of(int index) const { return index / per_group() * group; }
  __device__ int rows_from(int first) const { return min(group, m_pairs - first); }
};

// What a cluster computes at a time: a tile of 256 rows by 256 columns, or half a tile.
struct Unit {
  int row;  // first row of this CTA
  int n_tile;
  bool half;
};

// Units in the order in which clusters take them: whole tiles, then halves. Where there are halves,
// a cluster has at most one.
struct UnitOrder {
  TileOrder tiles;
  int whole;  // tiles computed whole; later ones are cut in two
  __device__ int count() const { return whole + 2 * (tiles.count() - whole); }
  __device__ Unit locate(int index, uint32_t rank) const {
    const bool half = index >= whole;
    const int tile = half ? whole + (index - whole) / 2 : index;
    const int row = tiles.m_pair(tile) * (kCluster * kTileM) +
                    (half ? (index - whole) % 2 * kTileM + rank * (kTileM / 2) : rank * kTileM);
    return {row, tiles.n_tile(tile), half};
  }
};

// Groups of 8 row tiles of 256 by 8 column tiles of 256 are about what 66 clusters run at one time:
// 8 MiB of each at a width of 2,048 bf16, well within the L2.
inline constexpr int kGroup = 8;

struct Schedule {
  UnitOrder order;
  int clusters;  // to launch

  Schedule(int multiprocessors, int64_t rows, int64_t columns) {
    const TileOrder tiles{static_cast<int>(ceil_div(rows, kTileM * kCluster)),
                          static_cast<int>(ceil_div(columns, kTileN)), kGroup};
    // If the last round has tiles for at most half of the clusters, they are cut in two and take
    // half as long.
    const int count = tiles.count(), most = multiprocessors / kCluster;
    const int rest = count % most;
    order = {tiles, 2 * rest <= most ? count - rest : count};
    clusters = std::min(most, order.whole + 2 * (count - order.whole));
  }
};

struct Ring {
  uint32_t stages;       // of a's and b's tiles
  uint32_t gap;          // the caller's bytes, 1024-byte aligned
  uint32_t full, empty;  // barriers of the stages

  // In dynamic shared memory of kRingBytes + gap_bytes, a multiple of 8.
  __device__ explicit Ring(void* memory, uint32_t gap_bytes = 0) {
    stages = (gpu::smem_address(memory) + 1023) & ~1023u;
    gap = stages + kStages * kStageBytes;
    full = gap + gap_bytes;
    empty = full + kStages * 8;
  }
  // Called by one thread; cluster_sync must follow.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      gpu::barrier_init(full + stage * 8, 1);
      gpu::barrier_init(empty + stage * 8, kConsumers * kCluster);
    }
    gpu::fence_barrier_init();
  }
};

// The thread that fills the ring buffer, across tiles.
struct Producer {
  const Ring& ring;
  const uint32_t rank;                    // of the CTA in its cluster
  gpu::RingCursor<kStages> cursor{0, 1};  // a new ring buffer is empty

  // Loads all k-steps of a tile: map_a's rows from `row` on, `bytes` of a and b together per
  // k-step of StepColumns columns (128 bytes). k_steps must be the kernel's own parameter: for a
  // copy the compiler unrolls the loop.
  template <int StepColumns = kTileK>
  __device__ __forceinline__ void load(const CUtensorMap& map_a, int row, const CUtensorMap& map_b,
                                       int n_tile, const int& k_steps,
                                       uint32_t bytes = kStageBytes) {
    using namespace gpu;
    const int column = n_tile * kTileN + rank * (kTileN / kCluster);
    for (int k = 0; k < k_steps; ++k, cursor.advance()) {
      const uint32_t a = ring.stages + cursor.stage * kStageBytes;
      const uint32_t b = a + kBytesA + rank * (kBytesB / kCluster);
      const uint32_t landed = ring.full + cursor.stage * 8;
      barrier_wait(ring.empty + cursor.stage * 8, cursor.parity);
      barrier_arrive_expect(landed, bytes);
      tensor_load(a, &map_a, k * StepColumns, row, landed);
      tensor_load_multicast(b, &map_b, k * StepColumns, column, landed, (1 << kCluster) - 1);
    }
  }
};

// Columns of a k-step of 128 bytes: of bf16, or of e4m3 bytes.
template <bool kBytes>
inline constexpr int kStepColumns = kBytes ? 2 * kTileK : kTileK;

// 64 rows by N columns.
template <int N, bool kBytes = false>
__device__ __forceinline__ void multiply_step(float (&acc)[128], uint32_t a, uint32_t b,
                                              bool accumulate) {
  using namespace gpu;
  const uint64_t operand_a = k_major_operand(a), operand_b = k_major_operand(b);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {  // 32 bytes each
    if constexpr (kBytes) {
      wgmma_e4m3<N>(acc, operand_a + k * 2, operand_b + k * 2, accumulate || k > 0);
    } else {
      wgmma<N, false>(acc, operand_a + k * 2, operand_b + k * 2, accumulate || k > 0);
    }
  }
  wgmma_commit();
}

// Scales of the rows of both operands of a product in 8 bits, in device memory.
struct ScalesOfRows {
  const float* a;  // [M]
  const float* b;  // [N], N a multiple of 8, 16-byte aligned
  int rows;        // M
  int columns;     // N

  // Returns 0 past the last row, where nothing is used.
  __device__ __forceinline__ float of_row(int row) const {
    return row < rows ? __ldg(a + row) : 0.0f;
  }
};

// The scales of the columns of output tiles, in shared memory. They arrive with a tile's first
// k-step, so that no warp waits for device memory between two tiles. The producer is at most
// kStages tiles ahead, with one k-step per tile, so there are places for one tile more.
class ColumnScales {
  static constexpr int kTiles = kStages + 1;
  static constexpr uint32_t kTileBytes = kTileN * sizeof(float);

 public:
  static constexpr uint32_t kBytes = kTiles * kTileBytes;

  __device__ __forceinline__ explicit ColumnScales(uint32_t shared) : first_(shared) {}
  // The producer requests those of a tile before it loads the tile.
  __device__ __forceinline__ void request(const Producer& producer, const ScalesOfRows& scales,
                                          int n_tile) {
    using namespace gpu;
    const int column = n_tile * kTileN, stage = producer.cursor.stage;
    const uint32_t bytes = min(scales.columns - column, kTileN) * sizeof(float);
    const uint32_t landed = producer.ring.full + stage * 8;
    barrier_wait(producer.ring.empty + stage * 8, producer.cursor.parity);
    barrier_expect(landed, bytes);
    bulk_load(place(), scales.b + column, bytes, landed);
    advance();
  }
  // Returns those of two columns of a consumer's tile from an even one on. Past the last column
  // they are any value.
  __device__ __forceinline__ float2 of_columns(int column_of_tile) const {
    float2 scale;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(scale.x), "=f"(scale.y)
                 : "r"(place() + column_of_tile * 4)
                 : "memory");
    return scale;
  }
  __device__ __forceinline__ void advance() { tile_ = tile_ + 1 == kTiles ? 0 : tile_ + 1; }

 private:
  __device__ __forceinline__ uint32_t place() const { return first_ + tile_ * kTileBytes; }

  uint32_t first_;
  int tile_ = 0;
};

// Throws if TMA cannot read them; null is allowed.
inline void check_column_scales(const float* scales) {
  TWELL_CHECK(reinterpret_cast<uintptr_t>(scales) % 16 == 0,
              "scales of a weight at {}, which is no multiple of 16 bytes",
              static_cast<const void*>(scales));
}

// Called by a consumer warpgroup: one thread tells both CTAs, because both fill this CTA's stages.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  const int thread = threadIdx.x % 128;
  if (thread < kCluster) gpu::barrier_arrive_cluster(ring.empty + stage * 8, thread);
}

struct NoRole {
  __device__ void operator()() const {}
};

// The body of a kernel of kThreads threads, after the first cluster_sync: one thread produces, two
// warpgroups run consume(warpgroup), and one more thread runs `beside`.
template <typename Produce, typename Consume, typename Beside = NoRole>
__device__ __forceinline__ void run_roles(const Produce& produce, const Consume& consume,
                                          const Beside& beside = {}) {
  using namespace gpu;
  const int role = threadIdx.x / 128;
  if (role == 0) {
    registers_decrease<24>();
    if (threadIdx.x == 0) produce();
    if (threadIdx.x == 32) beside();
  } else {
    registers_increase<240>();
    consume(role - 1);
  }
  __syncwarp();
  cluster_sync();  // no CTA leaves while the other may still signal its barriers
}

}  // namespace twell::paired_gemm
