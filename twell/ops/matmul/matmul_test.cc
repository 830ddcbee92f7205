// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/matmul.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <pthread.h>
#include <sys/time.h>
#include <ucontext.h>

#include <cmath>
#include <csignal>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"
#include "twell/ops/matmul/compute.h"

namespace twell {
namespace {

constexpr double kEps = 0x1p-23;

struct Case {
  int64_t m, n, k;
  bool trans_a, trans_b;
  float beta;
  int64_t gap;  // elements between the end of a row and the next
};

double at(const TestMatrix& x, bool transposed, int64_t row, int64_t col) {
  return transposed ? x(col, row) : x(row, col);
}

void expect_product(const Case& c, const TestMatrix& a, const TestMatrix& b,
                    const TestMatrix& before, const TestMatrix& out) {
  for (int64_t row = 0; row < c.m; ++row) {
    for (int64_t col = 0; col < c.n; ++col) {
      double sum = c.beta == 0 ? 0 : c.beta * double{before(row, col)};
      const double start = std::abs(sum);
      double norm_a = 0, norm_b = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const double x = at(a, c.trans_a, row, i), y = at(b, c.trans_b, i, col);
        sum += x * y;
        norm_a += x * x;
        norm_b += y * y;
      }
      // Rounding of a K-term dot product in any order, and of the addition to C.
      const double tolerance =
          kEps * (std::sqrt(static_cast<double>(c.k) * norm_a * norm_b) + std::abs(sum) + start);
      ASSERT_NEAR(out(row, col), sum, tolerance) << "row " << row << " col " << col;
    }
  }
}

void check(const Case& c, int threads) {
  SCOPED_TRACE(::testing::Message()
               << "m " << c.m << " n " << c.n << " k " << c.k << " trans " << c.trans_a << c.trans_b
               << " beta " << c.beta << " gap " << c.gap << " threads " << threads);
  const auto a =
      TestMatrix::random(c.trans_a ? c.k : c.m, c.trans_a ? c.m : c.k, /*stream=*/1, c.gap);
  const auto b =
      TestMatrix::random(c.trans_b ? c.n : c.k, c.trans_b ? c.k : c.n, /*stream=*/2, c.gap);
  const auto before =
      c.beta == 0 ? TestMatrix(c.m, c.n, c.gap) : TestMatrix::random(c.m, c.n, 3, c.gap);
  Context ctx(threads);
  TestMatrix out = before, again = before;
  matmul(ctx, {a.view(), b.view(), out.view(), c.trans_a, c.trans_b, c.beta});
  matmul(ctx, {a.view(), b.view(), again.view(), c.trans_a, c.trans_b, c.beta});
  expect_product(c, a, b, before, out);
  EXPECT_TRUE(out.gaps_untouched());
  EXPECT_TRUE(out.same_bits(again));
}

TEST(Matmul, RaggedShapes) {
  const int64_t shapes[][3] = {{1, 1, 1},    {1, 33, 65}, {1, 300, 128}, {2, 65, 31},
                               {3, 16, 200}, {4, 9, 3},   {7, 129, 64},  {16, 48, 17},
                               {17, 1, 33},  {33, 65, 1}, {64, 64, 64},  {127, 129, 65}};
  for (const auto& [m, n, k] : shapes) {
    for (const int transposes : {0, 1, 2, 3}) {
      for (const float beta : {0.0f, 1.0f}) {
        for (const int64_t gap : {0, 5}) {
          check({m, n, k, (transposes & 1) != 0, (transposes & 2) != 0, beta, gap}, 2);
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

// Few rows, and many that are widened block by block, against the same values in f32. Our own
// kernels add in one order for every dtype, so their results agree to the bit.
TEST(Matmul, StoredWeightsGiveTheProductOfTheirValues) {
  struct Shape {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Shape{1, 301, 260}, {3, 130, 67}, {16, 129, 40}, {17, 500, 2100}}) {
    for (const bool trans_b : {false, true}) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        for (const float beta : {0.0f, 1.0f}) {
          SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << " trans " << trans_b
                                            << " " << dtype_name(dtype) << " beta " << beta);
          auto b = TestMatrix::random(trans_b ? n : k, trans_b ? k : n, 2);
          std::vector<uint16_t> stored(static_cast<size_t>(n * k));
          for (size_t i = 0; i < stored.size(); ++i) {
            float& value = b.data()[i];
            stored[i] = dtype == DType::kBF16 ? to_bf16(value).bits : float_to_f16(value);
            value = dtype == DType::kBF16 ? to_float(BF16{stored[i]}) : f16_to_float(stored[i]);
          }
          const auto a = TestMatrix::random(m, k, 1), before = TestMatrix::random(m, n, 3, 5);
          TestMatrix want = before, got = before;
          Context ctx(3);
          const WeightMatrix view(stored.data(), dtype, b.rows(), b.cols());
          matmul(ctx, {a.view(), b.view(), want.view(), false, trans_b, beta});
          matmul(ctx, {a.view(), view, got.view(), false, trans_b, beta});
          expect_product({m, n, k, false, trans_b, beta, 5}, a, b, before, got);
          EXPECT_TRUE(got.gaps_untouched());
          if (m <= 16) {
            EXPECT_TRUE(got.same_bits(want));
          }
        }
      }
    }
  }
}

// Many rows are those of the widened values; few have products of integers, which
// byte_products_test.cc compares to the bit: here that their scales are applied, and are needed.
TEST(Matmul, SignedBytesGiveTheProductOfTheirScaledValues) {
  struct Shape {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Shape{1, 301, 260},
                                {1, 1, 1},
                                {3, 130, 67},
                                {5, 63, 255},
                                {4, 129, 256},
                                {2, 200, 771},
                                {16, 129, 40},
                                {17, 500, 2100}}) {
    for (const bool trans_b : {false, true}) {
      SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << " trans " << trans_b);
      std::vector<int8_t> bytes(static_cast<size_t>(n * k));
      std::vector<float> scales(static_cast<size_t>(n));
      for (size_t i = 0; i < scales.size(); ++i) {
        scales[i] = std::ldexp(1.0f, static_cast<int>(i % 9) - 12);
      }
      auto b = TestMatrix(trans_b ? n : k, trans_b ? k : n);
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<int8_t>(static_cast<int>(i * 7919 % 255) - 127);
        const size_t cols = static_cast<size_t>(b.cols());
        b.data()[i] = static_cast<float>(bytes[i]) * scales[trans_b ? i / cols : i % cols];
      }
      const auto a = TestMatrix::random(m, k, 1);
      TestMatrix want(m, n, 5), got(m, n, 5);
      WeightMatrix stored(bytes.data(), DType::kI8, b.rows(), b.cols());
      stored.scales = scales.data();
      Context ctx(3);
      matmul(ctx, {a.view(), b.view(), want.view(), false, trans_b, 0.0f});
      matmul(ctx, {a.view(), stored, got.view(), false, trans_b, 0.0f});
      EXPECT_TRUE(got.gaps_untouched());
      if (m > 16) {
        expect_product({m, n, k, false, trans_b, 0.0f, 5}, a, b, want, got);
      } else {
        for (int64_t row = 0; row < m; ++row) {
          double largest = 0;
          for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(double{a(row, i)}));
          for (int64_t col = 0; col < n; ++col) {
            double size = 0;
            for (int64_t i = 0; i < k; ++i) size += std::abs(at(b, trans_b, i, col));
            EXPECT_NEAR(got(row, col), want(row, col),
                        0.5 / 32767 * largest * size + 1e-6 * std::abs(want(row, col)));
          }
        }
      }
      if (m <= 16) {
        Context one(1);
        TestMatrix again(m, n, 5);
        matmul(one, {a.view(), stored, again.view(), false, trans_b, 0.0f});
        EXPECT_TRUE(got.same_bits(again));
      }
      EXPECT_THROW(matmul(ctx, {a.view(), stored, got.view(), false, trans_b, 1.0f}), Error);
      stored.scales = nullptr;
      EXPECT_THROW(matmul(ctx, {a.view(), stored, got.view(), false, trans_b, 0.0f}), Error);
    }
  }
}

