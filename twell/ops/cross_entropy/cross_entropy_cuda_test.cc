// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {
namespace {

double norm(const float* values, size_t n) {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(values[i]) * values[i];
  return std::sqrt(sum);
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  std::vector<float> difference(want.size());
  for (size_t i = 0; i < want.size(); ++i) difference[i] = got[i] - want[i];
  return norm(difference.data(), difference.size()) / norm(want.data(), want.size());
}

struct LossCase {
  int64_t tokens, width, vocab;
  int64_t workspace_tokens;  // fewer than tokens: more than one chunk
};

struct Results {
  std::vector<float> losses, d_x, d_weight;
  CrossEntropySum sum;
};

struct Operands {
  explicit Operands(const LossCase& c)
      : shape(c),
        // Logits have a magnitude near 3.
        x(random_bf16(c.tokens * c.width, 1, 3.0f / std::sqrt(static_cast<float>(c.width)))),
        weight(random_bf16(c.vocab * c.width, 2)),
        d_weight(to_floats(random_bf16(c.vocab * c.width, 3, 1e-3f))) {
    for (int64_t m = 0; m < c.tokens; ++m) {
      const auto drawn =
          uniform_below(5, 1, static_cast<uint64_t>(m), static_cast<uint64_t>(c.vocab));
      targets.push_back(m % 7 == 3 ? -1 : static_cast<int32_t>(drawn));
    }
  }
  LossCase shape;
  std::vector<__nv_bfloat16> x, weight;
  std::vector<float> d_weight;
  std::vector<int32_t> targets;
};

constexpr float kGradScale = 1e-3f;

Results on_device(const Operands& o, bool gradients, bool graph = false, bool add = true) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto [tokens, width, vocab, workspace_tokens] = o.shape;
  const auto x = upload(o.x), weight = upload(o.weight);
  const auto targets = upload(o.targets);
  const auto losses = poisoned<float>(tokens);
  const auto d_x = poisoned<__nv_bfloat16>(tokens * width);
  auto d_weight = add ? upload(o.d_weight) : poisoned<float>(vocab * width);
  auto sum = upload(std::vector<CrossEntropySum>{{10.0, 100}});
  const DeviceBuffer<std::byte> memory(
      CrossEntropyWorkspaceCuda::bytes_needed(workspace_tokens, vocab));
  const CrossEntropyWorkspaceCuda workspace(workspace_tokens, vocab, memory.data());
  const auto two = upload(std::vector<float>{2.0f});
  CrossEntropyCuda problem{.tokens = tokens,
                           .width = width,
                           .vocab = vocab,
                           .x = x.data(),
                           .weight = weight.data(),
                           .targets = targets.data(),
                           .grad_scale = kGradScale,
                           .losses = losses.data(),
                           .sum = sum.data()};
  if (gradients) {
    problem.d_x = d_x.data();
    problem.d_weight = d_weight.data();
    problem.add = add;
  }
  cross_entropy_cuda(ctx, problem, workspace);
  stream.synchronize();
  if (graph) {
    d_weight = upload(o.d_weight);
    sum = upload(std::vector<CrossEntropySum>{{10.0, 100}});
    if (gradients) problem.d_weight = d_weight.data();
    problem.sum = sum.data();
    // The same scale, a part of it in device memory.
    problem.grad_scale = kGradScale / 2.0f;
    problem.scale = two.data();
    replay_as_graph(stream, 1, [&] { cross_entropy_cuda(ctx, problem, workspace); });
  }
  return {download(losses), to_floats(download(d_x)), download(d_weight), download(sum)[0]};
}

class CrossEntropyCudaTest : public testing::TestWithParam<LossCase> {};

