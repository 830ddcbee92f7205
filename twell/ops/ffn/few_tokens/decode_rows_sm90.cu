// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 1 to 8 tokens, as two kernels that run side by side.
//
// 1. row_gate_up: each SM's CTA computes the gate of up to 48 neurons and h of the active ones. One
// warp loads rows of the first weight into shared memory with bulk TMA copies; if the weights are
// constant, it starts while the predecessor still runs. It keeps few rows in flight, because
// requests of other CTAs queue behind them. Sixteen warps split the width and multiply on mma.sync,
// with weights as the 16-row operand and x in registers. They write partial sums over the weights
// they have read; the sums are added in a fixed order. A dot product may take k in any order, so
// the eight values of a 16-byte piece need not be
//
// 2. row_down: y = h w_down over active neurons. A CTA computes 16 columns of y and so reads 32
// bytes of each active neuron's row, which row_gate_up has prefetched into the L2. Each of its
// eight warps takes an eighth of the neurons: it lists the active ones, loads 16 at a time through
// its own ring buffer, and multiplies on mma.sync with columns as the 16-row operand and tokens as
// the 8-column one. The eight partial results are added in a fixed order. Which neurons are active
// is known before h is, so the weights are loaded by the time row_gate_up ends.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/few_token_sm90.cuh"

namespace twell::few_token {

using namespace gpu;

namespace {

constexpr int kMaxRows = 48;  // most rows of a CTA at a time

// The first weight is w_gate, or w_up without a gate.
struct RowGateUp {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* norm;   // [D] weight of the norm of x, or null
  const __nv_bfloat16* first;  // [F, D]
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D] rows of active neurons are prefetched into the L2
  Hidden hidden;               // `rows` neurons per word
  ActivityCuda* activity;      // counts, or null
  float eps;                   // of the norm
  int tokens, width, ffn;
  int rows;            // neurons of a CTA at a time, at most kMaxRows
  bool early_weights;  // the first weight may be read before the predecessor has finished
  bool squared;        // f(g) = g^2
  bool up_relu;        // dReLU
  uint32_t cut;        // of FATReLU
};

}  // namespace

namespace row_gate_up {
namespace {

// x in the registers of the warps that multiply, in the layout of mma.sync and normalised if the
// layer begins with a norm. Each warp holds its part of the width, of one segment at a time if rows
// are wide.

constexpr int kWarps = 16;  // warps that multiply; one more loads
constexpr int kMultipliers = 32 * kWarps;
constexpr int kBlock = 32;  // values of a row that four lanes read at a time
constexpr int kBlocks = 4;  // blocks per warp
constexpr int kSegment = kWarps * kBlocks * kBlock;  // columns per segment

class Tokens {
 public:
  __device__ __forceinline__ Tokens(const RowGateUp& problem, int warp)
      : p_(problem),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % 32),
        segments_((problem.width + kSegment - 1) / kSegment) {}

  __device__ __forceinline__ int segments() const { return segments_; }
  // First column of this lane's values in block b of a segment; may be past the width.
  __device__ __forceinline__ int k(int segment, int b) const {
    return segment * kSegment + (warp_ * kBlocks + b) * kBlock + lane_ % 4 * 8;
  }
  // Eight values of token lane / 4 in block b; zeros past the last token and column.
  __device__ __forceinline__ const uint4& operator[](int b) const { return x_[b]; }

  // Called once by all warps that multiply.
  __device__ __forceinline__ void prepare(float (&squares)[kWarps][kRowTokens]) {
    if (segments_ == 1) load(0);
    if (p_.norm == nullptr) return;
    float sum = 0.0f;
    for (int segment = 0; segment < segments_; ++segment) {
      if (segments_ > 1) load(segment);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) sum += sum_of_squares(x_[b]);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane_ % 4 == 0) squares[warp_][lane_ / 4] = sum;
    named_barrier(1, kMultipliers);
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += squares[warp][lane_ / 4];
    inverse_ = rsqrtf(total / static_cast<float>(p_.width) + p_.eps);
    if (segments_ == 1) scale(0);
  }
  // Loads a segment into the registers if x has more than one.
  __device__ __forceinline__ void turn_to(int segment) {
    if (segments_ == 1) return;
    load(segment);
    if (p_.norm != nullptr) scale(segment);
  }

