// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

constexpr double kEps = 0x1p-23;

struct Lengths {
  int64_t q_len, kv_len;
};

// Sequences laid out one after the other in q, each with keys and values of its own.
struct Problem {
  Problem(AttentionShape shape_in, std::vector<Lengths> lengths, float magnitude = 1.0f)
      : shape(shape_in), q(0, 0) {
    int64_t rows = 0;
    for (const auto& [q_len, kv_len] : lengths) {
      const int64_t width = shape.kv_heads * shape.head_dim;
      k.push_back(TestMatrix::random(kv_len, width, 10 + k.size(), 3));
      v.push_back(TestMatrix::random(kv_len, width, 50 + v.size(), 6));
      sequences.push_back({rows, q_len, k.back().view(), v.back().view()});
      rows += q_len;
    }
    q = TestMatrix::random(rows, shape.heads * shape.head_dim, 1, 5);
    for (int64_t i = 0; i < rows * q.cols(); ++i) q(i / q.cols(), i % q.cols()) *= magnitude;
  }
  AttentionShape shape;
  std::vector<TestMatrix> k, v;
  std::vector<AttentionSequence> sequences;
  TestMatrix q;
};

std::vector<double> values_of(const float* x, int64_t n) { return {x, x + n}; }

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double norm(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }

// One head of one sequence in double, with all weights in memory.
struct Reference {
  std::vector<std::vector<double>> q, k, v, out;  // [rows][hd]
  std::vector<std::vector<double>> weight;        // [q_len][kv_len], softmax
  std::vector<double> logsumexp;                  // [q_len]
  double score_error = 0;  // bound on the rounding of a score, which becomes a relative error of
                           // its weight

  Reference(const Problem& p, const AttentionSequence& s, int64_t head) {
    const int64_t hd = p.shape.head_dim, at = head / (p.shape.heads / p.shape.kv_heads) * hd;
    for (int64_t i = 0; i < s.q_len; ++i) {
      q.push_back(values_of(p.q.view().row(s.q_begin + i) + head * hd, hd));
    }
    for (int64_t j = 0; j < s.k.rows; ++j) {
      k.push_back(values_of(s.k.row(j) + at, hd));
      v.push_back(values_of(s.v.row(j) + at, hd));
    }
    for (size_t i = 0; i < q.size(); ++i) {
      const size_t keys = k.size() - q.size() + i + 1;
      const auto window = static_cast<size_t>(p.shape.window);
      forward(i, window == 0 || keys < window ? 0 : keys - window, keys);
    }
  }

  double scale() const { return 1.0 / std::sqrt(static_cast<double>(k[0].size())); }

 private:
  // Query i sees keys [first, end).
  void forward(size_t i, size_t first, size_t end) {
    std::vector<double> scores(end, -std::numeric_limits<double>::infinity());
    for (size_t j = first; j < end; ++j) {
      scores[j] = scale() * dot(q[i], k[j]);
      score_error = std::max(score_error, kEps * (2 + norm(q[i]) * norm(k[j])));
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - max);
    logsumexp.push_back(max + std::log(sum));
    weight.emplace_back(k.size());
    out.emplace_back(k[0].size());
    for (size_t j = first; j < end; ++j) {
      weight[i][j] = std::exp(scores[j] - logsumexp[i]);
      for (size_t c = 0; c < out[i].size(); ++c) out[i][c] += weight[i][j] * v[j][c];
    }
  }
};

struct ForwardResult {
  TestMatrix out, logsumexp;
};

ForwardResult run_forward(const Problem& p, int threads) {
  Context ctx(threads);
  ForwardResult result{TestMatrix(p.q.rows(), p.q.cols(), 2),
                       TestMatrix(p.q.rows(), p.shape.heads)};
  attention_forward(ctx, {.shape = p.shape,
                          .sequences = p.sequences,
                          .q = p.q.view(),
                          .out = result.out.view(),
                          .logsumexp = result.logsumexp.data()});
  return result;
}

