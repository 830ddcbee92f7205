// SPDX-License-Identifier: Apache-2.0
// WGMMA, bf16 operands in shared memory with a 128-byte or 32-byte swizzle and f32 accumulators in
// registers, signed bytes with 32-bit sums, and e4m3 bytes with f32 sums. Source: PTX ISA,
// "Asynchronous warpgroup level matrix instructions".
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
// N-major: 8 rows of K by 64 columns per swizzle atom. The next 8 rows are 1024 bytes on, the next
// 64 columns column_stride bytes, the next 16 rows of K 2048 bytes.
__device__ __forceinline__ uint64_t n_major_operand(uint32_t address, uint32_t column_stride) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{column_stride >> 4} << 16) |
         ((address & 0x3ffffu) >> 4);
}

#define TWELL_ACC4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define TWELL_ACC16(i) TWELL_ACC4(i), TWELL_ACC4(i + 4), TWELL_ACC4(i + 8), TWELL_ACC4(i + 12)

// acc[0 .. N/2) = A [64, 16] B^T [16, N] + (accumulate ? acc : 0). BIsNMajor: B is stored [16, N];
// AIsMMajor: A is stored [16, 64], and a comes from n_major_operand.
template <int N, bool BIsNMajor, bool AIsMMajor = false, int Registers>
__device__ __forceinline__ void wgmma(float (&acc)[Registers], uint64_t a, uint64_t b,
                                      bool accumulate) {
  static_assert(N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 128 || N == 160 ||
                N == 176 || N == 192 || N == 256);
  static_assert(2 * Registers >= N);
  if constexpr (N == 32) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, %20, %19;\n}\n"
        : TWELL_ACC16(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 48) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23}, "
        "%24, %25, p, 1, 1, %28, %27;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC4(16), TWELL_ACC4(20)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 64) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, %36, %35;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 80) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39}, "
        "%40, %41, p, 1, 1, %44, %43;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC4(32), TWELL_ACC4(36)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 96) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, p, 1, 1, %52, %51;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 128) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %68, %67;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 160) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
        "%77, %78, %79}, "
        "%80, %81, p, 1, 1, %84, %83;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 176) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
        "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87}, "
        "%88, %89, p, 1, 1, %92, %91;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64),
          TWELL_ACC4(80), TWELL_ACC4(84)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 192) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, p, 1, 1, %100, %99;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64),
          TWELL_ACC16(80)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  } else if constexpr (N == 256) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
        "%127}, "
        "%128, %129, p, 1, 1, %132, %131;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64),
          TWELL_ACC16(80), TWELL_ACC16(96), TWELL_ACC16(112)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(BIsNMajor ? 1 : 0),
          "n"(AIsMMajor ? 1 : 0));
  }
}

#undef TWELL_ACC16
#undef TWELL_ACC4

#define TWELL_INT4(i) "+r"(acc[i]), "+r"(acc[i + 1]), "+r"(acc[i + 2]), "+r"(acc[i + 3])
#define TWELL_INT16(i) TWELL_INT4(i), TWELL_INT4(i + 4), TWELL_INT4(i + 8), TWELL_INT4(i + 12)

// The same product of signed bytes, with 32-bit sums: A [64, 32] B^T [32, N], both K-major. The
// next 32 elements of K are 32 bytes on.
template <int N>
__device__ __forceinline__ void wgmma_s8(int32_t (&acc)[128], uint64_t a, uint64_t b,
                                         bool accumulate) {
  static_assert(N == 128 || N == 256);
  if constexpr (N == 128) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p;\n}\n"
        : TWELL_INT16(0), TWELL_INT16(16), TWELL_INT16(32), TWELL_INT16(48)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
        "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
        "%126, %127}, "
        "%128, %129, p;\n}\n"
        : TWELL_INT16(0), TWELL_INT16(16), TWELL_INT16(32), TWELL_INT16(48), TWELL_INT16(64),
          TWELL_INT16(80), TWELL_INT16(96), TWELL_INT16(112)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

#undef TWELL_INT16
#undef TWELL_INT4

#define TWELL_ACC4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define TWELL_ACC16(i) TWELL_ACC4(i), TWELL_ACC4(i + 4), TWELL_ACC4(i + 8), TWELL_ACC4(i + 12)

// The same product of e4m3 values, both operands K-major, A [64, 32] B^T [32, N]. The next 32
// elements of K are 32 bytes on. The tensor cores add with some 14 bits of mantissa.
template <int N, int Registers>
__device__ __forceinline__ void wgmma_e4m3(float (&acc)[Registers], uint64_t a, uint64_t b,
                                           bool accumulate) {
  static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256);
  static_assert(2 * Registers >= N);
  if constexpr (N == 80) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39}, "
        "%40, %41, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC4(32), TWELL_ACC4(36)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else if constexpr (N == 96) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else if constexpr (N == 64) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else if constexpr (N == 128) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else if constexpr (N == 192) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64),
          TWELL_ACC16(80)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else if constexpr (N == 256) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
        "%127}, "
        "%128, %129, p, 1, 1;\n}\n"
        : TWELL_ACC16(0), TWELL_ACC16(16), TWELL_ACC16(32), TWELL_ACC16(48), TWELL_ACC16(64),
          TWELL_ACC16(80), TWELL_ACC16(96), TWELL_ACC16(112)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

#undef TWELL_ACC16
#undef TWELL_ACC4

}  // namespace twell::gpu