// What this processor can compute of a product of rounded factors.
std::vector<MatmulCompute> rounded_computes() {
  std::vector<MatmulCompute> computes = {MatmulCompute::kRoundedF32};
  if (has_bf16_products()) computes.push_back(MatmulCompute::kBF16);
  return computes;
}

void round_values(TestMatrix& matrix) {
  for (int64_t i = 0; i < matrix.rows() * matrix.cols(); ++i) {
    float& value = matrix(i / matrix.cols(), i % matrix.cols());
    value = to_float(to_bf16(value));
  }
}

// The last shape takes several blocks of B, and so much time that it is not taken in all ways.
TEST(Matmul, Bf16ProductsAreThoseOfRoundedFactors) {
  struct Shape {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Shape{17, 1, 33}, {33, 65, 1}, {127, 129, 65}, {17, 400, 5000}}) {
    for (const int transposes : {0, 1, 2, 3}) {
      const bool trans_a = (transposes & 1) != 0, trans_b = (transposes & 2) != 0;
      for (const float beta : {0.0f, 1.0f}) {
        if (k == 5000 && (trans_a || (beta == 0.0f) == trans_b)) continue;
        const auto a = TestMatrix::random(trans_a ? k : m, trans_a ? m : k, 1, 3),
                   b = TestMatrix::random(trans_b ? n : k, trans_b ? k : n, 2, 3),
                   before = TestMatrix::random(m, n, 3, 5);
        TestMatrix rounded_a = a, rounded_b = b;
        round_values(rounded_a);
        round_values(rounded_b);
        std::vector<BF16> stored;
        for (int64_t i = 0; i < b.rows() * b.cols(); ++i) {
          stored.push_back(to_bf16(b(i / b.cols(), i % b.cols())));
        }
        for (const MatmulCompute compute : rounded_computes()) {
          SCOPED_TRACE(::testing::Message()
                       << m << " x " << n << " x " << k << " trans " << trans_a << trans_b
                       << " beta " << beta << " compute " << static_cast<int>(compute));
          Context ctx(2);
          set_matmul_compute(ctx, compute);
          TestMatrix got = before, of_stored = before;
          matmul(ctx, {a.view(), b.view(), got.view(), trans_a, trans_b, beta});
          const WeightMatrix view(stored.data(), DType::kBF16, b.rows(), b.cols());
          matmul(ctx, {a.view(), view, of_stored.view(), trans_a, trans_b, beta});
          const Case c{m, n, k, trans_a, trans_b, beta, 5};
          expect_product(c, rounded_a, rounded_b, before, got);
          expect_product(c, rounded_a, rounded_b, before, of_stored);
          EXPECT_TRUE(got.gaps_untouched());
        }
      }
    }
  }
}