TEST_P(CrossEntropyCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const Operands o(GetParam());
  const auto [tokens, width, vocab, workspace_tokens] = o.shape;
  const Results got = on_device(o, true);

  Context cpu;
  const std::vector<float> x = to_floats(o.x), weight = to_floats(o.weight);
  std::vector<float> losses(static_cast<size_t>(tokens)), d_x(x.size()), d_weight = o.d_weight;
  const ConstMatrixF x_view(x.data(), tokens, width), weight_view(weight.data(), vocab, width);
  token_losses(cpu, x_view, weight_view, o.targets, losses);
  const CrossEntropyResult want =
      cross_entropy(cpu, {.x = x_view,
                          .weight = weight_view,
                          .targets = o.targets,
                          .grad_scale = kGradScale,
                          .d_x = MatrixF(d_x.data(), tokens, width),
                          .d_weight = MatrixF(d_weight.data(), vocab, width)});
  // Each logit is rounded to bf16, by at most 2^-9 of itself; few exceed 12.
  const double near = 15.0 * std::ldexp(1.0, -8);
  for (size_t m = 0; m < losses.size(); ++m) {
    ASSERT_NEAR(got.losses[m], losses[m], near) << m;
    if (o.targets[m] < 0) {
      ASSERT_EQ(got.losses[m], 0.0f) << m;
    }
  }
  const double mean_near = near / std::sqrt(static_cast<double>(std::max<int64_t>(1, want.tokens)));
  EXPECT_EQ(got.sum.tokens, 100 + want.tokens);
  EXPECT_NEAR(got.sum.loss_sum - 10.0, want.loss_sum,
              mean_near * static_cast<double>(want.tokens) + 1e-9);
  double in_order = 10.0;
  for (const float loss : got.losses) in_order += static_cast<double>(loss);
  EXPECT_NEAR(got.sum.loss_sum, in_order, 1e-9 * in_order);
  // Logits, their gradient and d_x are each rounded by 2^-9; logits by 2^-9 of their size.
  EXPECT_LT(relative_error(got.d_x, d_x), 2e-2);
  std::vector<float> got_change = got.d_weight, change = d_weight;
  for (size_t i = 0; i < change.size(); ++i) {
    got_change[i] -= o.d_weight[i];
    change[i] -= o.d_weight[i];
  }
  EXPECT_LT(relative_error(got_change, change), 2e-2);
  const Results written = on_device(o, true, /*graph=*/false, /*add=*/false);
  EXPECT_LT(relative_error(written.d_weight, change), 2e-2);
}

TEST_P(CrossEntropyCudaTest, RepeatsToTheBitAndEvaluates) {
  TWELL_SKIP_WITHOUT_GPU();
  const Operands o(GetParam());
  const Results first = on_device(o, true), second = on_device(o, true, /*graph=*/true);
  EXPECT_EQ(first.losses, second.losses);
  EXPECT_EQ(first.d_x, second.d_x);
  EXPECT_EQ(first.d_weight, second.d_weight);
  EXPECT_EQ(first.sum.loss_sum, second.sum.loss_sum);
  const Results evaluated = on_device(o, false);
  EXPECT_EQ(evaluated.losses, first.losses);
  EXPECT_EQ(evaluated.sum.loss_sum, first.sum.loss_sum);
  EXPECT_EQ(evaluated.d_weight, o.d_weight);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropyCudaTest,
                         testing::Values(LossCase{1, 8, 16, 1}, LossCase{127, 64, 264, 127},
                                         LossCase{129, 136, 1000, 40}, LossCase{300, 72, 259, 130},
                                         LossCase{129, 320, 32768, 129}));

