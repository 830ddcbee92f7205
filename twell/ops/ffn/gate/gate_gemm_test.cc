// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gate/gate_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

// TwELL storage that outlives a scope; poisoned.
struct Storage {
  explicit Storage(const TwellShape& shape)
      : words(shape.words()), spill(shape.max_spill_slots() * shape.tile), row_nnz(shape.rows) {
    for (uint64_t& word : words.span()) word = 0xdeadbeefdeadbeefULL;
    for (float& value : spill.span()) value = kNan;
    view = {shape, words.data(), spill.data(), shape.max_spill_slots(), row_nnz.data()};
  }
  Buffer<uint64_t> words;
  Buffer<float> spill;
  Buffer<int32_t> row_nnz;
  TwellWide view;
};

Buffer<float> random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  Buffer<float> out(rows * cols);
  for (int64_t i = 0; i < out.size(); ++i) out[i] = normal(seed, 0, static_cast<uint64_t>(i));
  return out;
}

// The packed rows against the scalar specification applied to relu(dense).
void expect_packs(const TwellShape& shape, const std::vector<float>& dense) {
  Storage fast(shape);
  const MatrixF gate = gate_dense(fast.view);
  std::vector<float> relu(dense.size());
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t col = 0; col < shape.cols; ++col) {
      const auto at = static_cast<size_t>(row * shape.cols + col);
      gate(row, col) = dense[at];
      relu[at] = dense[at] <= 0.0f ? 0.0f : dense[at];
    }
  }
  Context ctx(1);
  gate_pack(ctx, fast.view);

  Storage slow(shape);
  twell_pack_reference(ConstMatrixF(relu.data(), shape.rows, shape.cols), slow.view);
  for (int64_t row = 0; row < shape.rows; ++row) {
    ASSERT_EQ(fast.row_nnz[row], slow.row_nnz[row]);
    for (int64_t t = 0; t < shape.tiles(); ++t) {
      const uint64_t* a = fast.view.tile_words(row, t);
      const uint64_t* b = slow.view.tile_words(row, t);
      ASSERT_EQ(a[0], b[0]) << row << " " << t;
      const int64_t stored = fast.view.count(row, t);
      if (stored > shape.capacity()) {
        const float* x = fast.view.spilled_values(row, t);
        const float* y = slow.view.spilled_values(row, t);
        ASSERT_EQ(std::memcmp(x, y, sizeof(float) * static_cast<size_t>(shape.tile)), 0)
            << row << " " << t;
      } else {
        for (int64_t i = 1; i <= stored; ++i) ASSERT_EQ(a[i], b[i]) << row << " " << t;
      }
    }
  }
}

TEST(GatePack, EveryOccupancyOfATile) {
  for (const int32_t compression : {2, 4, 8}) {
    const TwellShape shape{257, 256 + 40, 256, compression};
    std::vector<float> dense(static_cast<size_t>(shape.rows * shape.cols), -1.0f);
    for (int64_t row = 0; row < shape.rows; ++row) {  // row r: r non-zeros in its first tile
      for (int64_t i = 0; i < row; ++i) {
        dense[static_cast<size_t>(row * shape.cols + i * 91 % 256)] = static_cast<float>(i + 1);
      }
      if (row % 3 == 0) std::fill_n(dense.data() + row * shape.cols + 256, 40, 0.5f);
    }
    expect_packs(shape, dense);
  }
}

TEST(GatePack, RandomShapes) {
  for (const auto& [rows, cols, tile, compression] : {std::array<int64_t, 4>{1, 8, 16, 8},
                                                      {5, 1000, 256, 8},
                                                      {3, 70000, 256, 8},
                                                      {4, 520, 8, 4},
                                                      {9, 257, 128, 2}}) {
    const TwellShape shape{rows, cols, static_cast<int32_t>(tile),
                           static_cast<int32_t>(compression)};
    for (const float shift : {-2.0f, -1.0f, 0.0f, 9.0f}) {
      std::vector<float> dense(static_cast<size_t>(rows * cols));
      for (size_t i = 0; i < dense.size(); ++i) dense[i] = normal(5, 0, i) + shift;
      expect_packs(shape, dense);
    }
  }
}

TEST(GatePack, NanAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> dense(300, -0.0f);
  dense[0] = kNan;
  dense[1] = inf;
  dense[2] = -inf;
  dense[3] = std::numeric_limits<float>::denorm_min();
  dense[299] = kNan;
  expect_packs({1, 300, 256, 8}, dense);
  for (size_t i = 10; i < 200; ++i) dense[i] = i % 2 == 0 ? kNan : 1.0f;  // a spilled tile
  expect_packs({1, 300, 256, 8}, dense);
}

TEST(GateGemm, MatchesDoubleReference) {
  for (const int64_t m : {1, 7, 65}) {
    const int64_t d = 72;
    const int64_t f = 600;
    const Buffer<float> x = random_matrix(m, d, 1);
    const Buffer<float> weight = random_matrix(f, d, 2);
    Storage out({m, f, 256, 8});
    Context ctx(2);
    const int64_t counted = gate_gemm(ctx, {x.matrix(m, d), weight.matrix(f, d), out.view});
    Buffer<float> gate(m * f);
    for (float& value : gate.span()) value = kNan;
    twell_unpack_reference(out.view, gate.matrix(m, f));
    int64_t nnz = 0;
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t col = 0; col < f; ++col) {
        double sum = 0.0;
        double norm = 0.0;  // sum of |terms|: bounds the rounding of any accumulation order
        for (int64_t k = 0; k < d; ++k) {
          const double term = static_cast<double>(x[row * d + k]) * weight[col * d + k];
          sum += term;
          norm += std::abs(term);
        }
        const double tolerance = std::numeric_limits<float>::epsilon() * std::sqrt(d) * norm;
        ASSERT_NEAR(gate[row * f + col], std::max(sum, 0.0), tolerance);
        nnz += gate[row * f + col] > 0.0f;
      }
    }
    EXPECT_EQ(counted, nnz);
  }
}

TEST(GateGemm, RepeatsBitForBit) {
  const int64_t m = 33, d = 64, f = 512;
  const Buffer<float> x = random_matrix(m, d, 3);
  const Buffer<float> weight = random_matrix(f, d, 4);
  Context ctx(2);
  Storage a({m, f, 256, 8});
  Storage b({m, f, 256, 8});
  gate_gemm(ctx, {x.matrix(m, d), weight.matrix(f, d), a.view});
  gate_gemm(ctx, {x.matrix(m, d), weight.matrix(f, d), b.view});
  EXPECT_EQ(std::memcmp(a.words.data(), b.words.data(), sizeof(uint64_t) * m * 2 * 32), 0);
}

}  // namespace
}  // namespace twell
