// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {
namespace {

constexpr int64_t kTokens = 131, kWidth = 24, kVocab = 37;
constexpr double kEpsilon = 0x1p-23;

struct Problem {
  TestMatrix x = TestMatrix::random(kTokens, kWidth, 1),
             weight = TestMatrix::random(kVocab, kWidth, 2);
  TestMatrix teacher_x = TestMatrix::random(kTokens, 16, 3);
  TestMatrix teacher_weight = TestMatrix::random(kVocab, 16, 4);
  std::vector<int32_t> targets;

  Problem() {
    for (int64_t m = 0; m < kTokens; ++m) {
      targets.push_back(m % 7 == 3 ? -1 : static_cast<int32_t>(m * 5 % kVocab));
    }
  }
};

std::vector<double> probabilities(const TestMatrix& x, const TestMatrix& weight, int64_t m) {
  std::vector<double> p;
  double sum = 0.0;
  for (int64_t v = 0; v < kVocab; ++v) {
    double logit = 0.0;
    for (int64_t k = 0; k < x.cols(); ++k) logit += double{x(m, k)} * double{weight(v, k)};
    p.push_back(std::exp(logit));
    sum += p.back();
  }
  for (double& value : p) value /= sum;
  return p;
}

TEST(Distillation, LossesAndGradientsAreThoseOfTheFormula) {
  for (const float share : {0.0f, 0.3f, 1.0f}) {
    const Problem p;
    constexpr float kScale = 0.01f;
    TestMatrix d_x(kTokens, kWidth), d_weight(kVocab, kWidth);
    for (int64_t i = 0; i < kVocab * kWidth; ++i) d_weight.data()[i] = 1.0f;
    Context ctx(2);
    const DistillationResult result = distill(ctx, {.x = p.x.view(),
                                                    .weight = p.weight.view(),
                                                    .teacher_x = p.teacher_x.view(),
                                                    .teacher_weight = p.teacher_weight.view(),
                                                    .targets = p.targets,
                                                    .share = share,
                                                    .grad_scale = kScale,
                                                    .d_x = d_x.view(),
                                                    .d_weight = d_weight.view()});
    double ce = 0.0, kl = 0.0, error = 0.0, total = 0.0;
    int64_t tokens = 0;
    std::vector<double> expected_d_weight(static_cast<size_t>(kVocab * kWidth), 1.0);
    for (int64_t m = 0; m < kTokens; ++m) {
      const int32_t target = p.targets[static_cast<size_t>(m)];
      const auto model = probabilities(p.x, p.weight, m);
      const auto teacher = probabilities(p.teacher_x, p.teacher_weight, m);
      std::vector<double> d(kVocab, 0.0);
      if (target >= 0) {
        ++tokens;
        ce -= std::log(model[static_cast<size_t>(target)]);
        for (size_t v = 0; v < d.size(); ++v) {
          kl += teacher[v] * std::log(teacher[v] / model[v]);
          const double wanted = (1.0 - double{share}) * (static_cast<int32_t>(v) == target) +
                                double{share} * teacher[v];
          d[v] = double{kScale} * (model[v] - wanted);
        }
      }
      for (int64_t k = 0; k < kWidth; ++k) {
        double expected = 0.0;
        for (int64_t v = 0; v < kVocab; ++v) {
          expected += d[static_cast<size_t>(v)] * double{p.weight(v, k)};
          expected_d_weight[static_cast<size_t>(v * kWidth + k)] +=
              d[static_cast<size_t>(v)] * double{p.x(m, k)};
        }
        error += std::pow(double{d_x(m, k)} - expected, 2);
        total += expected * expected;
      }
    }
    // A logit's error is eps times the sum of its terms' sizes, about 20 here; so is e^logit's.
    const double tolerance = 20.0 * kEpsilon * std::sqrt(kVocab);
    EXPECT_EQ(result.tokens, tokens);
    EXPECT_NEAR(result.ce_sum, ce, tolerance * ce);
    EXPECT_NEAR(result.kl_sum, kl, tolerance * (ce + kl));
    EXPECT_LE(std::sqrt(error / total), tolerance);
    for (int64_t i = 0; i < kVocab * kWidth; ++i) {
      ASSERT_NEAR(d_weight.data()[i], expected_d_weight[static_cast<size_t>(i)], tolerance);
    }
  }
}

TEST(Distillation, WithoutAShareItIsTheCrossEntropy) {
  const Problem p;
  Context ctx(2);
  TestMatrix d_x(kTokens, kWidth), expected(kTokens, kWidth), d_weight(kVocab, kWidth);
  std::fill_n(d_weight.data(), kVocab * kWidth, 0.0f);
  const DistillationResult result = distill(ctx, {.x = p.x.view(),
                                                  .weight = p.weight.view(),
                                                  .teacher_x = p.x.view(),
                                                  .teacher_weight = p.weight.view(),
                                                  .targets = p.targets,
                                                  .share = 0.0f,
                                                  .grad_scale = 1.0f,
                                                  .d_x = d_x.view(),
                                                  .d_weight = d_weight.view()});
  std::fill_n(d_weight.data(), kVocab * kWidth, 0.0f);
  CrossEntropy ce;
  ce.x = p.x.view();
  ce.weight = p.weight.view();
  ce.targets = p.targets;
  ce.grad_scale = 1.0f;
  ce.d_x = expected.view();
  ce.d_weight = d_weight.view();
  EXPECT_NEAR(result.ce_sum, cross_entropy(ctx, ce).loss_sum, 1e-5 * result.ce_sum);
  EXPECT_NEAR(result.kl_sum, 0.0, 1e-5 * result.ce_sum) << "a teacher that is the model itself";
  for (int64_t i = 0; i < kTokens * kWidth; ++i) {
    ASSERT_NEAR(d_x.data()[i], expected.data()[i], 64 * kEpsilon);
  }
}

// Where the vocabulary is large, a chunk has 128 tokens, so that these give the sums of two calls.
TEST(Distillation, ChunksAddUp) {
  constexpr int64_t kAll = 131, kFirst = 128, kMany = 33'000, kNarrow = 2;
  const auto x = TestMatrix::random(kAll, kNarrow, 1),
             weight = TestMatrix::random(kMany, kNarrow, 2),
             teacher_x = TestMatrix::random(kAll, kNarrow, 3),
             teacher_weight = TestMatrix::random(kMany, kNarrow, 4);
  std::vector<int32_t> targets;
  for (int64_t m = 0; m < kAll; ++m) {
    targets.push_back(m % 7 == 3 ? -1 : static_cast<int32_t>(m * 251 % kMany));
  }
  TestMatrix d_x(kAll, kNarrow), d_weight(kMany, kNarrow);
  TestMatrix d_x_parts(kAll, kNarrow), d_weight_parts(kMany, kNarrow);
  std::fill_n(d_weight.data(), kMany * kNarrow, 1.0f);
  std::fill_n(d_weight_parts.data(), kMany * kNarrow, 1.0f);
  Context ctx(2);
  const auto run = [&](int64_t first, int64_t count, TestMatrix& to_x, TestMatrix& to_weight) {
    return distill(ctx, {.x = x.view().slice_rows(first, count),
                         .weight = weight.view(),
                         .teacher_x = teacher_x.view().slice_rows(first, count),
                         .teacher_weight = teacher_weight.view(),
                         .targets = std::span(targets).subspan(static_cast<size_t>(first),
                                                               static_cast<size_t>(count)),
                         .share = 0.3f,
                         .grad_scale = 0.5f,
                         .d_x = to_x.view().slice_rows(first, count),
                         .d_weight = to_weight.view()});
  };
  const DistillationResult all = run(0, kAll, d_x, d_weight);
  const DistillationResult first = run(0, kFirst, d_x_parts, d_weight_parts);
  const DistillationResult rest = run(kFirst, kAll - kFirst, d_x_parts, d_weight_parts);
  EXPECT_EQ(all.tokens, first.tokens + rest.tokens);
  EXPECT_NEAR(all.ce_sum, first.ce_sum + rest.ce_sum, 1e-12 * all.ce_sum);
  EXPECT_NEAR(all.kl_sum, first.kl_sum + rest.kl_sum, 1e-12 * all.ce_sum);
  EXPECT_TRUE(d_x.same_bits(d_x_parts));
  EXPECT_TRUE(d_weight.same_bits(d_weight_parts));
}

// A constant added to all logits of a model or its teacher changes nothing, however large it is.
TEST(Distillation, LogitsMayBeFarFromZero) {
  Context ctx(1);
  const std::vector<int32_t> targets = {2};
  TestMatrix x(1, 1);
  x.data()[0] = 1.0f;
  const auto at = [&](float model_shift, float teacher_shift) {
    TestMatrix weight(5, 1), teacher(5, 1), d_x(1, 1), d_weight(5, 1);
    for (int64_t v = 0; v < 5; ++v) {
      weight.view()(v, 0) = model_shift + static_cast<float>(v * v % 5);
      teacher.view()(v, 0) = teacher_shift - static_cast<float>(v);
      d_weight.view()(v, 0) = 0.0f;
    }
    return distill(ctx, {.x = x.view(),
                         .weight = weight.view(),
                         .teacher_x = x.view(),
                         .teacher_weight = teacher.view(),
                         .targets = targets,
                         .share = 0.5f,
                         .grad_scale = 1.0f,
                         .d_x = d_x.view(),
                         .d_weight = d_weight.view()});
  };
  const DistillationResult want = at(0.0f, 0.0f);
  for (const float shift : {-1000.0f, 1000.0f}) {
    for (const DistillationResult& got : {at(shift, 0.0f), at(0.0f, shift), at(shift, shift)}) {
      EXPECT_NEAR(got.ce_sum, want.ce_sum, 1e-9);
      EXPECT_NEAR(got.kl_sum, want.kl_sum, 1e-9);
    }
  }
}

TEST(Distillation, RefusesVocabulariesThatDiffer) {
  const Problem p;
  Context ctx(1);
  TestMatrix d_x(kTokens, kWidth), d_weight(kVocab, kWidth);
  const TestMatrix other = TestMatrix::random(kVocab + 1, 16, 5);
  EXPECT_THROW(distill(ctx, {.x = p.x.view(),
                             .weight = p.weight.view(),
                             .teacher_x = p.teacher_x.view(),
                             .teacher_weight = other.view(),
                             .targets = p.targets,
                             .d_x = d_x.view(),
                             .d_weight = d_weight.view()}),
               Error);
}

}  // namespace
}  // namespace twell