void check_forward(const Problem& p, int threads) {
  const ForwardResult result = run_forward(p, threads);
  for (const AttentionSequence& s : p.sequences) {
    for (int64_t head = 0; head < p.shape.heads; ++head) {
      const Reference ref(p, s, head);
      for (int64_t i = 0; i < s.q_len; ++i) {
        const size_t row = static_cast<size_t>(i);
        ASSERT_NEAR(result.logsumexp(s.q_begin + i, head), ref.logsumexp[row],
                    ref.score_error + kEps * (4 + std::abs(ref.logsumexp[row])));
        for (int64_t c = 0; c < p.shape.head_dim; ++c) {
          double magnitude = 0;
          for (size_t j = 0; j < ref.k.size(); ++j) {
            magnitude += ref.weight[row][j] * std::abs(ref.v[j][static_cast<size_t>(c)]);
          }
          ASSERT_NEAR(result.out(s.q_begin + i, head * p.shape.head_dim + c),
                      ref.out[row][static_cast<size_t>(c)],
                      magnitude * (2 * ref.score_error + 8 * kEps))
              << "query " << i << " of " << s.q_len << " (" << s.k.rows << " keys), head " << head;
        }
      }
    }
  }
  EXPECT_TRUE(result.out.gaps_untouched());
  EXPECT_TRUE(run_forward(p, threads).out.same_bits(result.out));
}

TEST(AttentionForward, HeadSizesAndGroups) {
  const AttentionShape shapes[] = {{1, 1, 64}, {4, 2, 64}, {3, 3, 32}, {6, 2, 128},
                                   {2, 1, 80}, {5, 1, 17}, {2, 2, 1},  {1, 1, 200}};
  for (const AttentionShape& shape : shapes) {
    SCOPED_TRACE(::testing::Message()
                 << shape.heads << "/" << shape.kv_heads << " heads of " << shape.head_dim);
    check_forward(Problem(shape, {{1, 1}, {37, 37}, {129, 129}}), 2);
  }
}

TEST(AttentionForward, RaggedBatches) {
  for (const int threads : {1, 2, 3}) {
    check_forward(Problem({4, 2, 64}, {{1, 300},
                                       {5, 5},
                                       {0, 9},
                                       {1, 1},
                                       {2, 65},
                                       {70, 200},
                                       {64, 64},
                                       {128, 191},
                                       {1, 1030}}),
                  threads);
  }
}

TEST(AttentionForward, DecodeOnALongCache) {
  for (const int threads : {1, 2, 3}) {
    check_forward(Problem({8, 2, 64}, {{1, 2500}}), threads);
    check_forward(Problem({2, 2, 40}, {{1, 129}, {1, 128}, {1, 127}, {3, 700}}), threads);
  }
}

// Few query rows on many keys: the keys are split at multiples of 256.
TEST(AttentionForward, KeysCutAmongThreads) {
  const std::vector<Lengths> lengths = {{1, 255}, {1, 256}, {1, 257},
                                        {2, 257}, {5, 514}, {1, 2048}};
  check_forward(Problem({2, 1, 64}, lengths), 3);
  check_forward(Problem({32, 1, 64}, {{1, 1100}, {2, 513}, {3, 600}}), 3);
  check_forward(Problem({3, 3, 17}, {{1, 600}, {21, 530}}), 2);
  check_forward(Problem({2, 1, 64}, {{1, 700}}, 300.0f), 3);
}

TEST(AttentionForward, IsTheSameForAnyThreadCount) {
  const Problem p({8, 2, 64}, {{1, 2500}, {16, 900}, {17, 900}, {300, 300}, {1, 40}});
  const ForwardResult one = run_forward(p, 1);
  for (const int threads : {2, 3, 8}) {
    const ForwardResult more = run_forward(p, threads);
    EXPECT_TRUE(more.out.same_bits(one.out)) << threads;
    EXPECT_TRUE(more.logsumexp.same_bits(one.logsumexp)) << threads;
  }
}

