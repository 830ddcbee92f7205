// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/cpu/sparse_up_down.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_matrix.h"
#include "twell/format/twell.h"

namespace twell {
namespace {

Buffer<float> normal_values(int64_t rows, int64_t cols, uint64_t seed) {
  Buffer<float> out(rows * cols);
  for (int64_t i = 0; i < out.size(); ++i) out[i] = normal(seed, 0, static_cast<uint64_t>(i));
  return out;
}

// A gate with `density` of its entries positive, and row `heavy` (if any) fully active.
struct Case {
  int64_t m, d, f;
  float density;
  int64_t heavy = -1;
  bool gated = true;
};

class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        x_(normal_values(c.m, c.d, 1)),
        w_up_(normal_values(c.f, c.d, 2)),
        w_down_(normal_values(c.f, c.d, 3)),
        gate_(c.m * c.f),
        shape_{c.m, c.f, 64, 8},
        words_(shape_.words()),
        spill_(shape_.max_spill_slots() * shape_.tile),
        row_nnz_(c.m) {
    for (int64_t i = 0; i < gate_.size(); ++i) {
      const auto at = static_cast<uint64_t>(i);
      const bool fires = i / c.f == c.heavy || uniform(4, 0, at) < c.density;
      gate_[i] = fires ? std::abs(normal(5, 0, at)) + 0.01f : 0.0f;
    }
    twell_pack_reference<uint64_t>(gate_.matrix(c.m, c.f), twell());
  }

  using Op = void (*)(Context&, const SparseUpDown&);
  Buffer<float> run(Op op, int threads) {
    Buffer<float> y(c_.m * c_.d);
    for (float& value : y.span()) value = kNan;
    Context ctx(threads);
    op(ctx, {.gate = twell(),
             .x = c_.gated ? x_.matrix(c_.m, c_.d) : MatrixF(),
             .w_up = c_.gated ? w_up_.matrix(c_.f, c_.d) : MatrixF(),
             .w_down = w_down_.matrix(c_.f, c_.d),
             .y = y.matrix(c_.m, c_.d)});
    return y;
  }

  // Against sums in double. The rounding of a sum of n products in any order is of the order of
  // eps * sqrt(n) * (sum of their absolute values); here one such sum feeds another.
  void expect_correct(const Buffer<float>& y) const {
    std::vector<double> sum(static_cast<size_t>(c_.d));
    std::vector<double> norm(sum.size());
    for (int64_t row = 0; row < c_.m; ++row) {
      std::fill(sum.begin(), sum.end(), 0.0);
      std::fill(norm.begin(), norm.end(), 0.0);
      for (int64_t n = 0; n < c_.f; ++n) {
        const double g = gate_[row * c_.f + n];
        if (g == 0.0) continue;
        double u = 1.0;
        double u_norm = 1.0;
        if (c_.gated) up(row, n, u, u_norm);
        for (int64_t k = 0; k < c_.d; ++k) {
          const double w = w_down_[n * c_.d + k];
          sum[static_cast<size_t>(k)] += g * u * w;
          norm[static_cast<size_t>(k)] += g * u_norm * std::abs(w);
        }
      }
      const double eps = std::numeric_limits<float>::epsilon();
      const double steps = std::sqrt(static_cast<double>(c_.d + c_.f));
      for (int64_t k = 0; k < c_.d; ++k) {
        const auto at = static_cast<size_t>(k);
        ASSERT_NEAR(y[row * c_.d + k], sum[at], eps * steps * norm[at]) << row << " " << k;
      }
    }
  }

  Context& context() { return ctx_; }
  TwellWide twell() const {
    return {shape_, words_.data(), spill_.data(), shape_.max_spill_slots(), row_nnz_.data()};
  }
  const Buffer<float>& gate() const { return gate_; }

 private:
  void up(int64_t row, int64_t n, double& u, double& u_norm) const {
    u = 0.0;
    u_norm = 0.0;
    for (int64_t k = 0; k < c_.d; ++k) {
      const double term = static_cast<double>(x_[row * c_.d + k]) * w_up_[n * c_.d + k];
      u += term;
      u_norm += std::abs(term);
    }
  }

  Case c_;
  Buffer<float> x_, w_up_, w_down_, gate_;
  TwellShape shape_;
  Buffer<uint64_t> words_;
  Buffer<float> spill_;
  Buffer<int32_t> row_nnz_;
  Context ctx_{2};
};

bool equal_bits(const Buffer<float>& a, const Buffer<float>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size()) * sizeof(float)) == 0;
}

const Case kCases[] = {
    {1, 72, 600, 0.05f},        {1, 520, 200, 1.0f},         {2, 8, 8, 0.5f},
    {3, 264, 130, 0.0f},        {127, 72, 600, 0.03f},       {129, 40, 300, 0.3f},
    {130, 136, 256, 0.02f, 0},  {67, 24, 700, 0.01f, 66},    {40, 64, 200, 1.0f},
    {1, 72, 600, 0.05f, -1, 0}, {129, 40, 300, 0.1f, 3, 0},  {33, 16, 70000, 0.002f},
    {5, 8, 100, 1.0f, -1, 0},   {300, 2048, 64, 0.05f, 200}, {70, 1096, 50, 0.2f},
};

TEST(SparseUpDown, BothOrdersAreCorrectAndAgreeBitForBit) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << "M " << c.m << " D " << c.d << " F " << c.f << " density "
                                    << c.density << " gated " << c.gated);
    Problem problem(c);
    const Buffer<float> y = problem.run(row_fused_up_down, 1);
    problem.expect_correct(y);
    for (const int threads : {1, 2, 3, 7}) {
      EXPECT_TRUE(equal_bits(y, problem.run(row_fused_up_down, threads))) << threads;
      EXPECT_TRUE(equal_bits(y, problem.run(tile_union_up_down, threads))) << threads;
    }
  }
}

TEST(SparseUpDown, UnionSizeCountsActiveNeuronsOfEachTile) {
  const Case c{600, 2048, 90, 0.01f, 300};
  Problem problem(c);
  const int64_t tokens = tile_union_tokens(problem.context(), c.m, c.d);
  int64_t expected = 0;
  for (int64_t begin = 0; begin < c.m; begin += tokens) {
    for (int64_t n = 0; n < c.f; ++n) {
      bool active = false;
      for (int64_t row = begin; row < std::min(begin + tokens, c.m); ++row) {
        active = active || problem.gate()[row * c.f + n] > 0.0f;
      }
      expected += active;
    }
  }
  EXPECT_EQ(tile_union_size(problem.context(), problem.twell(), c.d), expected);
}

}  // namespace
}  // namespace twell