 private:
  __device__ __forceinline__ void load(int segment) {
    const int token = lane_ / 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int at = k(segment, b);
      x_[b] = uint4{};
      if (token < p_.tokens && at < p_.width) {
        x_[b] = *reinterpret_cast<const uint4*>(p_.x + int64_t{token} * p_.width + at);
      }
    }
  }
  __device__ __forceinline__ void scale(int segment) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int at = k(segment, b);
      uint4 norm{};
      if (at < p_.width) norm = __ldg(reinterpret_cast<const uint4*>(p_.norm + at));
      uint4& x = x_[b];
      x = {scaled(x.x, norm.x, inverse_), scaled(x.y, norm.y, inverse_),
           scaled(x.z, norm.z, inverse_), scaled(x.w, norm.w, inverse_)};
    }
  }

  const RowGateUp& p_;
  const int warp_, lane_, segments_;
  uint4 x_[kBlocks];
  float inverse_ = 0.0f;  // 1 / RMS of the token, for the norm
};

// Rows of the first weight in shared memory. One warp loads them; the warps that multiply read them
// and then overwrite them with partial sums.

constexpr int kGroup = 16;                  // rows per product
constexpr int kGroups = kMaxRows / kGroup;  // row groups in shared memory
constexpr int kPitch =
    kSegment * 2 + 64;  // bytes; padded so that lanes reading two rows hit different banks
constexpr int kPart = kBlocks * kBlock * 2;  // bytes of a row that one warp multiplies
constexpr int kQuad = 4;                     // rows that share a barrier
constexpr int kQuads = kGroup / kQuad;
constexpr int kOnTheirWay = 4;  // quads in flight, 64 KiB

struct Shared {
  uint64_t full[kGroups][kQuads], empty[kGroups];
  uint16_t gate[kMaxRows][kRowTokens];  // bf16
  uint8_t list[kWarps][kMaxRows];       // active rows, one copy per warp
  uint32_t fired[kMaxRows / kGroup];    // active rows, a byte per four rows
  float squares[kWarps][kRowTokens];
  int nnz;
};

constexpr int kThreads = kMultipliers + 32;