// Scores of +-1000 overflow an exp without the running maximum; here the softmax is one-hot or
// tied.
TEST(AttentionForward, LargeScores) { check_forward(Problem({2, 1, 64}, {{150, 150}}, 300.0f), 2); }

TEST(AttentionForward, WithoutLogsumexp) {
  const Problem p({4, 4, 32}, {{33, 50}, {1, 20}});
  Context ctx(2);
  TestMatrix out(p.q.rows(), p.q.cols(), 2);
  attention_forward(
      ctx, {.shape = p.shape, .sequences = p.sequences, .q = p.q.view(), .out = out.view()});
  EXPECT_TRUE(out.same_bits(run_forward(p, 2).out));
}

// Keys and values in blocks of a common memory, in any order, give the bits of those in one piece.
TEST(AttentionForward, BlocksChangeNothing) {
  const AttentionShape shapes[] = {{4, 2, 64}, {2, 1, 17},     {8, 1, 128},
                                   {3, 3, 40}, {4, 2, 64, 77}, {2, 1, 17, 70}};
  for (const AttentionShape& shape : shapes) {
    const Problem p(shape, {{1, 300}, {2, 65}, {70, 200}, {64, 64}, {1, 1030}, {129, 131}});
    for (const int64_t rows : {16, 32, 64, 128}) {
      SCOPED_TRACE(::testing::Message() << "heads of " << shape.head_dim << ", blocks of " << rows);
      constexpr int64_t kBlocks = 131;  // a prime, so that 17 i visits every block
      const int64_t width = shape.kv_heads * shape.head_dim;
      TestMatrix keys(kBlocks * rows, width, 0), values(kBlocks * rows, width, 0);
      std::vector<std::vector<int32_t>> tables;
      int64_t taken = 0;
      Problem paged = p;
      for (AttentionSequence& s : paged.sequences) {
        std::vector<int32_t>& table = tables.emplace_back();
        for (int64_t j = 0; j < s.k.rows; ++j) {
          if (j % rows == 0) table.push_back(static_cast<int32_t>(++taken * 17 % kBlocks));
          const int64_t to = table.back() * rows + j % rows;
          std::copy_n(s.k.row(j), width, keys.view().row(to));
          std::copy_n(s.v.row(j), width, values.view().row(to));
        }
        ASSERT_LT(taken, kBlocks);
        const int64_t length = s.k.rows;
        s.k = ConstMatrixF(keys.view().data, length, width, keys.view().stride);
        s.v = ConstMatrixF(values.view().data, length, width, values.view().stride);
        s.block_rows = rows;
      }
      for (size_t i = 0; i < tables.size(); ++i) paged.sequences[i].blocks = tables[i].data();
      const ForwardResult want = run_forward(p, 2), got = run_forward(paged, 2);
      EXPECT_TRUE(got.out.same_bits(want.out));
      EXPECT_TRUE(got.logsumexp.same_bits(want.logsumexp));
    }
  }
}

