// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/bf16_rounding.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "twell/format/weight_matrix.h"

namespace twell {
namespace {

std::vector<BF16> rounded(const void* values, DType dtype, size_t count) {
  std::vector<BF16> out(count + 1, BF16{0x1234});
  round_to_bf16(static_cast<const std::byte*>(values), dtype, static_cast<int64_t>(count),
                out.data());
  EXPECT_EQ(out.back().bits, 0x1234);
  out.pop_back();
  return out;
}

// Every upper half, with lower halves at and about the places where the rounding changes.
TEST(Bf16Rounding, IsThatOfOneValue) {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  const std::vector<BF16> got = rounded(values.data(), DType::kF32, values.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) wrong += got[i].bits != to_bf16(values[i]).bits;
  EXPECT_EQ(wrong, 0);
}

TEST(Bf16Rounding, TakesEveryTypeAndLength) {
  for (size_t count = 0; count <= 70; ++count) {
    std::vector<float> floats(count);
    std::vector<uint16_t> halves(count);
    std::vector<int8_t> bytes(count);
    for (size_t i = 0; i < count; ++i) {
      floats[i] = 1.0f + 0.001f * static_cast<float>(i * i);
      halves[i] = float_to_f16(-floats[i]);
      bytes[i] = static_cast<int8_t>(static_cast<int>(i * 37 % 256) - 128);
    }
    const std::vector<BF16> of_floats = rounded(floats.data(), DType::kF32, count),
                            of_halves = rounded(halves.data(), DType::kF16, count),
                            again = rounded(of_floats.data(), DType::kBF16, count),
                            of_bytes = rounded(bytes.data(), DType::kI8, count);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(of_floats[i].bits, to_bf16(floats[i]).bits);
      ASSERT_EQ(of_halves[i].bits, to_bf16(f16_to_float(halves[i])).bits);
      ASSERT_EQ(again[i].bits, of_floats[i].bits);
      ASSERT_EQ(to_float(of_bytes[i]), static_cast<float>(bytes[i]));
    }
  }
}

}  // namespace
}  // namespace twell
