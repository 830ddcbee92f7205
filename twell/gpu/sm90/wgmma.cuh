// SPDX-License-Identifier: Apache-2.0
// WGMMA, bf16 operands in shared memory with a 128-byte or 32-byte swizzle and f32 accumulators in
// registers, signed bytes with 32-bit sums, and e4m3 bytes with f32 sums, also with A in registers.
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
//
// Accumulator layout of one warpgroup, m64nN: warp w holds rows 16w .. 16w + 15; lane l = 4g + t
// holds of each block i of 8 columns  acc[4i + 0, 1]: row g,     columns 8i + 2t, 8i + 2t + 1
//                                     acc[4i + 2, 3]: row g + 8, the same columns.
#pragma once

#include <cstdint>

namespace twell::gpu {

// Orders earlier writes to the accumulator registers before later WGMMAs that use them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving arithmetic with the accumulator above the wait in front, which
// names no registers.
template <int Registers>
__device__ __forceinline__ void wgmma_hold(float (&acc)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Operand descriptors. K-major: rows of 64 elements (128 bytes), 8 rows per swizzle atom. The next
// 8 rows are 1024 bytes on, the next 16 elements of K 32 bytes.
__device__ __forceinline__ uint64_t k_major_operand(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3ffffu) >> 4);
}
// K-major with the 32-byte swizzle: rows of 16 elements (32 bytes), whose two 16-byte pieces are
// swapped in rows 4 to 7 of every eight.
__device__ __forceinline__ uint64_t narrow_k_major_operand(uint32_t address) {
  return (uint64_t{3} << 62) | (uint64_t{256 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3ffffu) >> 4);
}
// K-major with the 64-byte swizzle: rows of 64 bytes, whose 16-byte piece i is at i XOR (row / 2)
// % 4.
__device__ __forceinline__ uint64_t half_k_major_operand(uint32_t address) {
  return (uint64_t{2} << 62) | (uint64_t{512 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3ffffu) >> 4);
}
// N-major: 8 rows of K by 64 columns per swizzle atom. The next 8 rows are 1024 bytes on, the next
// 64 columns column_stride bytes, the next 16 rows of K 2048 bytes.
__device__ __forceinline__ uint64_t n_major_operand(uint32_t address, uint32_t column_stride) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{column_stride >> 4} << 16) |
         ((address & 0x3ffffu) >> 4);
}

// An accumulator's registers by N: their names in an instruction, and the operands behind them,
// with the constraint `c`.
#define TWELL_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TWELL_NAMES_48 TWELL_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TWELL_NAMES_64 \
  TWELL_NAMES_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TWELL_NAMES_80 TWELL_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TWELL_NAMES_96 \
  TWELL_NAMES_64       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TWELL_NAMES_128 \
  TWELL_NAMES_96        \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TWELL_NAMES_160 \
  TWELL_NAMES_128       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TWELL_NAMES_176 TWELL_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TWELL_NAMES_192 \
  TWELL_NAMES_160       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TWELL_NAMES_256                                                                          \
  TWELL_NAMES_192                                                                                \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define TWELL_ACC4(c, i) c(acc[i]), c(acc[i + 1]), c(acc[i + 2]), c(acc[i + 3])
#define TWELL_ACC8(c, i) TWELL_ACC4(c, i), TWELL_ACC4(c, i + 4)
#define TWELL_ACC16(c, i) TWELL_ACC8(c, i), TWELL_ACC8(c, i + 8)
#define TWELL_ACC_32(c) TWELL_ACC16(c, 0)
#define TWELL_ACC_48(c) TWELL_ACC_32(c), TWELL_ACC8(c, 16)
#define TWELL_ACC_64(c) TWELL_ACC_32(c), TWELL_ACC16(c, 16)
#define TWELL_ACC_80(c) TWELL_ACC_64(c), TWELL_ACC8(c, 32)
#define TWELL_ACC_96(c) TWELL_ACC_64(c), TWELL_ACC16(c, 32)
#define TWELL_ACC_128(c) TWELL_ACC_96(c), TWELL_ACC16(c, 48)
#define TWELL_ACC_160(c) TWELL_ACC_128(c), TWELL_ACC16(c, 64)
#define TWELL_ACC_176(c) TWELL_ACC_160(c), TWELL_ACC8(c, 80)
#define TWELL_ACC_192(c) TWELL_ACC_160(c), TWELL_ACC16(c, 80)
#define TWELL_ACC_256(c) TWELL_ACC_192(c), TWELL_ACC16(c, 96), TWELL_ACC16(c, 112)