// Keys and values in 8 bits give the bits of the f32 values that they stand for.
TEST(AttentionForward, EightBitsGiveWhatTheirValuesGive) {
  const AttentionShape shapes[] = {{4, 2, 64}, {2, 1, 17}, {8, 1, 128}, {3, 3, 40}};
  for (const AttentionShape& shape : shapes) {
    SCOPED_TRACE(::testing::Message() << "heads of " << shape.head_dim);
    Problem p(shape, {{1, 300}, {2, 65}, {70, 200}, {1, 1030}});
    std::vector<std::vector<int8_t>> bytes;
    std::vector<std::vector<float>> scales;
    std::vector<std::vector<int32_t>> tables;
    // Rounds x [rows, H_kv * hd] to its 8 bits.
    const auto rounded = [&](MatrixF x) {
      std::vector<int8_t>& data = bytes.emplace_back();
      std::vector<float>& scale = scales.emplace_back();
      for (int64_t i = 0; i < x.rows * x.cols; ++i) {
        float& value = x(i / x.cols, i % x.cols);
        if (i % shape.head_dim == 0) scale.push_back(0.01f * static_cast<float>(1 + i % 7));
        data.push_back(static_cast<int8_t>(std::clamp(value / scale.back(), -127.0f, 127.0f)));
        value = scale.back() * static_cast<float>(data.back());
      }
      return AttentionRows8{data.data(), scale.data()};
    };
    Problem eight = p;
    for (size_t i = 0; i < p.sequences.size(); ++i) {
      AttentionSequence& s = eight.sequences[i];
      s.k8 = rounded(p.k[i].view());
      s.v8 = rounded(p.v[i].view());
      p.sequences[i].k = p.k[i].view();
      p.sequences[i].v = p.v[i].view();
      s.k = ConstMatrixF(nullptr, s.k.rows, s.k.cols);
      s.v = ConstMatrixF(nullptr, s.v.rows, s.v.cols);
      std::vector<int32_t>& table = tables.emplace_back();
      for (int32_t block = 0; 32 * block < s.k.rows; ++block) table.push_back(block);
    }
    for (size_t i = 0; i < tables.size(); ++i) {
      if (i % 2 == 0) continue;
      eight.sequences[i].blocks = tables[i].data();
      eight.sequences[i].block_rows = 32;
    }
    const ForwardResult want = run_forward(p, 2), got = run_forward(eight, 2);
    EXPECT_TRUE(got.out.same_bits(want.out));
    EXPECT_TRUE(got.logsumexp.same_bits(want.logsumexp));
  }
}

TEST(AttentionForward, LaterKeysChangeNothing) {
  Problem p({2, 1, 64}, {{90, 90}});
  const ForwardResult whole = run_forward(p, 2);
  for (int64_t j = 50; j < 90; ++j) {
    for (int64_t c = 0; c < 64; ++c) p.k[0](j, c) = p.v[0](j, c) = 1e9f;
  }
  const ForwardResult cut = run_forward(p, 2);
  for (int64_t i = 0; i < 50; ++i) {
    for (int64_t c = 0; c < 128; ++c) ASSERT_EQ(cut.out(i, c), whole.out(i, c)) << "query " << i;
  }
}

TEST(AttentionForward, SlidingWindow) {
  for (const int64_t window : {1, 2, 63, 64, 65, 200}) {
    for (const int threads : {1, 3}) {
      check_forward(
          Problem({4, 2, 24, window},
                  {{1, 300}, {5, 5}, {0, 9}, {2, 65}, {70, 200}, {129, 129}, {1, 513}, {7, 530}}),
          threads);
    }
  }
  check_forward(Problem({32, 1, 64, 300}, {{1, 1100}, {2, 1025}, {3, 600}}), 3);
}

TEST(AttentionForward, SlidingWindowIsTheSameForAnyThreadCount) {
  const Problem p({8, 2, 64, 301}, {{1, 2500}, {16, 900}, {17, 900}, {400, 400}, {1, 40}});
  const ForwardResult one = run_forward(p, 1);
  for (const int threads : {2, 3, 8}) {
    EXPECT_TRUE(run_forward(p, threads).out.same_bits(one.out)) << threads;
  }
}

TEST(AttentionForward, WindowOfAllKeysChangesNothing) {
  const std::vector<Lengths> lengths = {{1, 700}, {90, 300}, {20, 20}};
  const ForwardResult windowed = run_forward(Problem({4, 2, 64, 700}, lengths), 2);
  EXPECT_TRUE(windowed.out.same_bits(run_forward(Problem({4, 2, 64}, lengths), 2).out));
}

struct BackwardResult {
  TestMatrix d_q, d_k, d_v;
};

