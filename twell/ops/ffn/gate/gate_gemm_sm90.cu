// SPDX-License-Identifier: Apache-2.0
// The gate GEMM for Hopper, g = relu(x w_gate^T), with an epilogue that packs g into TwELL. The
// GEMM's tiles of 256 neurons are TwELL's tiles (main loop: paired_gemm_loop_sm90.cuh).
// Packing is deferred: a tile's activations wait as bf16 pairs in 64 registers and are packed in
// steps between the next tile's first k-steps, so that its integer work runs while the tensor cores
// are busy. Where less than half of the clusters would have a tile in the last round, each tile of
// that round is cut in two, of 64 tokens per CTA, and each warpgroup computes half of the neurons.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/store_matrices.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/matmul/paired_gemm_loop_sm90.cuh"

namespace twell {
namespace gate_gemm {
namespace {

using paired_gemm::kCluster;
using paired_gemm::kTileK;
using paired_gemm::kTileM;
using paired_gemm::kTileN;  // the TwELL tile

// Output: a TwellPacked with T = 256, with derived sizes that save divisions in the kernel.
struct PackTarget {
  uint32_t* words;   // [M, tiles, slots]
  uint32_t* spill;   // [M * tiles, 128] pairs of bf16
  int32_t* row_nnz;  // [M]
  int tokens;        // M
  int ffn;           // F
  int tiles;
  int slots;  // words per tile
};

struct Params {
  CUtensorMap map_x;       // [M, D], boxes of kTileM rows
  CUtensorMap map_x_half;  // the same, boxes of kTileM / 2 rows
  CUtensorMap map_w;       // [F, D], boxes of kTileN / kCluster rows
  PackTarget out;
  int k_steps;  // ceil(D / kTileK)
  paired_gemm::UnitOrder order;
  const int32_t* condition;          // the kernel runs unless this holds 0; null: it runs
  int32_t* packed;                   // GateProgress::words
  uint32_t cut;                      // of FATReLU
  paired_gemm::ScalesOfRows scales;  // of operands in 8 bits
};

// Packs one WGMMA accumulator tile, 64 tokens by 256 neurons per warpgroup, into TwELL: from
// registers in steps behind the next tile's GEMM, or through shared memory where no tile follows.
// In registers the 256 columns of a row are spread over the 4 lanes of a quad. Lane t of the quad
// writes its non-zeros after those of lanes 0 .. t-1.

using gpu::opaque;
using gpu::relu_bf16x2;

// Bytes of a row of 256 bf16 in shared memory. Its 16-byte pieces are XORed with the row, so that
// neither writing nor reading has bank conflicts.
constexpr uint32_t kStagedRowBytes = kTileN * 2;
constexpr int kGroupPairs = 4;  // pairs of each row that one packing step stores

// Which halves of a lane's 32 pairs of a row are not zero. The lower half of pair i is bit i % 16
// and its upper half bit 16 + i % 16, of `first` for i < 16, else of `second`.
struct NonzeroMask {
  uint32_t first, second;

  __device__ __forceinline__ explicit NonzeroMask(const uint32_t (&pairs)[32])
      : first(of_16(pairs)), second(of_16(pairs + 16)) {}
  __device__ __forceinline__ uint32_t count() const { return __popc(first) + __popc(second); }
  // Bit i: pair i has a non-zero.
  __device__ __forceinline__ uint32_t pairs() const {
    return __byte_perm(first | first >> 16, second | second >> 16, 0x5410);
  }

 private:
  __device__ __forceinline__ static uint32_t of_16(const uint32_t* pairs) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 15; i >= 0; --i) mask = mask + mask + __vminu2(opaque(pairs[i]), 0x00010001u);
    return mask;
  }
};

// Stores `word` at base + at and advances `at` if the half of `pair` in `word` is not zero.
// Predicated rather than branched: divergence costs more than the few instructions it skips.
template <bool UpperHalf>
__device__ __forceinline__ void append(uint32_t* base, uint32_t& at, uint32_t pair, uint32_t word) {
  if constexpr (UpperHalf) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 to;\nsetp.gt.u32 p, %1, 0xffff;\n"
        "cvt.u64.u32 to, %0;\nadd.u64 to, to, %3;\n"
        "@p st.global.b32 [to], %2;\n@p add.u32 %0, %0, 4;\n}\n"
        : "+r"(at)
        : "r"(pair), "r"(word), "l"(base)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 to;\n.reg .b32 half;\n"
        "and.b32 half, %1, 0xffff;\nsetp.ne.b32 p, half, 0;\n"
        "cvt.u64.u32 to, %0;\nadd.u64 to, to, %3;\n"
        "@p st.global.b32 [to], %2;\n@p add.u32 %0, %0, 4;\n}\n"
        : "+r"(at)
        : "r"(pair), "r"(word), "l"(base)
        : "memory");
  }
}

