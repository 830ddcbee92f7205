// SPDX-License-Identifier: Apache-2.0
// The GEMM of the executions that run on every GPU of compute capability 8.0 and later: 128 rows by
// up to 256 columns per work item, mma.sync on eight warps of 64 rows by a quarter of the columns,
// bf16 in, f32 accumulation. Persistent: CTAs take items from a counter and load the first k-steps
// of the next item, by cp.async into a ring of four stages, while they finish the one before. 99
// KiB of shared memory, which Ada and RTX Blackwell have too.
//
// A Problem, which is the kernel parameter, says what is multiplied:
//   bool kColumns          whether B lies as [k, columns] (a row of B is a k), or as [column, k]
//   int kLeastGroups       groups of 64 columns that an item has at least, 1 to 4; at most 4
//   int take(int number)   the index of the item that a CTA computes as its number-th
//   int items()            how many there are
//   int4 first(int index)  the item of that index, x >= 0, in two steps, each of which loads what
//   int4 second(int4)      does not depend on another load of the same step
//   int groups(int4 item)  its groups of 64 columns
//   int parts(int4 item)   sums that are accumulated one after the other, 1 or more,
//   int steps(int4 item)   and the k-steps of each, at least one
//   Copies                 what one thread copies: begin(problem, item, part) starts on a sum, of
//                          which there is none if item.x < 0; copy(problem, stage) copies its part
//                          of the next k-step, zeros outside, without a branch
//   template <int kGroups> void finish(item, acc, shared)
//                          the epilogue, called by all threads; shared has kStageBytes, and who
//                          uses them ends with a barrier
//   int32_t* condition     if it holds 0, nothing is computed; may be null
// Whether an item is computed by this CTA or that does not change its result.
//
// A k-step is one piece of code without branches, so that the assembler spreads its copies and
// loads over its products: with them in front of the products the tensor cores waited a quarter of
// the time. What has branches, the change of items, lies between runs of k-steps.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/gather.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sync.cuh"