// A training batch: keys and values of all sequences are rows of one buffer, as the queries are.
struct TrainingProblem : Problem {
  TrainingProblem(AttentionShape shape_in, const std::vector<int64_t>& lengths)
      : Problem(shape_in, {}) {
    int64_t rows = 0;
    for (const int64_t length : lengths) rows += length;
    const int64_t kv_width = shape.kv_heads * shape.head_dim;
    q = TestMatrix::random(rows, shape.heads * shape.head_dim, 1, 5);
    k.push_back(TestMatrix::random(rows, kv_width, 2, 4));
    v.push_back(TestMatrix::random(rows, kv_width, 3, 0));
    d_out = TestMatrix::random(rows, shape.heads * shape.head_dim, 4, 1);
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      sequences.push_back({begin, length, k[0].view().slice_rows(begin, length),
                           v[0].view().slice_rows(begin, length)});
      begin += length;
    }
  }
  TestMatrix d_out{0, 0};
};

BackwardResult run_backward(const TrainingProblem& p, int threads) {
  const ForwardResult forward = run_forward(p, threads);
  const int64_t rows = p.q.rows(), kv_width = p.shape.kv_heads * p.shape.head_dim;
  BackwardResult result{TestMatrix(rows, p.q.cols(), 3), TestMatrix(rows, kv_width, 2),
                        TestMatrix(rows, kv_width, 1)};
  Context ctx(threads);
  attention_backward(ctx, {.shape = p.shape,
                           .sequences = p.sequences,
                           .q = p.q.view(),
                           .out = forward.out.view(),
                           .logsumexp = forward.logsumexp.data(),
                           .d_out = p.d_out.view(),
                           .d_q = result.d_q.view(),
                           .d_k = result.d_k.view(),
                           .d_v = result.d_v.view()});
  return result;
}

// Expected gradients of one sequence in double, each with the sum of the magnitudes of its terms.
struct Gradient {
  Gradient(int64_t rows, int64_t cols)
      : value(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(cols))),
        magnitude(value) {}
  void add(size_t row, size_t col, double term) {
    value[row][col] += term;
    magnitude[row][col] += std::abs(term);
  }
  std::vector<std::vector<double>> value, magnitude;
};

void check_gradient(const Gradient& expected, ConstMatrixF actual, double error) {
  for (int64_t r = 0; r < actual.rows; ++r) {
    for (int64_t c = 0; c < actual.cols; ++c) {
      const size_t row = static_cast<size_t>(r), col = static_cast<size_t>(c);
      ASSERT_NEAR(actual(r, c), expected.value[row][col],
                  expected.magnitude[row][col] * error + 1e-12)
          << "row " << r << " col " << c;
    }
  }
}

void check_backward(const TrainingProblem& p, int threads) {
  const BackwardResult result = run_backward(p, threads);
  const int64_t hd = p.shape.head_dim, group = p.shape.heads / p.shape.kv_heads;
  for (const AttentionSequence& s : p.sequences) {
    Gradient d_q(s.q_len, p.q.cols()), d_k(s.q_len, p.k[0].cols()), d_v(s.q_len, p.v[0].cols());
    double error = 0;
    for (int64_t head = 0; head < p.shape.heads; ++head) {
      const Reference ref(p, s, head);
      const size_t q_at = static_cast<size_t>(head * hd),
                   kv_at = static_cast<size_t>(head / group * hd);
      for (size_t i = 0; i < ref.q.size(); ++i) {
        const auto d_out =
            values_of(p.d_out.view().row(s.q_begin + static_cast<int64_t>(i)) + head * hd, hd);
        const double delta = dot(d_out, ref.out[i]);
        for (size_t j = 0; j <= i; ++j) {
          const double d_weight = dot(d_out, ref.v[j]);
          const double d_score = ref.weight[i][j] * (d_weight - delta) * ref.scale();
          // d_weight - delta may cancel, so its error is that of the two dot products.
          const double bound = ref.weight[i][j] * ref.scale() * 2 * norm(d_out) *
                               (norm(ref.v[j]) + norm(ref.out[i]));
          for (size_t c = 0; c < ref.q[i].size(); ++c) {
            d_q.add(i, q_at + c, d_score * ref.k[j][c]);
            d_k.add(j, kv_at + c, d_score * ref.q[i][c]);
            d_v.add(j, kv_at + c, ref.weight[i][j] * d_out[c]);
            d_q.magnitude[i][q_at + c] += bound * std::abs(ref.k[j][c]);
            d_k.magnitude[j][kv_at + c] += bound * std::abs(ref.q[i][c]);
          }
        }
      }
      error = std::max(error, 2 * ref.score_error + 8 * kEps);
    }
    check_gradient(d_q, result.d_q.view().slice_rows(s.q_begin, s.q_len), error);
    check_gradient(d_k, result.d_k.view().slice_rows(s.q_begin, s.q_len), error);
    check_gradient(d_v, result.d_v.view().slice_rows(s.q_begin, s.q_len), error);
  }
  EXPECT_TRUE(result.d_q.gaps_untouched());
  EXPECT_TRUE(result.d_k.gaps_untouched());
  EXPECT_TRUE(result.d_v.gaps_untouched());
  const BackwardResult again = run_backward(p, threads);
  EXPECT_TRUE(again.d_q.same_bits(result.d_q));
  EXPECT_TRUE(again.d_k.same_bits(result.d_k));
  EXPECT_TRUE(again.d_v.same_bits(result.d_v));
}

