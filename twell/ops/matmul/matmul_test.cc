// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/matmul.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  int64_t m, n, k;
  bool trans_a, trans_b;
  float beta;
  int64_t pad;  // extra elements between rows
};

// A matrix with `pad` NaN between its rows, so that a read or write of the gap is seen.
struct Padded {
  Padded(int64_t rows, int64_t cols, int64_t pad, uint64_t stream)
      : values(static_cast<size_t>(rows * (cols + pad)), kNan),
        view(values.data(), rows, cols, cols + pad) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      view(i / cols, i % cols) = normal(7, stream, static_cast<uint64_t>(i));
    }
  }
  std::vector<float> values;
  MatrixF view;
};

double at(ConstMatrixF x, bool transposed, int64_t row, int64_t col) {
  return transposed ? x(col, row) : x(row, col);
}

void check(const Case& c, int threads) {
  SCOPED_TRACE(::testing::Message()
               << "m " << c.m << " n " << c.n << " k " << c.k << " trans " << c.trans_a << c.trans_b
               << " beta " << c.beta << " pad " << c.pad << " threads " << threads);
  Padded a(c.trans_a ? c.k : c.m, c.trans_a ? c.m : c.k, c.pad, 1);
  Padded b(c.trans_b ? c.n : c.k, c.trans_b ? c.k : c.n, c.pad, 2);
  const Padded start(c.m, c.n, c.pad, 3);
  Padded out = start;
  out.view.data = out.values.data();
  if (c.beta == 0) std::fill(out.values.begin(), out.values.end(), kNan);

  Context ctx(threads);
  const Matmul problem{a.view, b.view, out.view, c.trans_a, c.trans_b, c.beta};
  matmul(ctx, problem);

  for (int64_t row = 0; row < c.m; ++row) {
    for (int64_t col = 0; col < c.n; ++col) {
      double sum = c.beta == 0 ? 0 : c.beta * static_cast<double>(start.view(row, col));
      double norm_a = 0, norm_b = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const double x = at(a.view, c.trans_a, row, i), y = at(b.view, c.trans_b, i, col);
        sum += x * y;
        norm_a += x * x;
        norm_b += y * y;
      }
      // Rounding of a K-term dot product in any order: eps * sqrt(K) * |a| |b|, plus the result's.
      const double tolerance =
          0x1p-23 * (std::sqrt(static_cast<double>(c.k)) * std::sqrt(norm_a * norm_b) +
                     std::abs(sum) + std::abs(start.view(row, col)));
      ASSERT_NEAR(out.view(row, col), sum, tolerance) << "row " << row << " col " << col;
    }
    for (int64_t gap = c.n; row + 1 < c.m && gap < c.n + c.pad; ++gap) {
      ASSERT_TRUE(std::isnan(out.view.row(row)[gap])) << "wrote between rows";
    }
  }

  if (c.beta != 0) out.values = start.values;
  const std::vector<float> first = [&] {
    std::vector<float> values = out.values;
    matmul(ctx,
           {a.view, b.view, {values.data(), c.m, c.n, c.n + c.pad}, c.trans_a, c.trans_b, c.beta});
    return values;
  }();
  matmul(ctx, problem);
  EXPECT_EQ(std::memcmp(first.data(), out.values.data(), first.size() * sizeof(float)), 0)
      << "not repeatable";
}

TEST(Matmul, RaggedShapes) {
  const int64_t shapes[][3] = {{1, 1, 1},    {1, 33, 65},  {1, 300, 128}, {2, 65, 31},
                               {3, 16, 200}, {7, 129, 64}, {16, 48, 17},  {17, 1, 33},
                               {33, 65, 1},  {64, 64, 64}, {127, 129, 65}};
  for (const auto& [m, n, k] : shapes) {
    for (const int transposes : {0, 1, 2, 3}) {
      for (const float beta : {0.0f, 1.0f}) {
        for (const int64_t pad : {0, 5}) {
          check({m, n, k, (transposes & 1) != 0, (transposes & 2) != 0, beta, pad}, 2);
        }
      }
    }
  }
}