// The activations of a tile as bf16 pairs, between the end of its GEMM and their packing.
class PackedTile {
 public:
  // The tile has N columns.
  template <int N>
  __device__ __forceinline__ void take(const float (&acc)[128], uint32_t cut) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      upper_[i] = relu_bf16x2(acc[4 * i], acc[4 * i + 1]);
      lower_[i] = relu_bf16x2(acc[4 * i + 2], acc[4 * i + 3]);
    }
    clear_up_to<N>(cut);
  }

  // The same of a product in 8 bits: the scales of this lane's rows, and of the tile's columns, of
  // which it has N from `first_column` on.
  template <int N>
  __device__ __forceinline__ void take_scaled(const float (&acc)[128], uint32_t cut, float upper,
                                              float lower, const paired_gemm::ColumnScales& columns,
                                              int first_column) {
    const int column = first_column + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 scale = columns.of_columns(column + 8 * i);
      upper_[i] = relu_bf16x2(acc[4 * i] * (upper * scale.x), acc[4 * i + 1] * (upper * scale.y));
      lower_[i] =
          relu_bf16x2(acc[4 * i + 2] * (lower * scale.x), acc[4 * i + 3] * (lower * scale.y));
    }
    clear_up_to<N>(cut);
  }

  // Starts packing 64 rows from first_row on and 256 columns, in up to 10 steps, each short enough
  // to hide behind one k-step of the next tile: count, find places, then one step per group of
  // pairs that are not all zeros.
  __device__ __forceinline__ void begin(int first_row, int tile_index) {
    row_ = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    tile_ = tile_index;
    next_ = Step::kCount;
    pairs_ = ~0u;
  }
  __device__ __forceinline__ bool done() const { return pairs_ == 0; }
  // Runs the next step; does nothing once all are done.
  __device__ __forceinline__ void advance(const PackTarget& out) {
    if (pairs_ == 0) return;
    if (next_ == Step::kCount) {
      clear_outside(out);
      count();
      next_ = Step::kPlace;
      return;
    }
    if (next_ == Step::kPlace) {
      place(out);
      next_ = Step::kStore;
      return;
    }
    const int group = (__ffs(pairs_) - 1) / kGroupPairs;
    pairs_ &= ~(((1u << kGroupPairs) - 1) << group * kGroupPairs);
    switch (group) {
      case 0:
        store<0>();
        break;
      case 1:
        store<1>();
        break;
      case 2:
        store<2>();
        break;
      case 3:
        store<3>();
        break;
      case 4:
        store<4>();
        break;
      case 5:
        store<5>();
        break;
      case 6:
        store<6>();
        break;
      case 7:
        store<7>();
        break;
      default:
        break;
    }
  }

  // Writes N columns of 64 rows, starting at column N * part, to shared memory, where pack_row
  // reads them.
  template <int N>
  __device__ __forceinline__ void stage(uint32_t staged, int part) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t to = staged + row * kStagedRowBytes + part * (N * 2);
    const uint32_t swizzle = (lane / 16) ^ (row % 8);
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
      gpu::store_matrices(to + i / 8 * 128 + ((i % 8) ^ swizzle) * 16, upper_[i], lower_[i],
                          upper_[i + 1], lower_[i + 1]);
    }
  }

 private:
  enum class Step { kCount, kPlace, kStore };

  // FATReLU makes values up to its threshold 0.
  template <int N>
  __device__ __forceinline__ void clear_up_to(uint32_t cut) {
    if (cut == 0) return;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      upper_[i] = gpu::above(upper_[i], cut);
      lower_[i] = gpu::above(lower_[i], cut);
    }
  }

  // TMA reads rows past the last token and past the last neuron as zeros, whose products with Inf
  // or NaN are NaN. Such values must not be stored, because the output has no place for them. Whole
  // warps take each branch, and only in the last tiles.
  __device__ __forceinline__ void clear_outside(const PackTarget& out) {
    if (__any_sync(~0u, row_ + 8 >= out.tokens)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (row_ >= out.tokens) upper_[i] = 0;
        if (row_ + 8 >= out.tokens) lower_[i] = 0;
      }
    }
    const int columns = out.ffn - tile_ * kTileN;
    if (columns < kTileN) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (8 * i >= columns) upper_[i] = lower_[i] = 0;
      }
    }
  }

  __device__ __forceinline__ void count() {
    const NonzeroMask upper(upper_), lower(lower_);
    counts_ = upper.count() | lower.count() << 16;
    lane_pairs_ = upper.pairs() | lower.pairs();
  }

  // Writes the rows' counts, finds this lane's places within the quad and the pairs in which any
  // lane has a non-zero, and spills rows that overflow. Every lane of the warp calls it.
  __device__ __forceinline__ void place(const PackTarget& out) {
    const int lane_in_quad = threadIdx.x % 4;
    uint32_t through = counts_;  // inclusive prefix sums over the quad
    const uint32_t one_back = __shfl_up_sync(~0u, through, 1, 4);
    if (lane_in_quad >= 1) through += one_back;
    const uint32_t two_back = __shfl_up_sync(~0u, through, 2, 4);
    if (lane_in_quad >= 2) through += two_back;
    const uint32_t upper = through & 0xffff, lower = through >> 16, slots = out.slots;
    const uint32_t before = through - counts_;
    const uint32_t slot = static_cast<uint32_t>(row_) * out.tiles + tile_;
    const uint32_t below = 8u * out.tiles;  // slots from this lane's upper row to its lower one
    words_ = out.words + int64_t{slot} * slots;
    upper_at_ = (1 + (before & 0xffff)) * sizeof(uint32_t);
    lower_at_ = (below * slots + 1 + (before >> 16)) * sizeof(uint32_t);
    if (lane_in_quad == 3) {
      write_count(words_, upper, row_, out);
      write_count(words_ + below * slots, lower, row_ + 8, out);
    }
    if (__any_sync(~0u, upper >= slots || lower >= slots)) {
      const uint32_t totals = __shfl_sync(~0u, through, 3, 4);
      if ((totals & 0xffff) >= slots) spill(upper_, words_, slot, out);
      if (totals >> 16 >= slots) spill(lower_, words_ + below * slots, slot + below, out);
    }
    pairs_ = __reduce_or_sync(~0u, lane_pairs_);
  }

  __device__ __forceinline__ static void write_count(uint32_t* words, uint32_t total, int row,
                                                     const PackTarget& out) {
    if (row >= out.tokens) return;
    words[0] = total;
    if (total > 0) atomicAdd(out.row_nnz + row, total);
  }

  // Writes an overflowing row whole, zeros included, to its spill slot, and leaves nothing of it to
  // pack.
  __device__ __forceinline__ static void spill(uint32_t (&pairs)[32], uint32_t* words,
                                               uint32_t slot, const PackTarget& out) {
    const int lane_in_quad = threadIdx.x % 4;
    if (lane_in_quad == 0) words[1] = slot;
    uint32_t* to = out.spill + int64_t{slot} * (kTileN / 2) + lane_in_quad;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      to[4 * i] = pairs[i];
      pairs[i] = 0;
    }
  }

  // Stores a group of pairs of both rows.
  template <int Group>
  __device__ __forceinline__ void store() {
    constexpr int kFirst = Group * kGroupPairs;
    const uint32_t column = opaque((tile_ * kTileN + 2 * (threadIdx.x % 4)) & 0xffff) + 8 * kFirst;
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i) {
      const uint32_t upper = opaque(upper_[kFirst + i]), lower = opaque(lower_[kFirst + i]);
      store_pair(upper_at_, upper, column + 8 * i);
      store_pair(lower_at_, lower, column + 8 * i);
    }
  }

  // Stores a pair, whose first column mod 65536 is `column`, as words (value << 16 | column).
  __device__ __forceinline__ void store_pair(uint32_t& at, uint32_t pair, uint32_t column) {
    append<false>(words_, at, pair, __byte_perm(pair, column, 0x1054));
    append<true>(words_, at, pair, __byte_perm(pair, column + 1, 0x3254));
  }

  // Pair i of a lane holds columns 8i + 2t and 8i + 2t + 1.
  uint32_t upper_[32];  // of row row_
  uint32_t lower_[32];  // of row row_ + 8
  uint32_t counts_;     // this lane's non-zeros: bits 0-15 of row_, bits 16-31 of row_ + 8
  uint32_t* words_;     // words of row_
  uint32_t upper_at_, lower_at_;  // byte offset from words_ of this lane's next non-zero
  int row_;
  int tile_;
  Step next_;
  uint32_t lane_pairs_;  // pairs in which this lane has non-zeros
  uint32_t pairs_ = 0;   // pairs still to be packed, the same in all lanes
};

