// SPDX-License-Identifier: Apache-2.0
// One token's x as the screen's products take it (ops/decode), in shared memory: 16-bit
// integers and a step for every block of columns, the integers as two planes of signed bytes,
// 256 * high + low. The planes are two columns of one product.
#pragma once

#include "twell/ops/decode/weight_stream.cuh"
#include "twell/sm90/bf16_pair.cuh"

namespace twell::decode {

class ScreenX {
 public:
  __host__ __device__ static int bytes(int width) {
    return 2 * plane(width) + width / kScreenBlock * static_cast<int>(sizeof(float));
  }

  __device__ __forceinline__ ScreenX(uint8_t* memory, int width)
      : memory_(memory), plane_(plane(width)) {}

  // Four values of x, in bf16, by every lane of a half warp that holds a block of them.
  __device__ __forceinline__ void store(int quad, const uint2& x) const {
    uint32_t most = 0;
    for (const uint32_t pair : {x.x, x.y}) {
      most = max(most, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
    }
    most = __reduce_max_sync(0xffffu << (threadIdx.x & 16), most);
    const float largest = __uint_as_float(most << 16);  // not finite if a value is not
    const bool takes = screen_takes(largest);
    const float per_value = takes ? __fdividef(static_cast<float>(kScreenSteps), largest) : 0.0f;
    // Added to this, a small number is an integer in the lower half of the float's bits.
    constexpr float kToInteger = 12582912.0f;
    const float2 a = sm90::to_floats(x.x), b = sm90::to_floats(x.y);
    const uint32_t v[4] = {__float_as_uint(fmaf(a.x, per_value, kToInteger)),
                           __float_as_uint(fmaf(a.y, per_value, kToInteger)),
                           __float_as_uint(fmaf(b.x, per_value, kToInteger)),
                           __float_as_uint(fmaf(b.y, per_value, kToInteger))};
    // Byte 0 of each, or byte 1 of each where byte 0 counts as signed.
    const uint32_t low =
        __byte_perm(__byte_perm(v[0], v[1], 0x40), __byte_perm(v[2], v[3], 0x40), 0x5410);
    const uint32_t high = __byte_perm(__byte_perm(v[0] + 128, v[1] + 128, 0x51),
                                      __byte_perm(v[2] + 128, v[3] + 128, 0x51), 0x5410);
    *reinterpret_cast<uint32_t*>(memory_ + quad * 4) = high;
    *reinterpret_cast<uint32_t*>(memory_ + plane_ + quad * 4) = low;
    if (threadIdx.x % 16 == 0) {
      const float step = takes || largest == 0.0f ? largest * (1.0f / kScreenSteps) : NAN;
      reinterpret_cast<float*>(memory_ + 2 * plane_)[quad / kQuads] = step;
    }
  }

  // This lane's part of the product's second operand: 16 bytes of a plane, or zeros.
  __device__ __forceinline__ uint4 load(int block) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
    if (column > 1) return uint4{};
    return *reinterpret_cast<const uint4*>(memory_ + column * plane_ + block * kScreenBlock +
                                           lane % 4 * 16);
  }
  __device__ __forceinline__ float step(int block) const {
    return reinterpret_cast<const float*>(memory_ + 2 * plane_)[block];
  }

 private:
  static constexpr int kQuads = kScreenBlock / 4;
  // Lanes that read both planes at a time are in different banks.
  __host__ __device__ static int plane(int width) { return (width + 127) / 128 * 128 + 64; }

  uint8_t* memory_;
  int plane_;
};

}  // namespace twell::decode