TEST(Matmul, ThreadCounts) {
  for (const int threads : {1, 2, 3}) {
    for (const int64_t m : {1, 5, 70}) {
      check({m, 301, 260, false, true, 0.0f, 0}, threads);
      check({m, 301, 260, false, false, 1.0f, 0}, threads);
      check({m, 301, 260, true, false, 1.0f, 0}, threads);
    }
  }
}

TEST(Matmul, EmptyDimensions) {
  Context ctx(1);
  std::vector<float> c(6, 2.0f);
  float unused = kNan;
  matmul(ctx, {{&unused, 2, 0}, {&unused, 0, 3}, {c.data(), 2, 3}, false, false, 1.0f});
  EXPECT_EQ(c, std::vector<float>(6, 2.0f));
  matmul(ctx, {{&unused, 2, 0}, {&unused, 0, 3}, {c.data(), 2, 3}});
  EXPECT_EQ(c, std::vector<float>(6, 0.0f));
  matmul(ctx, {{&unused, 0, 4}, {&unused, 4, 0}, {&unused, 0, 0}});
  EXPECT_TRUE(std::isnan(unused));
}

TEST(Matmul, TeamSizeOfTheCallerIsKept) {
  Context one(1), three(3);
  const int before = omp_get_max_threads();
  std::vector<float> x(64 * 64, 1.0f), y(64 * 64);
  matmul(one, {{x.data(), 64, 64}, {x.data(), 64, 64}, {y.data(), 64, 64}});
  EXPECT_EQ(omp_get_max_threads(), before);
  EXPECT_EQ(y[63], 64.0f);
}

TEST(Matmul, ShapesThatDisagree) {
  Context ctx(1);
  std::vector<float> x(64);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, {x.data(), 4, 5}, {x.data(), 2, 5}}), Error);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, {x.data(), 3, 5}, {x.data(), 2, 4}}), Error);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, {x.data(), 3, 5}, {x.data(), 3, 5}}), Error);
}

TEST(Linear, ForwardAndBackwardMatchMatmul) {
  Context ctx(2);
  const int64_t m = 9, in = 20, out = 13;
  Padded x(m, in, 0, 1), w(out, in, 0, 2), d_y(m, out, 0, 3), d_x(m, in, 0, 4), d_w(out, in, 0, 5);
  const Padded d_x0 = d_x, d_w0 = d_w;
  d_x.view.data = d_x.values.data();
  d_w.view.data = d_w.values.data();
  Padded y(m, out, 0, 6);
  linear_forward(ctx, x.view, w.view, y.view);
  linear_backward(ctx, {x.view, w.view, d_y.view, d_x.view, 1.0f, d_w.view});
  const double tolerance = 1e-4;  // far above eps * K * max |a||b| < 2^-23 * 20 * 16
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += double{x.view(row, i)} * w.view(o, i);
      EXPECT_NEAR(y.view(row, o), sum, tolerance);
    }
    for (int64_t i = 0; i < in; ++i) {
      double sum = d_x0.values[static_cast<size_t>(row * in + i)];
      for (int64_t o = 0; o < out; ++o) sum += double{d_y.view(row, o)} * w.view(o, i);
      EXPECT_NEAR(d_x.view(row, i), sum, tolerance);
    }
  }
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t i = 0; i < in; ++i) {
      double sum = d_w0.values[static_cast<size_t>(o * in + i)];
      for (int64_t row = 0; row < m; ++row) sum += double{d_y.view(row, o)} * x.view(row, i);
      EXPECT_NEAR(d_w.view(o, i), sum, tolerance);
    }
  }
  linear_backward(ctx, {x.view, w.view, d_y.view, {}, 0.0f, d_w.view});  // no d_x wanted
}

}  // namespace
}  // namespace twell