// A warp packs one tile of row `row` of the gate in column order; it is staged as row `r`.
__device__ __forceinline__ void pack_row(uint32_t staged, int r, int row, int tile,
                                         const PackTarget& out) {
  const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
  const uint32_t from = staged + r * kStagedRowBytes + ((lane / 4) ^ (r % 8)) * 16 + lane % 4 * 4;
  uint32_t pairs[4];  // pair j: columns 64 j + 2 lane, 64 j + 2 lane + 1
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pairs[j]) : "r"(from + j * 128) : "memory");
    // Clears neurons past the last one; see PackedTile::clear_outside.
    if (tile * kTileN + 64 * j + 2 * static_cast<int>(lane) >= out.ffn) pairs[j] = 0;
  }
  const uint32_t slot = static_cast<uint32_t>(row) * out.tiles + tile;
  uint32_t* words = out.words + int64_t{slot} * out.slots;
  if (!__any_sync(~0u, (pairs[0] | pairs[1] | pairs[2] | pairs[3]) != 0)) {
    if (lane == 0) words[0] = 0;
    return;
  }
  int before[4], total = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = __ballot_sync(~0u, (pairs[j] & 0xffff) != 0);
    const uint32_t high = __ballot_sync(~0u, pairs[j] >> 16 != 0);
    before[j] = total + __popc(low & below) + __popc(high & below);
    total += __popc(low) + __popc(high);
  }
  if (lane == 0) {
    words[0] = total;
    atomicAdd(out.row_nnz + row, total);
  }
  if (total < out.slots) {
    const uint32_t column = (tile * kTileN + 2 * lane) & 0xffff;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t* at = words + 1 + before[j];
      const bool has_low = (pairs[j] & 0xffff) != 0;
      if (has_low) at[0] = (pairs[j] << 16) + column + 64 * j;
      if (pairs[j] >> 16 != 0) at[has_low ? 1 : 0] = (pairs[j] & 0xffff0000u) + column + 64 * j + 1;
    }
  } else {
    if (lane == 0) words[1] = slot;
    uint32_t* spill = out.spill + int64_t{slot} * (kTileN / 2) + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) spill[32 * j] = pairs[j];
  }
}