class Kernel {
 public:
  __device__ __forceinline__ Kernel(const RowGateUp& problem, Shared& shared, uint8_t* memory)
      : p_(problem),
        shared_(shared),
        ring_(smem_address(memory)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        x_(problem, warp_) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll 1
        for (int q = 0; q < kQuads; ++q) barrier_init(smem_address(&shared_.full[i][q]), 1);
        barrier_init(smem_address(&shared_.empty[i]), kMultipliers);
      }
      fence_barrier_init();
      shared_.nnz = 0;
    }
    __syncthreads();
    if (warp_ == kWarps) {
      produce();
      return;
    }
    wait_for_previous_kernel();
    // Trigger dependents only after griddepcontrol.wait; earlier would delay our own wait.
    if (warp_ == 0) allow_next_kernel();
    x_.prepare(shared_.squares);
    const int step = static_cast<int>(gridDim.x);
    for (int word = static_cast<int>(blockIdx.x); word * p_.rows < p_.ffn; word += step) {
      first_ = word * p_.rows;
      rows_ = min(p_.rows, p_.ffn - first_);
      gate();
      up(list(word));
      if ((word + step) * p_.rows < p_.ffn) release();
    }
    if (p_.activity != nullptr && threadIdx.x == 0) {
      if (shared_.nnz > 0) {
        atomicAdd(&p_.activity->nnz, static_cast<unsigned long long>(shared_.nnz));
      }
      if (blockIdx.x == 0) {
        atomicAdd(&p_.activity->tokens, static_cast<unsigned long long>(p_.tokens));
      }
    }
  }

 private:
  // An item is one row group of one segment, in slot item % kGroups. Quad numbers continue across
  // items.
  __device__ __forceinline__ uint32_t full(int quad) const {
    return smem_address(&shared_.full[quad / kQuads % kGroups][quad % kQuads]);
  }
  __device__ __forceinline__ uint32_t empty(int item) const {
    return smem_address(&shared_.empty[item % kGroups]);
  }
  static __device__ __forceinline__ uint32_t phase(int item) { return item / kGroups & 1; }

  __device__ __forceinline__ void produce() {
    if (!p_.early_weights) wait_for_previous_kernel();
    const int step = static_cast<int>(gridDim.x) * p_.rows;
    int item = 0;
#pragma unroll 1
    for (int first = static_cast<int>(blockIdx.x) * p_.rows; first < p_.ffn; first += step) {
      const int rows = min(p_.rows, p_.ffn - first);
#pragma unroll 1
      for (int segment = 0; segment < x_.segments(); ++segment) {
        const int k = segment * kSegment;
        const __nv_bfloat16* from = p_.first + int64_t{first} * p_.width + k;
#pragma unroll 1
        for (int row = 0; row < rows; row += kGroup, ++item) {
          if (item >= kGroups) barrier_wait(empty(item), phase(item) ^ 1);
#pragma unroll 1
          for (int i = 0; i < kQuads; ++i) {
            load_quad(from, row + i * kQuad, rows, min(p_.width - k, kSegment) * 2,
                      item * kQuads + i);
          }
        }
      }
    }
  }
  // Completes the barriers of rows past the end too.
  __device__ __forceinline__ void load_quad(const __nv_bfloat16* from, int row, int rows,
                                            uint32_t bytes, int quad) const {
    const int before = quad - kOnTheirWay, here = max(min(rows - row, kQuad), 0);
    if (before >= 0) barrier_wait(full(before), phase(before / kQuads));
    if (lane_ == 0) barrier_arrive_expect(full(quad), here * bytes);
    __syncwarp();
    if (lane_ < here) {
      const int place = quad % (kGroups * kQuads) * kQuad + lane_;
      bulk_load(ring_ + place * kPitch, from + int64_t{row + lane_} * p_.width, bytes, full(quad));
    }
  }

  // A warp's partial sums lie in its own part of a row; those of four neighbouring rows are in
  // different banks.
  __device__ __forceinline__ uint32_t sum_place(int place, int token) const {
    return ring_ + place * kPitch + place / 2 % 2 * 32 + token * 4;
  }
  // Writes the sums of the first `rows` rows of a product, starting at `place`.
  __device__ __forceinline__ void leave_sums(const float (&acc)[4], int place, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_ / 4;
      if (row >= rows) continue;
      const uint32_t to = sum_place(place + row, lane_ % 4 * 2) + warp_ * kPart;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(acc[half * 2]),
                   "f"(acc[half * 2 + 1])
                   : "memory");
    }
  }
  __device__ __forceinline__ float add_sums(int place, int token) const {
    const uint32_t from = sum_place(place, token);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      float v;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from + warp * kPart) : "memory");
      sum += v;
    }
    return sum;
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], const uint4& low, const uint4& high,
                                           int block) const {
    const uint4& x = x_[block];
    mma_16x8x16(acc, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_16x8x16(acc, low.z, high.z, low.w, high.w, x.z, x.w);
  }
  // Hands the ring buffer back to the producer.
  __device__ __forceinline__ void release() {
    fence_async_shared();
    for (int row = 0, item = item_; row < rows_; row += kGroup) barrier_arrive(empty(--item));
  }

  // --- gate -------------------------------------------------------------------------------------
  __device__ __forceinline__ void gate() {
    float acc[kGroups][4] = {};
    for (int segment = 0; segment < x_.segments(); ++segment) {
      x_.turn_to(segment);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group * kGroup >= rows_) continue;
        const int item = item_++;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) barrier_wait(full(item * kQuads + i), phase(item));
        // Rows past the last are replaced by the last one; only unused sums are affected.
        const int last = min(rows_ - group * kGroup, kGroup) - 1, row = lane_ / 4;
        const uint32_t part =
            ring_ + item % kGroups * (kGroup * kPitch) + warp_ * kPart + lane_ % 4 * 16;
        const uint32_t low = part + min(row, last) * kPitch;
        const uint32_t high = part + min(row + 8, last) * kPitch;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (x_.k(segment, b) - lane_ % 4 * 8 >= p_.width) break;  // uniform over the warp
          uint4 a{}, c{};  // columns past the width were never loaded
          if (x_.k(segment, b) < p_.width) {
            a = load_shared16(low + b * (kBlock * 2));
            c = load_shared16(high + b * (kBlock * 2));
          }
          multiply(acc[group], a, c, b);
        }
        if (segment + 1 < x_.segments()) barrier_arrive(empty(item));
      }
    }
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      // This warp has read its part of the weights, which its sums now overwrite.
      if (group * kGroup < rows_) leave_sums(acc[group], place(group), rows_ - group * kGroup);
    }
    named_barrier(1, kMultipliers);
    if (warp_ * 4 < rows_) finish_gate();
    named_barrier(1, kMultipliers);
  }
  // Where the sums of a row group of this pass begin in shared memory.
  __device__ __forceinline__ int place(int group) const {
    const int groups = (rows_ + kGroup - 1) / kGroup;
    return (item_ - groups + group) % kGroups * kGroup;
  }
  // Finishes four rows per warp, and prefetches rows of w_up of active neurons into the L2.
  __device__ __forceinline__ void finish_gate() {
    const int row = static_cast<int>(threadIdx.x) / 8, token = lane_ % 8;
    const int from = min(row, rows_ - 1);
    const float sum = add_sums(place(from / kGroup) + from % kGroup, token);
    const bool exists = row < rows_ && token < p_.tokens;
    const uint32_t value = exists ? above(relu_bf16(sum), p_.cut) : 0;  // NaN passes through
    shared_.gate[row][token] = static_cast<uint16_t>(value);
    const uint32_t fired = __ballot_sync(~0u, value != 0);
    uint32_t rows = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows |= (fired >> (8 * i) & 0xff) != 0 ? 1u << i : 0;
    if (p_.up != nullptr) {
#pragma unroll 1
      for (uint32_t left = rows; left != 0; left &= left - 1) {
        const int neuron = first_ + warp_ * 4 + __ffs(left) - 1;
        for (int k = lane_ * 64; k < p_.width; k += 32 * 64) {
          prefetch_around(p_.up + int64_t{neuron} * p_.width + k);
        }
      }
    }
    if (lane_ == 0) {
      reinterpret_cast<uint8_t*>(shared_.fired)[warp_] = static_cast<uint8_t>(rows);
      if (fired != 0) atomicAdd(&shared_.nnz, __popc(fired));
    }
  }

  // Publishes which neurons are active to the next kernel, and lists them; returns their number.
  __device__ __forceinline__ int list(int word) {
    uint64_t mask = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i * kGroup >= rows_) break;
      uint32_t v = shared_.fired[i];  // undefined, and unused, for warps without rows
      v = (v & 0xf) | (v >> 4 & 0xf0) | (v >> 8 & 0xf00) | (v >> 12 & 0xf000);
      mask |= uint64_t{v & ((1u << min(rows_ - i * kGroup, kGroup)) - 1)} << (kGroup * i);
    }
    if (threadIdx.x == 0) store_fired(p_.hidden.fired + word, mask);