namespace twell::ring_gemm {

inline constexpr int kThreads = 256;
inline constexpr int kTileM = 128, kTileN = 256;
inline constexpr int kStepK = 32;  // 64 bytes of a row, four pieces of 16 bytes
inline constexpr int kPieces = kStepK / 8;
inline constexpr int kStages = 4;
inline constexpr uint32_t kBytesA = kTileM * kStepK * 2;
inline constexpr uint32_t kStageBytes = (kTileM + kTileN) * kStepK * 2;
inline constexpr int kItems = 8;  // that a CTA knows: more than stages, and the one behind them
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + (kItems + 1) * sizeof(int4);
static_assert(kSharedBytes <= 99 * 1024);

// --- Operands in shared memory ---

// The place of a piece of a row of k values: the eight rows that ldmatrix reads hit different
// banks.
__device__ __forceinline__ uint32_t k_major_place(int row, int piece) {
  return (row * kPieces + (piece ^ (row / 2 % kPieces))) * 16;
}
// The same of a row of kTileN columns.
__device__ __forceinline__ uint32_t n_major_place(int row, int piece) {
  return (row * (kTileN / 8) + (piece ^ (row % 8))) * 16;
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's place in the item: 64 rows from warp_m() * 64 on, and a quarter of its columns. Warps of
// the same rows are neighbours, 128 threads.
__device__ __forceinline__ int warp_m() { return threadIdx.x / 128; }
__device__ __forceinline__ int warp_n() { return threadIdx.x / 32 % 4; }
// The row of acc[i][..][2 half] and the first column, of two, of acc[..][j] of this lane.
__device__ __forceinline__ int row_of(int i, int half) {
  return warp_m() * 64 + i * 16 + half * 8 + threadIdx.x % 32 / 4;
}
template <int kGroups>
__device__ __forceinline__ int column_of(int j) {
  return warp_n() * 16 * kGroups + j * 8 + threadIdx.x % 4 * 2;
}

// Where this lane's addresses of ldmatrix lie in a stage. For the second half of a k-step, bit 5 of
// those of k-major operands is flipped.
template <int kGroups, bool kColumns>
struct Addresses {
  uint32_t a, b;
  __device__ __forceinline__ Addresses() {
    const int lane = threadIdx.x % 32, first = warp_n() * 16 * kGroups;
    a = k_major_place(warp_m() * 64 + lane % 16, lane / 16);
    b = kBytesA + (kColumns ? n_major_place(lane % 16, first / 8 + lane / 16)
                            : k_major_place(first + lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }
};

// Operands of 16 values of k for a warp's 64 rows by 16 kGroups columns.
template <int kGroups, bool kColumns>
struct Fragments {
  uint32_t a[4][4], b[kGroups][4];

  __device__ __forceinline__ void load(const Addresses<kGroups, kColumns>& at, uint32_t stage,
                                       int half) {
    const uint32_t from_a = stage + (at.a ^ (half * 32));
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(a[i], from_a + i * (16 * kStepK * 2));
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if constexpr (kColumns) {
        load_matrices_transposed(b[j], stage + (at.b ^ (j * 32)) + half * (16 * kTileN * 2));
      } else {
        load_matrices(b[j], stage + (at.b ^ (half * 32)) + j * (16 * kStepK * 2));
      }
    }
  }
  // Neighbouring products share an operand.
  __device__ __forceinline__ void multiply(float (&acc)[4][2 * kGroups][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int at = 0; at < 2 * kGroups; ++at) {
        const int j = i % 2 == 0 ? at : 2 * kGroups - 1 - at;
        multiply_add(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};
// The bits that Addresses::b ^ (j * 32) flips are those of the piece, of 64 columns of a warp.
static_assert(kTileN / 4 == 64);

// --- Copies ---

// Rows that this thread copies of a k-major operand: piece() of rows row() + 64 i.
__device__ __forceinline__ int copied_row() { return threadIdx.x / kPieces; }
__device__ __forceinline__ int copied_piece() { return threadIdx.x % kPieces; }
inline constexpr int kCopiedRows = kThreads / kPieces;  // in one pass of all threads
__device__ __forceinline__ uint32_t copied_place(int pass) {
  return k_major_place(copied_row(), copied_piece()) + pass * (kCopiedRows * kStepK * 2);
}

// gather16 where `wanted`, without a branch; else nothing is written.
__device__ __forceinline__ void gather16_if(bool wanted, uint32_t dst, const void* src,
                                            bool valid) {
  const int bytes = valid ? 16 : 0, copies = wanted;
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(copies)
      : "memory");
}

// Four words of each of four lanes, transposed: word i of lane q becomes word q of lane i. Turns
// the pairs of four neighbouring mma.sync tiles into 16 bytes of a row per lane, and back.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? other : w[i];
    w[i + 1] = odd ? w[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
    w[i] = high ? other : w[i];
    w[i + 2] = high ? w[i + 2] : other;
  }
}

// --- The CTA ---

template <typename Problem>
struct Cta {
  const Problem& problem;
  uint8_t* const memory;
  const uint32_t ring = gpu::smem_address(memory);
  int4* const items = reinterpret_cast<int4*>(memory + kStages * kStageBytes);
  int* const count = reinterpret_cast<int*>(items + kItems);  // thread 0's: of all items
  typename Problem::Copies copies;
  int loading = -1;                    // number, in this CTA, of the item that is being loaded
  int part = 0, parts = 1;             // the sum of it,
  int steps = 0, left = 0;             // of so many k-steps, and those not loaded yet
  uint32_t load_stage = 0, stage = 0;  // offsets in the ring

  static __device__ __forceinline__ uint32_t behind(uint32_t of) {
    return of == (kStages - 1) * kStageBytes ? 0 : of + kStageBytes;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      *count = problem.items();
      const int index = problem.take(0);
      items[0] = index < *count ? problem.second(problem.first(index)) : int4{-1, 0, 0, 0};
    }
    begin();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      load();
      loaded(1);
    }
    await_stage();
    for (int number = 0;; ++number) {
      const int4 item = items[number % kItems];
      if (item.x < 0) break;
      const int groups = problem.groups(item);
      if (groups == 1) {
        if constexpr (Problem::kLeastGroups <= 1) compute<1>(item);
      } else if (groups == 2) {
        if constexpr (Problem::kLeastGroups <= 2) compute<2>(item);
      } else if (groups == 3) {
        if constexpr (Problem::kLeastGroups <= 3) compute<3>(item);
      } else {
        compute<4>(item);
      }
    }
    gpu::gathers_wait<0>();
  }

 private:
  // Begins the item's next sum, or the next item. Behind the last one k-steps without any row
  // follow.
  __device__ __forceinline__ void begin() {
    __syncthreads();  // thread 0 has made the item known
    if (++part == parts) {
      part = 0;
      ++loading;
    }
    const int4 item = items[loading % kItems];
    parts = item.x < 0 ? 1 : problem.parts(item);
    steps = left = item.x < 0 ? INT32_MAX : problem.steps(item);
    copies.begin(problem, item, part);
  }

  // Loads the next k-step of the item being loaded.
  __device__ __forceinline__ void load() {
    copies.copy(problem, ring + load_stage);
    gpu::gathers_commit();
    load_stage = behind(load_stage);
  }

  // Thread 0 finds the next item, a step of it at a time, so that it seldom waits for memory. It
  // takes it late, so that CTAs with long items take fewer. Registers are short: what it knows of
  // the item lies in its place.
  __device__ __forceinline__ int stop(int at) const { return min(steps - 1, at); }
  __device__ __forceinline__ void find_next() {
    if (threadIdx.x != 0 || part + 1 < parts) return;
    int4& next = items[(loading + 1) % kItems];
    if (left == stop(6)) next.x = problem.take(loading + 1);
    if (left == stop(4)) next = next.x < *count ? problem.first(next.x) : int4{-1, 0, 0, 0};
    if (left == stop(2) && next.x >= 0) next = problem.second(next);
  }
  // K-steps to load before find_next has something to do, or the item ends.
  __device__ __forceinline__ int to_stop() const {
    return left > stop(6) ? left - stop(6) : left > 4 ? left - 4 : left > 2 ? left - 2 : 1;
  }

  // Is called after `run` calls of load, which are to_stop() at most.
  __device__ __forceinline__ void loaded(int run) {
    left -= run;
    find_next();
    if (left == 0) begin();
  }

  // Waits until the stage is full, and all threads have read the one before it.
  __device__ __forceinline__ void await_stage() {
    gpu::gathers_wait<kStages - 2>();
    __syncthreads();
  }

  template <int kGroups>
  __device__ __forceinline__ void compute(const int4& item) {
    const Addresses<kGroups, Problem::kColumns> at;
    float acc[4][2 * kGroups][4] = {};
    // Fragments are loaded one half of a k-step ahead of their products, across stages too.
    Fragments<kGroups, Problem::kColumns> fragments[2];
    int togo = problem.parts(item) * problem.steps(item);
    fragments[0].load(at, ring + stage, 0);
#pragma unroll 1
    while (togo > 0) {
      const int run = min(togo, to_stop());
#pragma unroll 1
      for (int step = 0; step < run; ++step) {
        fragments[1].load(at, ring + stage, 1);
        fragments[0].multiply(acc);
        load();  // into the stage before this one
        stage = behind(stage);
        await_stage();
        fragments[0].load(at, ring + stage, 0);  // behind the last step of the next item
        fragments[1].multiply(acc);
      }
      togo -= run;
      loaded(run);
    }
    problem.template finish<kGroups>(item, acc, memory + load_stage);
  }
};

template <typename Problem>
__global__ void __launch_bounds__(kThreads, 1)
    ring_gemm_sm80_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  if (problem.condition != nullptr && *problem.condition == 0) return;
  Cta<Problem> cta{problem, memory};
  cta.run();
}

template <typename Problem>
cudaError_t launch(const Problem& problem, int ctas, cudaStream_t stream) {
  const auto kernel = ring_gemm_sm80_kernel<Problem>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kSharedBytes,
                               stream, problem);
}

}  // namespace twell::ring_gemm