using paired_gemm::ColumnScales;
using paired_gemm::kBytesA;
using paired_gemm::kBytesB;
using paired_gemm::kConsumers;
using paired_gemm::kStageBytes;
using paired_gemm::kStages;
using paired_gemm::kThreads;
using paired_gemm::multiply_step;
using paired_gemm::Producer;
using paired_gemm::Ring;
using paired_gemm::Schedule;
using paired_gemm::Unit;
using paired_gemm::UnitOrder;

template <bool kBytes>
__device__ __forceinline__ void produce(const Params& params, const Ring& ring, uint32_t rank) {
  const UnitOrder order = params.order;
  const int clusters = gridDim.x / kCluster;
  Producer producer{ring, rank};
  ColumnScales column_scales(ring.gap);
  for (int index = blockIdx.x / kCluster; index < order.count(); index += clusters) {
    if (index + clusters >= order.count()) {
      // This is the last unit. Kernels that start from here on rely on our predecessor having
      // cleared row_nnz.
      gpu::wait_for_previous_kernel();
      gpu::allow_next_kernel();
    }
    const Unit unit = order.locate(index, rank);
    if constexpr (kBytes) column_scales.request(producer, params.scales, unit.n_tile);
    producer.load<paired_gemm::kStepColumns<kBytes>>(
        unit.half ? params.map_x_half : params.map_x, unit.row, params.map_w, unit.n_tile,
        params.k_steps, unit.half ? kStageBytes - kBytesA / 2 : kStageBytes);
  }
}