// The instruction of m64nN: `shape` is its K and its types. Behind the N / 2 registers come the
// operands a, b and the predicate, whose numbers are the next three, and what `more` names.
#define TWELL_WGMMA(n, shape, c, a_at, b_at, p_at, more, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at                              \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape " {" TWELL_NAMES_##n \
               "}, %" #a_at ", %" #b_at ", p" more ";\n}\n"                            \
               : TWELL_ACC_##n(c)                                                      \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))__VA_OPT__(, ) __VA_ARGS__)

// acc[0 .. N/2) = A [64, 16] B^T [16, N] + (accumulate ? acc : 0). BIsNMajor: B is stored [16, N];
// AIsMMajor: A is stored [16, 64], and a comes from n_major_operand.
template <int N, bool BIsNMajor, bool AIsMMajor = false, int Registers>
__device__ __forceinline__ void wgmma(float (&acc)[Registers], uint64_t a, uint64_t b,
                                      bool accumulate) {
  static_assert(N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 128 || N == 160 ||
                N == 176 || N == 192 || N == 256);
  static_assert(2 * Registers >= N);
#define TWELL_BF16(n, a_at, b_at, p_at, b_major, a_major)                    \
  if constexpr (N == n) {                                                    \
    TWELL_WGMMA(n, "k16.f32.bf16.bf16", "+f", a_at, b_at, p_at,              \
                ", 1, 1, %" #a_major ", %" #b_major, "n"(BIsNMajor ? 1 : 0), \
                "n"(AIsMMajor ? 1 : 0));                                     \
  }
  TWELL_BF16(32, 16, 17, 18, 19, 20)
  TWELL_BF16(48, 24, 25, 26, 27, 28)
  TWELL_BF16(64, 32, 33, 34, 35, 36)
  TWELL_BF16(80, 40, 41, 42, 43, 44)
  TWELL_BF16(96, 48, 49, 50, 51, 52)
  TWELL_BF16(128, 64, 65, 66, 67, 68)
  TWELL_BF16(160, 80, 81, 82, 83, 84)
  TWELL_BF16(176, 88, 89, 90, 91, 92)
  TWELL_BF16(192, 96, 97, 98, 99, 100)
  TWELL_BF16(256, 128, 129, 130, 131, 132)
#undef TWELL_BF16
}

// The same product of signed bytes, with 32-bit sums: A [64, 32] B^T [32, N], both K-major. The
// next 32 elements of K are 32 bytes on.
template <int N>
__device__ __forceinline__ void wgmma_s8(int32_t (&acc)[128], uint64_t a, uint64_t b,
                                         bool accumulate) {
  static_assert(N == 128 || N == 256);
  if constexpr (N == 128) {
    TWELL_WGMMA(128, "k32.s32.s8.s8", "+r", 64, 65, 66, "");
  } else {
    TWELL_WGMMA(256, "k32.s32.s8.s8", "+r", 128, 129, 130, "");
  }
}

// The same product of e4m3 values, both operands K-major, A [64, 32] B^T [32, N]. The next 32
// elements of K are 32 bytes on. The tensor cores add with some 14 bits of mantissa.
template <int N, int Registers>
__device__ __forceinline__ void wgmma_e4m3(float (&acc)[Registers], uint64_t a, uint64_t b,
                                           bool accumulate) {
  static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256);
  static_assert(2 * Registers >= N);
#define TWELL_E4M3(n, a_at, b_at, p_at)                                    \
  if constexpr (N == n) {                                                  \
    TWELL_WGMMA(n, "k32.f32.e4m3.e4m3", "+f", a_at, b_at, p_at, ", 1, 1"); \
  }
  TWELL_E4M3(64, 32, 33, 34)
  TWELL_E4M3(80, 40, 41, 42)
  TWELL_E4M3(96, 48, 49, 50)
  TWELL_E4M3(128, 64, 65, 66)
  TWELL_E4M3(192, 96, 97, 98)
  TWELL_E4M3(256, 128, 129, 130)
#undef TWELL_E4M3
}

// The same product with A in registers. Lane 4g + t of warp w has rows 16w + g and 16w + g + 8: of
// the first a[0] and a[2], of the second a[1] and a[3], each four values, from 4t on and from
// 16 + 4t on. The registers may change once the product is complete.
__device__ __forceinline__ void wgmma_e4m3_128(float (&acc)[64], const uint32_t (&a)[4], uint64_t b,
                                               bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TWELL_NAMES_128
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
      : TWELL_ACC_128("+f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef TWELL_WGMMA

}  // namespace twell::gpu