#pragma unroll
    for (int row = lane_; row < kMaxRows; row += 32) {
      if (mask >> row & 1) {
        shared_.list[warp_][__popcll(mask & ((uint64_t{1} << row) - 1))] =
            static_cast<uint8_t>(row);
      }
    }
    __syncwarp();
    return __popcll(mask);
  }

  // --- up ---------------------------------------------------------------------------------------
  __device__ __forceinline__ const __nv_bfloat16* row_of(const __nv_bfloat16* weight,
                                                         int position) const {
    return weight + int64_t{first_ + shared_.list[warp_][position]} * p_.width;
  }
  __device__ __forceinline__ void up(int count) {
    if (p_.up == nullptr) ask_ahead(count);
    for (int base = 0; base < count; base += kGroup) {
      const int at = place(base / kGroup % 2);  // where the sums go
      if (p_.up != nullptr) {
        float acc[4] = {};
        for (int segment = 0; segment < x_.segments(); ++segment) {
          x_.turn_to(segment);
          multiply_rows(acc, base, count, segment);
        }
        leave_sums(acc, at, count - base);
        named_barrier(1, kMultipliers);
      }
      const int position = base + static_cast<int>(threadIdx.x) / 8;
      if (position < min(base + kGroup, count)) store(position, at + position - base);
    }
  }
  // acc += x times 16 rows of w_up.
  __device__ __forceinline__ void multiply_rows(float (&acc)[4], int base, int count,
                                                int segment) const {
    const int low = base + lane_ / 4, high = low + 8;
    uint4 a[kBlocks], c[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int k = x_.k(segment, b);
      a[b] = c[b] = uint4{};
      if (low < count && k < p_.width) {
        a[b] = __ldcs(reinterpret_cast<const uint4*>(row_of(p_.up, low) + k));
      }
      if (high < count && k < p_.width) {
        c[b] = __ldcs(reinterpret_cast<const uint4*>(row_of(p_.up, high) + k));
      }
    }
    if (base == 0 && segment == 0) ask_ahead(count);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) multiply(acc, a[b], c[b], b);
  }
  // Stores h of a neuron, one token for each of eight lanes; its sums are at `place`.
  __device__ __forceinline__ void store(int position, int place) const {
    const int row = shared_.list[warp_][position], token = lane_ % 8;
    const uint32_t gate = shared_.gate[row][token];
    float h = __uint_as_float(gate << 16);
    if (p_.squared) h *= h;
    if (p_.up != nullptr) h *= relu_if(p_.up_relu, add_sums(place, token));
    p_.hidden.h[int64_t{first_ + row} * kRowTokens + token] =
        __float2bfloat16(gate == 0 ? 0.0f : h);
  }
  // Prefetches the rows of w_down that the next kernel reads into the L2.
  __device__ __forceinline__ void ask_ahead(int count) const {
    if (warp_ != kWarps - 1) return;
    for (int i = lane_; i < count; i += 32) bulk_prefetch(row_of(p_.down, i), p_.width * 2);
  }

  const RowGateUp& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_;
  Tokens x_;
  int first_ = 0, rows_ = 0;  // first neuron of this pass, and how many
  int item_ = 0;              // the next item
};