// Signals of a CTA about packed units, for Params::packed. Consumer warps arrive on one barrier per
// phase, and one more thread waits for the barriers and publishes the phase to the device, so that
// only this thread waits until the stores are visible. There is no signal per unit, because more
// work in the loop over k-steps slows the kernel by several percent.
struct PackedUnits {
  // Phases: all whole units but the last two, the last but one, the last, and a half unit. A unit
  // that a CTA does not have counts as packed with the phase before.
  enum Phase { kEarlier, kLastButOne, kLastWhole, kHalf, kPhases };
  static constexpr uint32_t kBytes = kPhases * 8;
  uint32_t barriers;  // one per phase, used once

  __device__ explicit PackedUnits(const Ring& ring) : barriers(ring.full - kBytes) {}
  __device__ __forceinline__ void init() const {
    for (int phase = 0; phase < kPhases; ++phase) {
      gpu::barrier_init(barriers + phase * 8, kConsumers * 4);
    }
  }
  // Every consumer warp calls it.
  __device__ __forceinline__ void arrive(Phase phase) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) gpu::barrier_arrive(barriers + phase * 8);
  }
  __device__ __forceinline__ void tell(const Params& params) const {
    if (params.packed == nullptr) return;
    const int index = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const int whole = (params.order.whole - index + clusters - 1) / clusters;
    const bool has[kPhases] = {whole > 1, whole > 0, whole > 0,
                               index + whole * clusters < params.order.count()};
    gpu::wait_for_previous_kernel();  // by now the counters are cleared
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      if (has[phase]) gpu::barrier_wait(barriers + phase * 8, 0);
      gpu::add_release(params.packed + phase, 1);
    }
  }
};

// Between the ring buffer's stages and its barriers.
template <bool kBytes>
constexpr uint32_t kGapBytes = PackedUnits::kBytes + (kBytes ? ColumnScales::kBytes : 0);

// State of a consumer warpgroup, kept across units.
template <bool kBytes>
struct Consumer {
  const Params& params;
  const Ring& ring;
  const PackedUnits& units;
  const int warpgroup;
  gpu::RingCursor<kStages> cursor{};
  ColumnScales column_scales{ring.gap};
  PackedTile pending;

  // Computes 64 tokens by N neurons of a unit. The warpgroups of a whole unit take different
  // tokens; those of a half unit take different neurons.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[128], const Unit& unit) {
    using namespace gpu;
    const uint32_t a = ring.stages + (N == kTileN ? warpgroup * (kBytesA / 2) : 0);
    const uint32_t b = ring.stages + kBytesA + (N == kTileN ? 0 : warpgroup * (kBytesB / 2));
    float upper = 0.0f, lower = 0.0f;  // scales of this lane's rows
    if constexpr (kBytes) {
      const int row = unit.row + (N == kTileN ? warpgroup * 64 : 0) + threadIdx.x % 128 / 32 * 16 +
                      threadIdx.x % 32 / 4;
      upper = params.scales.of_row(row), lower = params.scales.of_row(row + 8);
    }
    int previous = 0;
    for (int k = 0; k < params.k_steps || !pending.done(); ++k) {
      if (k < params.k_steps) {
        barrier_wait(ring.full + cursor.stage * 8, cursor.parity);
        const uint32_t offset = cursor.stage * kStageBytes;
        multiply_step<N, kBytes>(acc, a + offset, b + offset, k > 0);
      }
      if (k > 0 && k < params.k_steps) {
        wgmma_wait<1>();
        release(ring, previous);
      }
      if (k < params.k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      // Packing steps run in every other k-step from the third on: steps in consecutive k-steps, or
      // from a tile's start, cost more than they hide. At D = 2048 all 10 steps fit. Products in 8
      // bits have half as many k-steps and use each.
      const bool now = k >= 3 && (kBytes || k % 2 == 1);
      if (now || k >= params.k_steps) {
        const bool packing = !pending.done();
        pending.advance(params.out);
        if (N < kTileN && packing && pending.done()) units.arrive(PackedUnits::kLastWhole);
      }
    }
    wgmma_wait<0>();
    release(ring, previous);
    if constexpr (kBytes) {
      wgmma_hold(acc);
      pending.take_scaled<N>(acc, params.cut, upper, lower, column_scales,
                             N == kTileN ? 0 : warpgroup * N);
      column_scales.advance();
    } else {
      pending.take<N>(acc, params.cut);
    }
  }
};