TEST(Matmul, Bf16ProductsRoundTheActivationsOfSignedBytesAlone) {
  const int64_t m = 20, n = 70, k = 96;
  std::vector<int8_t> bytes(static_cast<size_t>(n * k));
  const std::vector<float> scales(static_cast<size_t>(n), 0.25f);
  TestMatrix b(n, k), a = TestMatrix::random(m, k, 1);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<int8_t>(static_cast<int>(i * 7919 % 255) - 127);
    b.data()[i] = 0.25f * static_cast<float>(bytes[i]);
  }
  WeightMatrix stored(bytes.data(), DType::kI8, n, k);
  stored.scales = scales.data();
  for (const MatmulCompute compute : rounded_computes()) {
    Context ctx(2);
    set_matmul_compute(ctx, compute);
    TestMatrix got(m, n);
    matmul(ctx, {a.view(), stored, got.view(), false, true, 0.0f});
    TestMatrix rounded = a;
    round_values(rounded);
    expect_product({m, n, k, false, true, 0.0f, 0}, rounded, b, got, got);
  }
}

TEST(Matmul, OnlyManyRowsAreRoundedToBf16) {
  const auto b = TestMatrix::random(40, 30, 2);
  for (const int64_t m : {1, 16, 17}) {
    const auto a = TestMatrix::random(m, 30, 1);
    Context exact(1), rounded(1);
    set_matmul_compute(rounded, MatmulCompute::kRoundedF32);
    TestMatrix want(m, 40), got(m, 40);
    matmul(exact, {a.view(), b.view(), want.view(), false, true, 0.0f});
    matmul(rounded, {a.view(), b.view(), got.view(), false, true, 0.0f});
    EXPECT_EQ(got.same_bits(want), m <= 16) << m;
  }
}