// The register limit leaves room for CTAs of the next kernel beside these, so that it can start
// early.
__global__ void __maxnreg__(96) row_gate_up_sm90_kernel(const __grid_constant__ RowGateUp problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Shared shared;
  Kernel(problem, shared, memory).run();
}

// One CTA per word of `fired`, at most `ctas`.
cudaError_t launch(const RowGateUp& problem, int ctas, cudaStream_t stream) {
  const bool once = problem.width <= kSegment && int64_t{ctas} * problem.rows >= problem.ffn;
  const int bytes = (once ? problem.rows : kMaxRows) * kPitch;
  return launch_dependent(row_gate_up_sm90_kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                          static_cast<uint32_t>(bytes), stream, problem);
}

}  // namespace
}  // namespace row_gate_up

namespace row_down {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 16;
constexpr int kGroup = 16;  // neurons that a warp multiplies at a time
constexpr int kStages = 4;
constexpr int kWeightStage = kGroup * kColumns * 2;
constexpr int kStage = kWeightStage + kGroup * kRowTokens * 2;
constexpr int kWords = 20;  // words of neurons that a warp lists at a time

// Partial results in f32, [tokens, columns]; rows are padded against bank conflicts.
constexpr int kPartialPitch = kColumns * 4 + 16;
static_assert(kRowTokens * kPartialPitch <= kStages * kStage);

struct Shared {
  uint8_t ring[kWarps][kStages * kStage];  // reused for the partial results
  uint16_t list[kWarps][kWords * kMaxRows];
};

// 16-byte piece of a row of Pieces in shared memory, swizzled for ldmatrix.
template <int Pieces>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return (row * Pieces + (piece ^ (row % 8 / (8 / Pieces)))) * 16;
}

class Kernel {
 public:
  __device__ __forceinline__ Kernel(const Down& problem, Shared& shared)
      : p_(problem),
        shared_(shared),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        column_(static_cast<int>(blockIdx.x) * kColumns),
        ring_(smem_address(shared.ring[warp_])) {}