template <bool kBytes>
__device__ __forceinline__ void consume(const Params& params, const Ring& ring,
                                        const PackedUnits& units, uint32_t rank, int warpgroup) {
  using namespace gpu;
  const UnitOrder order = params.order;
  const int clusters = gridDim.x / kCluster;
  Consumer<kBytes> consumer{params, ring, units, warpgroup};
  float acc[128];
  int index = blockIdx.x / kCluster;
  for (; index < order.whole; index += clusters) {
    const Unit unit = order.locate(index, rank);
    consumer.template multiply<kTileN>(acc, unit);
    if (index + clusters < order.count()) {
      consumer.pending.begin(unit.row + warpgroup * 64, unit.n_tile);
    }
    // All units before this one are packed by now.
    if (index + clusters >= order.whole) {
      units.arrive(PackedUnits::kLastButOne);
    } else if (index + 2 * clusters >= order.whole) {
      units.arrive(PackedUnits::kEarlier);
    }
    wait_for_previous_kernel();  // by now row_nnz is cleared
  }
  // A CTA has at most one half unit. Its last unit is packed through the ring buffer's memory,
  // which nothing writes any more.
  const bool half = index < order.count();
  if (!half) index -= clusters;
  const Unit unit = order.locate(index, rank);
  if (half) consumer.template multiply<kTileN / 2>(acc, unit);
  named_barrier(1, kConsumers * 128);
  if (half) {
    consumer.pending.template stage<kTileN / 2>(ring.stages, warpgroup);
  } else {
    consumer.pending.template stage<kTileN>(ring.stages + warpgroup * (64 * kStagedRowBytes), 0);
  }
  named_barrier(1, kConsumers * 128);
  wait_for_previous_kernel();
  const int rows = min(params.out.tokens - unit.row, half ? kTileM / 2 : kTileM);
#pragma unroll 4
  for (int r = warpgroup * 4 + threadIdx.x % 128 / 32; r < rows; r += kConsumers * 4) {
    pack_row(ring.stages, r, unit.row + r, unit.n_tile, params.out);
  }
  units.arrive(half ? PackedUnits::kHalf : PackedUnits::kLastWhole);
}

// Launched as a dependent of the kernel that clears row_nnz, which itself starts only after all
// earlier work is complete. So this kernel waits only for the cleared row_nnz.
template <bool kBytes>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gate_gemm_sm90_kernel(const __grid_constant__ Params params) {
  using namespace gpu;
  extern __shared__ uint8_t memory[];
  const Ring ring(memory, kGapBytes<kBytes>);
  const PackedUnits units(ring);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.map_x);
    prefetch_tensor_map(&params.map_x_half);
    prefetch_tensor_map(&params.map_w);
    units.init();
    ring.init();
  }
  cluster_sync();
  if (params.condition != nullptr && *params.condition == 0) {
    wait_for_previous_kernel();  // our successor waits only for us, so we must outlive our
                                 // predecessor
    return;
  }
  paired_gemm::run_roles(
      [&] { produce<kBytes>(params, ring, rank); },
      [&](int warpgroup) { consume<kBytes>(params, ring, units, rank, warpgroup); },
      [&] { units.tell(params); });
}

// Clears row_nnz and the words of params.packed first. ctas is a multiple of kCluster.
template <bool kBytes>
cudaError_t launch(const Params& params, int64_t progress_words, int ctas, cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = paired_gemm::kRingBytes + kGapBytes<kBytes>;
  const auto kernel = gate_gemm_sm90_kernel<kBytes>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  status = launch_clear_counts(params.out.row_nnz, params.out.tokens, params.packed,
                               params.packed == nullptr ? 0 : progress_words, stream);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(ctas), kThreads, kSharedBytes, stream, params);
}

}  // namespace
}  // namespace gate_gemm