TEST(Matmul, ValuesThatAreNotFiniteStaySoInBf16) {
  for (const MatmulCompute compute : rounded_computes()) {
    for (const float bad : {kNan, INFINITY}) {
      Context ctx(1);
      set_matmul_compute(ctx, compute);
      auto a = TestMatrix::random(20, 32, 1);
      const auto b = TestMatrix::random(32, 8, 2);
      a(3, 5) = bad;
      TestMatrix got(20, 8);
      matmul(ctx, {a.view(), b.view(), got.view()});
      for (int64_t col = 0; col < 8; ++col) {
        EXPECT_FALSE(std::isfinite(got(3, col)));
        EXPECT_TRUE(std::isfinite(got(4, col)));
      }
    }
  }
}

TEST(Matmul, Bf16ProductsAreRefusedWhereTheProcessorHasNone) {
  EXPECT_EQ(parse_matmul_compute("f32"), MatmulCompute::kF32);
  EXPECT_THROW(parse_matmul_compute("fp8"), InputError);
  if (has_bf16_products()) {
    EXPECT_EQ(parse_matmul_compute("bf16"), MatmulCompute::kBF16);
  } else {
    EXPECT_THROW(parse_matmul_compute("bf16"), InputError);
  }
}

TEST(Matmul, EmptyDimensions) {
  Context ctx(1);
  float unused = kNan;
  std::vector<float> c(6, 2.0f);
  matmul(ctx, {{&unused, 2, 0}, ConstMatrixF(&unused, 0, 3), {c.data(), 2, 3}, false, false, 1.0f});
  EXPECT_EQ(c, std::vector<float>(6, 2.0f));
  matmul(ctx, {{&unused, 2, 0}, ConstMatrixF(&unused, 0, 3), {c.data(), 2, 3}});
  EXPECT_EQ(c, std::vector<float>(6, 0.0f));
  matmul(ctx, {{&unused, 0, 4}, ConstMatrixF(&unused, 4, 0), {&unused, 0, 0}});
  EXPECT_TRUE(std::isnan(unused));
}

TEST(Matmul, EachContextKeepsItsThreads) {
  Context one(1), three(3);
  const int before = omp_get_max_threads();
  const auto x = TestMatrix::random(64, 64, 1);
  TestMatrix y(64, 64);
  matmul(one, {x.view(), x.view(), y.view()});
  EXPECT_EQ(omp_get_max_threads(), before);
}

#if defined(__linux__) && defined(__x86_64__)
struct StackSeen {
  uintptr_t begin, end;  // of this thread's stack
  int signals = 0, elsewhere = 0;
};
StackSeen stack_seen;  // handlers access globals only

void look_at_stack(int, siginfo_t*, void* interrupted) {
  const auto& registers = static_cast<const ucontext_t*>(interrupted)->uc_mcontext.gregs;
  const auto stack = static_cast<uintptr_t>(registers[REG_RSP]);
  ++stack_seen.signals;
  if (stack < stack_seen.begin || stack >= stack_seen.end) ++stack_seen.elsewhere;
}