  __device__ __forceinline__ void run() {
    allow_next_kernel();
    const int words = (p_.ffn + p_.word_neurons - 1) / p_.word_neurons;
    const int share = (words + kWarps - 1) / kWarps, begin = min(warp_ * share, words),
              end = min(begin + share, words);
    const bool listed = list_early(begin, min(end - begin, kWords));
    // Once every warp has listed its own words, all words have been read.
    const bool read = share <= kWords && __syncthreads_and(listed) != 0;
    bool last = false;
    if (read && threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
    wait_for_previous_kernel();
    // At the end, each thread adds up four columns of one token.
    const int token = static_cast<int>(threadIdx.x) / 4,
              column = column_ + static_cast<int>(threadIdx.x) % 4 * 4;
    const bool stores = token < p_.tokens && column < p_.width;
    const int64_t at = int64_t{token} * p_.width + column;
    uint2 residual{};
    if (p_.residual != nullptr && stores) {
      residual = *reinterpret_cast<const uint2*>(p_.residual + at);
    }
    float acc[4] = {};
    for (int word = begin; word < end; word += kWords) {
      const bool begun = listed && word == begin;
      if (!begun) {
        list(lane_ < min(end - word, kWords) ? load_fired(p_.hidden.fired + word + lane_) : 0);
      }
      multiply(acc, word * p_.word_neurons, begun);
    }
    leave(acc);
    __syncthreads();
    if (!read && threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
    if (stores) store(at, add_up(token, column), residual);
    if (warp_ == 0) clear_if_last(last, p_.hidden.fired, words);
  }

 private:
  // Runs before the predecessor has ended: reads some words and loads the first weights. False if
  // the words are not published yet.
  __device__ __forceinline__ bool list_early(int word, int words) {
    uint64_t bits = kFiredKnown;
    if (lane_ < words) bits = await_fired<true>(p_.hidden.fired + word + lane_);
    if (__all_sync(~0u, is_known(bits)) == 0) return false;
    list(bits);
#pragma unroll
    for (int i = 0; i < kStages; ++i) gather_weights(word * p_.word_neurons, i * kGroup, i);
    return true;
  }
  // Lists the active neurons of each lane's word, ascending.
  __device__ __forceinline__ void list(uint64_t bits) {
    bits &= ~kFiredKnown;
    int at = __popcll(bits);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, at, step);
      if (lane_ >= step) at += other;
    }
    count_ = __shfl_sync(~0u, at, 31);
    at -= __popcll(bits);
    for (; bits != 0; bits &= bits - 1) {
      shared_.list[warp_][at++] =
          static_cast<uint16_t>(lane_ * p_.word_neurons + __ffsll(static_cast<int64_t>(bits)) - 1);
    }
    __syncwarp();
  }

  // Loads 16 columns of w_down for neurons first .. first + 15 of the list into a stage; zeros past
  // the end.
  __device__ __forceinline__ void gather_weights(int base, int first, int stage) const {
    if (first >= count_) return;
    const int row = lane_ / 2, piece = lane_ % 2, at = column_ + piece * 8;
    const bool inside = first + row < count_ && at < p_.width;
    const __nv_bfloat16* from = p_.weight;
    if (inside) from += int64_t{base + shared_.list[warp_][first + row]} * p_.width + at;
    gather16(ring_ + stage * kStage + swizzled<2>(row, piece), from, inside);
  }
  // Loads h of the same neurons into the stage.
  __device__ __forceinline__ void gather_hidden(int base, int first, int stage) const {
    if (first >= count_ || lane_ >= kGroup) return;
    const bool valid = first + lane_ < count_;
    const __nv_bfloat16* from = p_.hidden.h;
    if (valid) from += int64_t{base + shared_.list[warp_][first + lane_]} * kRowTokens;
    gather16(ring_ + stage * kStage + kWeightStage + swizzled<1>(lane_, 0), from, valid);
  }