namespace {

constexpr int kClearThreads = 1024;

__global__ void __launch_bounds__(kClearThreads)
    clear_counts_kernel(int32_t* counts, int64_t rows, int32_t* progress, int64_t words) {
  gpu::wait_for_previous_kernel();
  gpu::allow_next_kernel();
  const int64_t i = int64_t{blockIdx.x} * kClearThreads + threadIdx.x;
  if (i < rows) counts[i] = 0;
  if (i < words) progress[i] = 0;
}

}  // namespace

cudaError_t launch_clear_counts(int32_t* counts, int64_t rows, int32_t* progress, int64_t words,
                                cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(std::max(rows, words), kClearThreads));
  return gpu::launch_dependent(clear_counts_kernel, dim3(blocks), kClearThreads, 0, stream, counts,
                               rows, progress, words);
}

void gate_gemm_cuda(CudaContext& ctx, const GateGemmCuda& problem) {
  using namespace gate_gemm;
  check_packed_ffn(ctx, problem.tokens, problem.width, problem.ffn, problem.out);
  TWELL_CHECK(problem.out.spill_slots >= problem.out.shape.max_spill_slots(),
              "gate GEMM: {} spill slots, expected {}", problem.out.spill_slots,
              problem.out.shape.max_spill_slots());
  TWELL_CHECK(!problem.in_bytes() || problem.width % 16 == 0,
              "gate GEMM in 8 bits: width {} must be a multiple of 16", problem.width);
  paired_gemm::check_column_scales(problem.w_gate_bytes.scales);
  if (problem.tokens == 0) return;
  const Schedule schedule(ctx.multiprocessors(), problem.tokens, problem.ffn);
  Params params;
  const bool bytes = problem.in_bytes();
  const auto map = [&](const void* matrix, const uint8_t* values, int64_t rows, int box_rows) {
    return bytes ? gpu::byte_matrix_tensor_map(values, rows, problem.width, box_rows)
                 : gpu::matrix_tensor_map(matrix, rows, problem.width, box_rows);
  };
  params.map_x = map(problem.x, problem.x_bytes.values, problem.tokens, kTileM);
  params.map_x_half = map(problem.x, problem.x_bytes.values, problem.tokens, kTileM / 2);
  params.map_w = map(problem.w_gate, problem.w_gate_bytes.values, problem.ffn, kTileN / kCluster);
  params.scales = {problem.x_bytes.scales, problem.w_gate_bytes.scales,
                   static_cast<int>(problem.tokens), static_cast<int>(problem.ffn)};
  params.out = {problem.out.words,
                reinterpret_cast<uint32_t*>(problem.out.spill),
                problem.out.row_nnz,
                static_cast<int>(problem.tokens),
                static_cast<int>(problem.ffn),
                static_cast<int>(problem.out.shape.tiles()),
                problem.out.shape.slots()};
  params.k_steps = static_cast<int>(ceil_div(problem.width, bytes ? 2 * kTileK : kTileK));
  params.order = schedule.order;
  params.condition = problem.condition;
  params.packed = problem.progress.words;
  params.cut = problem.cut;
  const auto launch_kernel = bytes ? launch<true> : launch<false>;
  TWELL_CUDA_CHECK(
      launch_kernel(params, problem.progress.size, schedule.clusters * kCluster, ctx.stream()));
}

GatePhases gate_gemm_phases(const CudaContext& ctx, int64_t tokens, int64_t ffn) {
  using namespace gate_gemm;
  const Schedule schedule(ctx.multiprocessors(), tokens, ffn);
  GatePhases phases{schedule.clusters * kCluster, {}};
  // Units packed by the end of each phase; clusters take units by groups of tokens.
  const UnitOrder& order = schedule.order;
  const int per_group = order.tiles.group * order.tiles.n_tiles;
  const int units[] = {order.whole - 2 * schedule.clusters, order.whole - schedule.clusters,
                       order.whole};
  static_assert(GateProgress::kPhases == 4);
  for (int phase = 0; phase < 3; ++phase) {
    const int groups = std::max(units[phase], 0) / per_group;
    phases.tokens[phase] = static_cast<int>(
        std::min<int64_t>(int64_t{groups} * order.tiles.group * kTileM * kCluster, tokens));
  }
  if (order.whole == order.tiles.count()) {
    phases.tokens[2] = static_cast<int>(tokens);
  }
  phases.tokens[3] = static_cast<int>(tokens);
  return phases;
}

}  // namespace twell