// A handler without a stack of its own would overwrite memory otherwise.
TEST(Matmul, SignalsInterruptNoKernelWhoseStackPointerIsElsewhere) {
  pthread_attr_t attributes;
  void* begin = nullptr;
  size_t bytes = 0;
  ASSERT_EQ(pthread_getattr_np(pthread_self(), &attributes), 0);
  ASSERT_EQ(pthread_attr_getstack(&attributes, &begin, &bytes), 0);
  pthread_attr_destroy(&attributes);
  stack_seen = {reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(begin) + bytes};

  std::vector<std::byte> memory(64 * 1024);
  const stack_t own{.ss_sp = memory.data(), .ss_flags = 0, .ss_size = memory.size()};
  stack_t stack_before{};
  struct sigaction action {
  }, action_before{};
  action.sa_sigaction = look_at_stack;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ASSERT_EQ(sigaltstack(&own, &stack_before), 0);
  ASSERT_EQ(sigaction(SIGALRM, &action, &action_before), 0);
  const itimerval often{.it_interval = {0, 100}, .it_value = {0, 100}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  Context ctx(2);
  const auto x = TestMatrix::random(256, 64, 1), weight = TestMatrix::random(1024, 64, 2),
             d_y = TestMatrix::random(256, 1024, 3);
  TestMatrix d_x(256, 64), d_weight(1024, 64);
  for (int i = 0; i < 400; ++i) {
    linear_backward(ctx, {x.view(), weight.view(), d_y.view(), d_x.view(), 0.0f, d_weight.view()});
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &action_before, nullptr);
  sigaltstack(&stack_before, nullptr);
  EXPECT_GT(stack_seen.signals, 0);
  EXPECT_EQ(stack_seen.elsewhere, 0) << "of " << stack_seen.signals;
}
#endif

TEST(Matmul, ShapesThatDisagree) {
  Context ctx(1);
  std::vector<float> x(64);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, ConstMatrixF(x.data(), 4, 5), {x.data(), 2, 5}}),
               Error);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, ConstMatrixF(x.data(), 3, 5), {x.data(), 2, 4}}),
               Error);
  EXPECT_THROW(matmul(ctx, {{x.data(), 2, 3}, ConstMatrixF(x.data(), 3, 5), {x.data(), 3, 5}}),
               Error);
}

TEST(Linear, ForwardAndBackward) {
  Context ctx(2);
  const int64_t m = 9, in = 20, out = 13;
  const auto x = TestMatrix::random(m, in, 1), weight = TestMatrix::random(out, in, 2),
             d_y = TestMatrix::random(m, out, 3), d_x0 = TestMatrix::random(m, in, 4),
             d_weight0 = TestMatrix::random(out, in, 5);
  TestMatrix y(m, out), d_x = d_x0, d_weight = d_weight0;
  linear_forward(ctx, x.view(), weight.view(), y.view());
  expect_product({m, out, in, false, true, 0, 0}, x, weight, y, y);
  linear_backward(ctx, {x.view(), weight.view(), d_y.view(), d_x.view(), 1.0f, d_weight.view()});
  expect_product({m, in, out, false, false, 1, 0}, d_y, weight, d_x0, d_x);
  expect_product({out, in, m, true, false, 1, 0}, d_y, x, d_weight0, d_weight);

  TestMatrix written(m, in);
  d_weight = d_weight0;
  linear_backward(ctx,
                  {x.view(), weight.view(), d_y.view(), written.view(), 0.0f, d_weight.view()});
  expect_product({m, in, out, false, false, 0, 0}, d_y, weight, written, written);
  linear_backward(ctx, {x.view(), weight.view(), d_y.view(), {}, 0.0f, d_weight.view()});
}

}  // namespace
}  // namespace twell