// With a teacher of another width, against the CPU; bf16 as above.
TEST_P(CrossEntropyCudaTest, DistillsAsTheCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const Operands o(GetParam());
  const auto [tokens, width, vocab, workspace_tokens] = o.shape;
  constexpr float kShare = 0.3f;
  const int64_t teacher_width = width + 8;
  const auto teacher_x = random_bf16(tokens * teacher_width, 21, 1.0f),
             teacher_weight = random_bf16(vocab * teacher_width, 22,
                                          2.0f / std::sqrt(static_cast<float>(teacher_width)));
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto x = upload(o.x), weight = upload(o.weight), device_teacher_x = upload(teacher_x),
             device_teacher_weight = upload(teacher_weight);
  const auto targets = upload(o.targets);
  const auto losses = poisoned<float>(tokens), kl = poisoned<float>(tokens);
  const auto d_x = poisoned<__nv_bfloat16>(tokens * width);
  const auto memory = poisoned<std::byte>(
      CrossEntropyWorkspaceCuda::bytes_needed(workspace_tokens, vocab, /*teacher=*/true));
  const CrossEntropyWorkspaceCuda workspace(workspace_tokens, vocab, memory.data(), true);
  const auto run = [&] {
    const auto d_weight = upload(o.d_weight);
    const auto sum = upload(std::vector<CrossEntropySum>(1));
    cross_entropy_cuda(ctx,
                       {.tokens = tokens,
                        .width = width,
                        .vocab = vocab,
                        .x = x.data(),
                        .weight = weight.data(),
                        .targets = targets.data(),
                        .grad_scale = kGradScale,
                        .losses = losses.data(),
                        .sum = sum.data(),
                        .d_x = d_x.data(),
                        .d_weight = d_weight.data(),
                        .teacher = {.x = device_teacher_x.data(),
                                    .weight = device_teacher_weight.data(),
                                    .width = teacher_width,
                                    .share = kShare,
                                    .kl = kl.data()}},
                       workspace);
    stream.synchronize();
    return std::tuple(download(sum)[0], to_floats(download(d_x)), download(d_weight),
                      download(losses), download(kl));
  };
  const auto [got, got_d_x, got_d_weight, got_losses, got_kl] = run();

  Context cpu;
  const std::vector<float> fx = to_floats(o.x), fw = to_floats(o.weight), ft = to_floats(teacher_x),
                           ftw = to_floats(teacher_weight);
  std::vector<float> want_d_x(fx.size()), want_d_weight = o.d_weight;
  const DistillationResult want =
      distill(cpu, {.x = ConstMatrixF(fx.data(), tokens, width),
                    .weight = ConstMatrixF(fw.data(), vocab, width),
                    .teacher_x = ConstMatrixF(ft.data(), tokens, teacher_width),
                    .teacher_weight = ConstMatrixF(ftw.data(), vocab, teacher_width),
                    .targets = o.targets,
                    .share = kShare,
                    .grad_scale = kGradScale,
                    .d_x = MatrixF(want_d_x.data(), tokens, width),
                    .d_weight = MatrixF(want_d_weight.data(), vocab, width)});
  const double near = 15.0 * std::ldexp(1.0, -8), count = static_cast<double>(want.tokens);
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_NEAR(got.loss_sum, want.ce_sum, near * std::sqrt(std::max(1.0, count)));
  // The error of a logit shifts KL by the difference of the two probabilities.
  EXPECT_NEAR(got.kl_sum, want.kl_sum, 2.0 * near * std::sqrt(std::max(1.0, count)));
  for (int64_t m = 0; m < tokens; ++m) {
    const auto at = static_cast<size_t>(m);
    if (o.targets[at] < 0) {
      EXPECT_EQ(got_losses[at], 0.0f);
      EXPECT_EQ(got_kl[at], 0.0f);
    } else {
      EXPECT_GE(got_kl[at], -1e-4f) << m;
    }
  }
  EXPECT_LT(relative_error(got_d_x, want_d_x), 3e-2);
  std::vector<float> got_change = got_d_weight, change = want_d_weight;
  for (size_t i = 0; i < change.size(); ++i) {
    got_change[i] -= o.d_weight[i];
    change[i] -= o.d_weight[i];
  }
  EXPECT_LT(relative_error(got_change, change), 3e-2);
  const auto [again, d_x_again, d_weight_again, losses_again, kl_again] = run();
  EXPECT_EQ(again.kl_sum, got.kl_sum);
  EXPECT_EQ(d_x_again, got_d_x);
  EXPECT_EQ(d_weight_again, got_d_weight);
}

// Logits of a thousand, and rows in which one logit dominates.
TEST(CrossEntropyCudaTest, LargeLogits) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  const int64_t tokens = 3, vocab = 24;
  std::vector<float> logits(static_cast<size_t>(tokens * vocab), -1000.0f);
  logits[5] = 1024.0f;       // the target of token 0
  logits[24 + 7] = 1024.0f;  // not the target of token 1, which is -1000
  for (size_t i = 48; i < 72; ++i) logits[i] = 512.0f;
  std::vector<__nv_bfloat16> rounded;
  for (const float value : logits) rounded.push_back(__float2bfloat16(value));
  const auto device = upload(rounded);
  const auto targets = upload(std::vector<int32_t>{5, 6, 23});
  const auto losses = poisoned<float>(tokens);
  TWELL_CUDA_CHECK(launch_softmax_gradient(
      {tokens, vocab, device.data(), targets.data(), losses.data(), true, 1.0f}, stream.get()));
  stream.synchronize();
  const auto got = download(losses);
  const auto gradient = to_floats(download(device));
  EXPECT_EQ(got[0], 0.0f);
  EXPECT_FLOAT_EQ(got[1], 2024.0f);
  EXPECT_NEAR(got[2], std::log(24.0f), 1e-5f);
  for (size_t i = 0; i < 24; ++i) {
    EXPECT_EQ(gradient[i], 0.0f);
    EXPECT_EQ(gradient[24 + i], i == 7 ? 1.0f : i == 6 ? -1.0f : 0.0f);
    EXPECT_NEAR(gradient[48 + i], 1.0f / 24.0f - (i == 23 ? 1.0f : 0.0f), 0.005f);
  }
}

}  // namespace
}  // namespace twell
