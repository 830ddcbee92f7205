// SPDX-License-Identifier: Apache-2.0
// First kernel of the layer for up to 8 tokens: a CTA per multiprocessor makes the gate of up to 48
// neurons, and h of those that fire. One warp brings rows of the first weight through the copy
// engine into shared memory, which holds all of them: while the kernel in front still runs, where
// weights are constant. Few rows are on their way at a time, since what others ask for would wait
// behind more. Sixteen warps share out the width and multiply on mma.sync, weights as the 16-row
// operand, x in registers; they leave their partial sums where their weights were, which are added
// in a fixed order.
//
// A product's sum does not depend on the order of its terms, so the eight values of a 16-byte piece
// stand for whichever k the instruction thinks they are, the same ones in both operands.
#include "twell/ops/ffn/hopper/fired_words_sm90.cuh"
#include "twell/ops/ffn/hopper/row_gate_up_rows_sm90.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::few_token {
namespace row_gate_up {
namespace {

constexpr int kThreads = kMultipliers + 32;

class Kernel : public Rows {
 public:
  using Rows::Rows;

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
    // Not before: launching a kernel would come before the end of the one in front.
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
  // The ring goes back to the copy engine.
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
        // Past the last row it is read once more, which only reaches sums that nobody reads.
        const int last = min(rows_ - group * kGroup, kGroup) - 1, row = lane_ / 4;
        const uint32_t part =
            ring_ + item % kGroups * (kGroup * kPitch) + warp_ * kPart + lane_ % 4 * 16;
        const uint32_t low = part + min(row, last) * kPitch;
        const uint32_t high = part + min(row + 8, last) * kPitch;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (x_.k(segment, b) - lane_ % 4 * 8 >= p_.width) break;  // the same for the warp
          uint4 a{}, c{};  // what lies past the width was never loaded
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
      // This warp has read its part of the weights there.
      if (group * kGroup < rows_) leave_sums(acc[group], place(group), rows_ - group * kGroup);
    }
    named_barrier(1, kMultipliers);
    if (warp_ * 4 < rows_) finish_gate();
    named_barrier(1, kMultipliers);
  }
  // Of the first row of a row group of the pass, after its products.
  __device__ __forceinline__ int place(int group) const {
    const int groups = (rows_ + kGroup - 1) / kGroup;
    return (item_ - groups + group) % kGroups * kGroup;
  }
  // Four rows of a warp. Those of w_up that fire are asked into the L2 while they are listed.
  __device__ __forceinline__ void finish_gate() {
    const int row = static_cast<int>(threadIdx.x) / 8, token = lane_ % 8;
    const int from = min(row, rows_ - 1);
    const float sum = add_sums(place(from / kGroup) + from % kGroup, token);
    const bool exists = row < rows_ && token < p_.tokens;
    const uint32_t value = exists ? relu_bf16(sum) : 0;  // NaN stays
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

  // Tells the next kernel which neurons fire, and lists them; returns how many.
  __device__ __forceinline__ int list(int word) {
    uint64_t mask = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i * kGroup >= rows_) break;
      uint32_t v = shared_.fired[i];  // of warps without rows: of nothing
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
  // h of a neuron, a token each of eight lanes; `place`: of the sums.
  __device__ __forceinline__ void store(int position, int place) const {
    const int row = shared_.list[warp_][position], token = lane_ % 8;
    const uint32_t gate = shared_.gate[row][token];
    float h = __uint_as_float(gate << 16);
    if (p_.up != nullptr) h *= add_sums(place, token);
    p_.hidden.h[int64_t{first_ + row} * kRowTokens + token] =
        __float2bfloat16(gate == 0 ? 0.0f : h);
  }
  // Rows of w_down that the next kernel reads, into the L2.
  __device__ __forceinline__ void ask_ahead(int count) const {
    if (warp_ != kWarps - 1) return;
    for (int i = lane_; i < count; i += 32) bulk_prefetch(row_of(p_.down, i), p_.width * 2);
  }

  int first_ = 0, rows_ = 0;  // of this pass
  int item_ = 0;              // that comes next
};

// Registers: room beside these CTAs for those of the next kernel, so that it waits where it will
// run.
__global__ void __maxnreg__(96) row_gate_up_sm90_kernel(const __grid_constant__ RowGateUp problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Shared shared;
  Kernel(problem, shared, memory).run();
}

}  // namespace
}  // namespace row_gate_up

cudaError_t launch_row_gate_up_sm90(const RowGateUp& problem, int ctas, cudaStream_t stream) {
  using namespace row_gate_up;
  const auto* kernel = reinterpret_cast<const void*>(row_gate_up_sm90_kernel);
  const bool once = problem.width <= kSegment && int64_t{ctas} * problem.rows >= problem.ffn;
  const int bytes = (once ? problem.rows : kMaxRows) * kPitch;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  if (status != cudaSuccess) return status;
  return launch_dependent(row_gate_up_sm90_kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                          static_cast<uint32_t>(bytes), stream, problem);
}

}  // namespace twell::few_token