  // acc += products of the listed neurons from `base` on; begun: the first weights are already in
  // flight.
  __device__ __forceinline__ void multiply(float (&acc)[4], int base, bool begun) {
    const auto fill = [&](int first, int stage, bool weights) {
      if (weights) gather_weights(base, first, stage);
      gather_hidden(base, first, stage);
      gathers_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages; ++i) fill(i * kGroup, i, !begun);
    int stage = 0;
    for (int first = 0; first < count_; first += kGroup) {
      gathers_wait<kStages - 1>();
      __syncwarp();
      const uint32_t from = ring_ + stage * kStage;
      uint32_t a[4], b[2];
      load_matrices_transposed(a, from + swizzled<2>(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2));
      load_matrices_transposed(b, from + kWeightStage + swizzled<1>(lane_ % 16, 0));
      mma_16x8x16(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
      __syncwarp();
      fill(first + kStages * kGroup, stage, true);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    gathers_wait<0>();
    __syncwarp();  // the list and the ring may be overwritten
  }

  __device__ __forceinline__ float* partial(int warp, int token, int column) const {
    return reinterpret_cast<float*>(shared_.ring[warp] + token * kPartialPitch + column * 4);
  }
  __device__ __forceinline__ void leave(const float (&acc)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *partial(warp_, lane_ % 4 * 2 + i % 2, lane_ / 4 + i / 2 * 8) = acc[i];
    }
  }
  __device__ __forceinline__ float4 add_up(int token, int column) const {
    float4 sum{};
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const float4 v = *reinterpret_cast<const float4*>(partial(from, token, column - column_));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    return sum;
  }
  __device__ __forceinline__ void store(int64_t at, float4 sum, const uint2& residual) const {
    if (p_.residual != nullptr) {
      const float2 low = to_floats(residual.x), high = to_floats(residual.y);
      sum = {sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y};
    }
    *reinterpret_cast<uint2*>(p_.y + at) = {bf16x2(sum.x, sum.y), bf16x2(sum.z, sum.w)};
  }

  const Down& p_;
  Shared& shared_;
  const int warp_, lane_, column_;
  const uint32_t ring_;
  int count_ = 0;  // length of the list
};

// With 48 registers its CTAs fit beside those of row_gate_up, so that it can start early.
__global__ void __maxnreg__(48) row_down_sm90_kernel(const __grid_constant__ Down problem) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  Kernel(problem, *reinterpret_cast<Shared*>(dynamic)).run();
}

constexpr int kShared = sizeof(Shared);

cudaError_t launch(const Down& problem, cudaStream_t stream) {
  return launch_dependent(row_down_sm90_kernel, dim3((problem.width + kColumns - 1) / kColumns),
                          kThreads, kShared, stream, problem);
}

}  // namespace
}  // namespace row_down

cudaError_t prepare_decode_rows() {
  // The largest size, because contexts with other sizes may launch at the same time.
  const cudaError_t status =
      allow_shared_memory(row_gate_up::row_gate_up_sm90_kernel, kMaxRows * row_gate_up::kPitch);
  return status == cudaSuccess
             ? allow_shared_memory(row_down::row_down_sm90_kernel, row_down::kShared)
             : status;
}

cudaError_t launch_decode_rows(const BatchFfnCuda& problem, const Hidden& hidden, int ctas,
                               cudaStream_t stream) {
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  // The fewest rows at a time that give all CTAs the same number of passes.
  const int passes = ceil_div(ffn, ctas * kMaxRows);
  const int rows = std::max(ceil_div(ffn, ctas * passes), kLeastRows);
  const cudaError_t status = row_gate_up::launch({.x = problem.x,
                                                  .norm = problem.norm,
                                                  .first = gated ? problem.w_gate : problem.w_up,
                                                  .up = gated ? problem.w_up : nullptr,
                                                  .down = problem.w_down,
                                                  .hidden = hidden,
                                                  .activity = problem.activity,
                                                  .eps = problem.eps,
                                                  .tokens = tokens,
                                                  .width = width,
                                                  .ffn = ffn,
                                                  .rows = rows,
                                                  .early_weights = problem.weights_are_constant,
                                                  .squared = problem.squared,
                                                  .up_relu = problem.up_relu,
                                                  .cut = problem.cut},
                                                 std::min(ctas, ceil_div(ffn, rows)), stream);
  if (status != cudaSuccess) return status;
  return row_down::launch({.hidden = hidden,
                           .weight = problem.w_down,
                           .residual = problem.add ? problem.y : nullptr,
                           .y = problem.y,
                           .tokens = tokens,
                           .width = width,
                           .ffn = ffn,
                           .word_neurons = rows},
                          stream);
}

}  // namespace twell::few_token