TEST(AttentionBackward, HeadSizesAndGroups) {
  const AttentionShape shapes[] = {{1, 1, 64}, {4, 2, 64}, {3, 3, 32}, {6, 2, 128},
                                   {2, 1, 80}, {5, 1, 17}, {2, 2, 1},  {1, 1, 200}};
  for (const AttentionShape& shape : shapes) {
    SCOPED_TRACE(::testing::Message()
                 << shape.heads << "/" << shape.kv_heads << " heads of " << shape.head_dim);
    check_backward(TrainingProblem(shape, {1, 37, 129}), 2);
  }
}

TEST(AttentionBackward, LengthsAndThreads) {
  for (const int threads : {1, 2, 3}) {
    check_backward(TrainingProblem({4, 2, 64}, {65, 1, 0, 64, 200}), threads);
    check_backward(TrainingProblem({1, 1, 48}, {300}), threads);
  }
}

TEST(AttentionBackward, SlidingWindow) {
  for (const int64_t window : {1, 63, 64, 65, 150}) {
    check_backward(TrainingProblem({4, 2, 24, window}, {65, 1, 0, 64, 200}), 2);
    check_backward(TrainingProblem({1, 1, 48, window}, {300}), 3);
  }
}

TEST(AttentionBackward, IsTheSameForAnyThreadCount) {
  const TrainingProblem p({4, 2, 64}, {65, 1, 130, 200});
  const BackwardResult one = run_backward(p, 1);
  for (const int threads : {2, 3}) {
    const BackwardResult more = run_backward(p, threads);
    EXPECT_TRUE(more.d_q.same_bits(one.d_q));
    EXPECT_TRUE(more.d_k.same_bits(one.d_k));
    EXPECT_TRUE(more.d_v.same_bits(one.d_v));
  }
}

TEST(Attention, RefusesShapesThatDisagree) {
  Context ctx(1);
  const TrainingProblem p({4, 2, 8}, {6});
  TestMatrix out(6, 32), narrow(6, 31), logsumexp(6, 4);
  AttentionForward forward{
      .shape = p.shape, .sequences = p.sequences, .q = p.q.view(), .out = out.view()};
  AttentionForward bad = forward;
  bad.shape.kv_heads = 3;
  EXPECT_THROW(attention_forward(ctx, bad), Error);
  bad = forward;
  bad.out = narrow.view();
  EXPECT_THROW(attention_forward(ctx, bad), Error);
  std::vector<AttentionSequence> sequences = p.sequences;
  bad = forward;
  bad.sequences = sequences;
  sequences[0].q_begin = 1;
  EXPECT_THROW(attention_forward(ctx, bad), Error);
  sequences[0] = {0, 6, p.k[0].view().slice_rows(0, 5), p.v[0].view().slice_rows(0, 5)};
  EXPECT_THROW(attention_forward(ctx, bad), Error);
}

}  // namespace
}  // namespace twell
