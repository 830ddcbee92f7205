// SPDX-License-Identifier: Apache-2.0
// Layers behind their plans: every execution gives the dense result and the same counts, plans
// learn from the counts, chunk boundaries do not change results, graphs replay.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"
#include "twell/ops/rms_norm/rows_testing.h"

namespace twell {
namespace {

// A layer with biased gates: x[:, 0] is 1, w_gate[:, 0] sets how often a neuron fires.
struct PlanLayer {
  int64_t tokens, width, ffn;
  bool gated;
  BlendedActivation f = {};
  DeviceBuffer<__nv_bfloat16> x, firing, other, down;

  PlanLayer(int64_t tokens_in, int64_t width_in, int64_t ffn_in, bool gated_in, float bias)
      : tokens(tokens_in), width(width_in), ffn(ffn_in), gated(gated_in) {
    auto values = random(tokens * width, 1, 1.0f);
    for (int64_t m = 0; m < tokens; ++m) {
      values[static_cast<size_t>(m * width)] = __float2bfloat16(1.0f);
    }
    x = upload(values);
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    values = random(ffn * width, 2, scale);
    for (int64_t n = 0; n < ffn; ++n) {
      values[static_cast<size_t>(n * width)] = __float2bfloat16(bias);
    }
    firing = upload(values);
    other = upload(random(ffn * width, 3, scale));
    down = upload(random(ffn * width, 4, scale));
  }
  static std::vector<__nv_bfloat16> random(int64_t n, uint64_t stream, float scale) {
    std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = __float2bfloat16(scale * normal(3, stream, i));
    }
    return values;
  }
  FfnWeightsCuda weights() const {
    return {.w_gate = gated ? firing.data() : nullptr,
            .w_up = gated ? other.data() : firing.data(),
            .w_down = down.data(),
            .activation = f.kind,
            .threshold = f.threshold};
  }
};

struct Outcome {
  std::vector<__nv_bfloat16> y;
  std::vector<int32_t> row_nnz;
  FfnPlan plan;
  LayerActivity activity;
};

Outcome run(CudaContext& ctx, const CudaStream& stream, const PlanLayer& layer, FfnPolicy policy,
            bool count_rows, int graph_replays = 0,
            const std::vector<__nv_bfloat16>& residual = {}) {
  FfnPlansCuda plans(ctx, 2, layer.ffn, policy);
  FfnWorkspaceCuda workspace(ctx, layer.tokens, layer.width, layer.ffn, layer.gated);
  const auto y =
      residual.empty() ? poisoned<__nv_bfloat16>(layer.tokens * layer.width) : upload(residual);
  const auto row_nnz = poisoned<int32_t>(layer.tokens);
  const FfnForwardCuda problem{.tokens = layer.tokens,
                               .weights = layer.weights(),
                               .x = layer.x.data(),
                               .y = y.data(),
                               .row_nnz = count_rows ? row_nnz.data() : nullptr,
                               .add = !residual.empty()};
  const auto forward = [&] { ffn_forward_cuda(ctx, problem, plans[1], workspace); };
  if (graph_replays > 0) {
    forward();  // makes cuBLASLt's plans
    plans.update(ctx);
    replay_as_graph(stream, graph_replays, forward);
  } else {
    forward();
  }
  plans.update(ctx);
  EXPECT_EQ(plans[0].plan.tokens, 0);
  return {download(y), download(row_nnz), plans[1].plan, plans[1].activity};
}

double difference(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    error += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(error / size);  // NaN where anything is NaN
}

struct PlanCase {
  int64_t tokens, width, ffn;
  bool gated;
  float bias;
};
class FfnPlanCudaTest : public testing::TestWithParam<PlanCase> {};

// FATReLU's threshold is one that bf16 has, so that gates may equal it.
constexpr BlendedActivation kKinds[] = {{},
                                        {.kind = Activation::kRelu2},
                                        {.kind = Activation::kFatRelu, .threshold = 0.25f},
                                        {.kind = Activation::kDRelu}};

TEST_P(FfnPlanCudaTest, EveryExecutionGivesTheDenseResultAndCounts) {
  TWELL_GPU_TEST();
  const PlanCase& c = GetParam();
  PlanLayer layer(c.tokens, c.width, c.ffn, c.gated, c.bias);
  for (const BlendedActivation& kind : kKinds) {
    if (kind.is_drelu() && !c.gated) continue;
    SCOPED_TRACE(activation_name(kind.kind));
    layer.f = kind;
    const Outcome dense = run(ctx, stream, layer, FfnPolicy::kDense, true);
    EXPECT_FALSE(dense.plan.execution.sparse);
    int64_t nnz = 0;
    for (const int32_t count : dense.row_nnz) nnz += count;
    EXPECT_EQ(dense.plan.nnz, nnz);
    for (const FfnPolicy policy :
         {FfnPolicy::kSparse, FfnPolicy::kTileUnion, FfnPolicy::kRowFused, FfnPolicy::kAuto}) {
      if (policy == FfnPolicy::kSparse && c.tokens > 2048) continue;  // runs tile-union
      for (const bool count_rows : {true, false}) {
        const Outcome sparse = run(ctx, stream, layer, policy, count_rows);
        // Both round to bf16, at the same places or fewer.
        EXPECT_LT(difference(sparse.y, dense.y), std::ldexp(1.0, -7));
        if (!sparse.plan.execution.sparse && !count_rows) continue;  // dense counts a sample
        EXPECT_EQ(sparse.plan.tokens, c.tokens);
        // The two gate GEMMs may round a value near zero to either side.
        EXPECT_NEAR(static_cast<double>(sparse.plan.nnz), static_cast<double>(nnz),
                    1e-3 * static_cast<double>(nnz) + 2.0);
        if (count_rows) {
          int64_t sum = 0;
          for (const int32_t count : sparse.row_nnz) sum += count;
          EXPECT_EQ(sum, sparse.plan.nnz);
        }
      }
    }
  }
}

// A layer behind its screen gives what tile-union gives, and learns how many
// candidates there are.
TEST(FfnPlanCuda, RunsBehindAScreen) {
  TWELL_HOPPER_TEST();
  PlanLayer layer(9000, 1024, 4096, true, -2.0f);
  for (const BlendedActivation& kind : kKinds) {
    if (kind.is_relu2()) continue;
    SCOPED_TRACE(activation_name(kind.kind));
    layer.f = kind;
    const Outcome want = run(ctx, stream, layer, FfnPolicy::kTileUnion, true);
    for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
      const auto gate8 = poisoned<int8_t>(layer.ffn * layer.width);
      const auto spread = poisoned<int32_t>(layer.ffn);
      const auto rounding = poisoned<float>(1);
      const auto x8 = poisoned<int8_t>(layer.tokens * layer.width);
      const auto bounds = poisoned<TokenBound>(layer.tokens);
      TWELL_CUDA_CHECK(launch_rotate_gate({.neurons = layer.ffn,
                                           .width = layer.width,
                                           .w_gate = layer.firing.data(),
                                           .values = gate8.data(),
                                           .spread = spread.data(),
                                           .rounding = rounding.data(),
                                           .bound = bound},
                                          ctx.stream()));
      const RotatedRowsCuda rotated{x8.data(), bounds.data()};
      TWELL_CUDA_CHECK(launch_rotate_rows({.tokens = layer.tokens,
                                           .width = layer.width,
                                           .x = layer.x.data(),
                                           .rotated = rotated,
                                           .rounding = rounding.data(),
                                           .bound = bound},
                                          ctx.stream()));
      FfnPlansCuda plans(ctx, 1, layer.ffn, FfnPolicy::kScreened);
      FfnWorkspaceCuda workspace(ctx, layer.tokens, layer.width, layer.ffn, true);
      const auto y = poisoned<__nv_bfloat16>(layer.tokens * layer.width);
      const auto row_nnz = poisoned<int32_t>(layer.tokens);
      FfnForwardCuda problem{.tokens = layer.tokens,
                             .weights = layer.weights(),
                             .x = layer.x.data(),
                             .y = y.data(),
                             .row_nnz = row_nnz.data(),
                             .rotated = rotated};
      problem.weights.screen = {.values = gate8.data(),
                                .spread = spread.data(),
                                .rounding = rounding.data(),
                                .bound = bound};
      EXPECT_FALSE(ffn_reads_rotated(problem, plans[0], workspace));  // nothing measured yet
      plans[0].activity = {.nnz_per_token = 100.0, .union_share = 0.9, .candidate_share = 0.05};
      ASSERT_TRUE(ffn_reads_rotated(problem, plans[0], workspace));
      ffn_forward_cuda(ctx, problem, plans[0], workspace);
      EXPECT_EQ(plans[0].plan.execution.name, "screened");
      plans.update(ctx);
      EXPECT_EQ(download(row_nnz), want.row_nnz);
      EXPECT_EQ(plans[0].plan.nnz, want.plan.nnz);
      EXPECT_EQ(plans[0].plan.tokens, layer.tokens);
      // The screen of 128 tokens was checked.
      EXPECT_GT(plans[0].plan.checked_pairs, 0);
      EXPECT_LT(plans[0].plan.checked_pairs, want.plan.nnz / 40);
      EXPECT_EQ(plans[0].plan.missed_pairs, 0);
      EXPECT_LT(difference(download(y), want.y), std::ldexp(1.0, -8));
      EXPECT_GE(plans[0].activity.candidate_share, want.activity.union_share);
      EXPECT_LE(plans[0].activity.candidate_share, 1.0);
      problem.rotated = {};
      EXPECT_FALSE(ffn_reads_rotated(problem, plans[0], workspace));
    }
  }
}

// Row r of x then belongs to row y_rows[r] of y.
TEST_P(FfnPlanCudaTest, TakesRowsInAnotherOrder) {
  TWELL_GPU_TEST();
  const PlanCase& c = GetParam();
  const PlanLayer layer(c.tokens, c.width, c.ffn, c.gated, c.bias);
  const auto residual = PlanLayer::random(c.tokens * c.width, 5, 1.0f);
  const std::vector<int32_t> rows = shuffled_rows(c.tokens);
  std::vector<int32_t> tokens(rows.size());
  for (size_t m = 0; m < rows.size(); ++m) {
    tokens[static_cast<size_t>(rows[m])] = static_cast<int32_t>(m);
  }
  const auto x = upload(moved_to(rows, download(layer.x), c.width));
  const auto device_tokens = upload(tokens);
  for (const bool add : {false, true}) {
    const Outcome want = run(ctx, stream, layer, FfnPolicy::kSparse, false, 0,
                             add ? residual : std::vector<__nv_bfloat16>());
    FfnPlansCuda plans(ctx, 1, c.ffn, FfnPolicy::kSparse);
    FfnWorkspaceCuda workspace(ctx, c.tokens, c.width, c.ffn, c.gated);
    const auto y = add ? upload(residual) : poisoned<__nv_bfloat16>(c.tokens * c.width);
    const FfnForwardCuda problem{.tokens = c.tokens,
                                 .weights = layer.weights(),
                                 .x = x.data(),
                                 .y = y.data(),
                                 .add = add,
                                 .y_rows = device_tokens.data()};
    if (!ffn_maps_rows(problem, plans[0], workspace)) {
      EXPECT_THROW(ffn_forward_cuda(ctx, problem, plans[0], workspace), Error);
      continue;
    }
    ffn_forward_cuda(ctx, problem, plans[0], workspace);
    plans.update(ctx);
    EXPECT_EQ(plans[0].plan.nnz, want.plan.nnz);
    EXPECT_LT(difference(download(y), want.y), std::ldexp(1.0, -8));  // sums have another order
  }
}

// The result and the sum are each rounded to bf16 once.
TEST_P(FfnPlanCudaTest, AddsToAResidual) {
  TWELL_GPU_TEST();
  const PlanCase& c = GetParam();
  const PlanLayer layer(c.tokens, c.width, c.ffn, c.gated, c.bias);
  const auto residual = PlanLayer::random(c.tokens * c.width, 5, 1.0f);
  for (const FfnPolicy policy :
       {FfnPolicy::kDense, FfnPolicy::kSparse, FfnPolicy::kTileUnion, FfnPolicy::kRowFused}) {
    if (policy == FfnPolicy::kSparse && c.tokens > 2048) continue;  // runs tile-union
    for (const bool count_rows : {true, false}) {
      const auto alone = run(ctx, stream, layer, policy, count_rows).y;
      const auto sum = run(ctx, stream, layer, policy, count_rows, 0, residual).y;
      for (size_t i = 0; i < sum.size(); ++i) {
        const float part = __bfloat162float(alone[i]), whole = part + __bfloat162float(residual[i]);
        ASSERT_NEAR(__bfloat162float(sum[i]), whole,
                    std::ldexp(std::abs(whole) + 2.0f * std::abs(part), -8))
            << ffn_policy_name(policy) << " " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FfnPlanCudaTest,
                         testing::Values(PlanCase{1, 64, 256, true, 0.0f},
                                         PlanCase{64, 320, 1000, true, -1.0f},
                                         PlanCase{65, 320, 1000, false, -1.0f},
                                         PlanCase{128, 320, 1000, true, -1.0f},
                                         PlanCase{300, 256, 1536, true, -2.0f},
                                         // More than one chunk of tokens.
                                         PlanCase{135301, 64, 264, true, -2.0f}));

// NaN in a token reaches that token's whole result, and no other token, in every execution.
// cuBLASLt's ReLU is part of the dense one.
TEST(FfnPlanCuda, NanReachesItsTokenOnly) {
  TWELL_GPU_TEST();
  constexpr int64_t kWidth = 320, kFfn = 1000;
  for (const bool gated : {true, false}) {
    for (const int64_t tokens : {1, 5, 8, 9, 40, 65, 300}) {
      const PlanLayer layer(tokens, kWidth, kFfn, gated, -1.0f);
      const auto finite = run(ctx, stream, layer, FfnPolicy::kDense, true).y;
      const int64_t bad = tokens / 2;
      const __nv_bfloat16 nan = __float2bfloat16(NAN);
      TWELL_CUDA_CHECK(
          cudaMemcpy(layer.x.data() + bad * kWidth + 3, &nan, sizeof(nan), cudaMemcpyHostToDevice));
      synchronize_default_stream();
      for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kAuto, FfnPolicy::kSparse,
                                     FfnPolicy::kTileUnion, FfnPolicy::kRowFused}) {
        for (const bool count_rows : {true, false}) {
          SCOPED_TRACE(testing::Message()
                       << ffn_policy_name(policy) << ", " << tokens << " tokens, gated " << gated
                       << ", counts " << count_rows);
          const Outcome got = run(ctx, stream, layer, policy, count_rows);
          double error = 0.0, size = 0.0;
          for (int64_t i = 0; i < tokens * kWidth; ++i) {
            const double y = __bfloat162float(got.y[static_cast<size_t>(i)]);
            const double want = __bfloat162float(finite[static_cast<size_t>(i)]);
            if (i / kWidth == bad) {
              ASSERT_TRUE(std::isnan(y)) << "column " << i % kWidth;
              continue;
            }
            error += (y - want) * (y - want);
            size += want * want;
          }
          EXPECT_LE(std::sqrt(error), std::ldexp(std::sqrt(size), -7));
          if (count_rows) {
            EXPECT_EQ(got.row_nnz[static_cast<size_t>(bad)], kFfn);
          }
        }
      }
    }
  }
}

// Rows behind the tokens are neither counted nor reach the tokens' results.
TEST(FfnPlanCuda, DenseProductsTakeRowsAlong) {
  TWELL_GPU_TEST();
  for (const bool gated : {false, true}) {
    SCOPED_TRACE(gated);
    constexpr int64_t kTokens = 300, kRows = 384, kWidth = 128, kFfn = 512;
    PlanLayer layer(kRows, kWidth, kFfn, gated, -1.0f);
    std::vector<__nv_bfloat16> x = download(layer.x);
    std::fill(x.begin() + kTokens * kWidth, x.end(), __float2bfloat16(NAN));
    layer.x = upload(x);
    FfnWorkspaceCuda workspace(ctx, kRows, kWidth, kFfn, gated);
    const auto y_of = [&](int64_t rows, std::vector<int32_t>& row_nnz) {
      FfnPlansCuda plans(ctx, 1, kFfn, FfnPolicy::kDense);
      const auto y = poisoned<__nv_bfloat16>(kRows * kWidth);
      const auto counts = poisoned<int32_t>(kTokens);
      ffn_forward_cuda(ctx,
                       {.tokens = kTokens,
                        .rows = rows,
                        .weights = layer.weights(),
                        .x = layer.x.data(),
                        .y = y.data(),
                        .row_nnz = counts.data()},
                       plans[0], workspace);
      plans.update(ctx);
      EXPECT_EQ(plans[0].plan.tokens, kTokens);
      row_nnz = download(counts);
      std::vector<__nv_bfloat16> of_tokens = download(y);
      of_tokens.resize(kTokens * kWidth);
      return of_tokens;
    };
    std::vector<int32_t> nnz, nnz_with_rows;
    const auto want = y_of(0, nnz), got = y_of(kRows, nnz_with_rows);
    EXPECT_LT(difference(got, want), 1e-3);
    int64_t different = 0;  // where rounding decides
    for (size_t i = 0; i < nnz.size(); ++i) different += std::abs(nnz[i] - nnz_with_rows[i]);
    EXPECT_LE(different, 3);
  }
}

TEST(FfnPlanCuda, LearnsFromWhatItRan) {
  TWELL_HOPPER_TEST();
  const PlanLayer light(4096, 2048, 5632, true, -3.5f), full(4096, 2048, 5632, true, 3.0f);
  for (const PlanLayer* layer : {&light, &full}) {
    FfnPlansCuda plans(ctx, 1, layer->ffn, FfnPolicy::kAuto);
    FfnWorkspaceCuda workspace(ctx, layer->tokens, layer->width, layer->ffn, true);
    const auto y = poisoned<__nv_bfloat16>(layer->tokens * layer->width);
    const FfnForwardCuda problem{
        .tokens = layer->tokens, .weights = layer->weights(), .x = layer->x.data(), .y = y.data()};
    ffn_forward_cuda(ctx, problem, plans[0], workspace);
    EXPECT_EQ(plans[0].plan.reason, "nothing measured yet");
    plans.update(ctx);
    ffn_forward_cuda(ctx, problem, plans[0], workspace);
    EXPECT_EQ(plans[0].plan.execution.sparse, layer == &light) << plans[0].plan.reason;
    // A dense layer goes on counting.
    plans.update(ctx);
    EXPECT_EQ(plans[0].plan.tokens, 2 * layer->tokens);
  }
}

TEST(FfnPlanCuda, AveragesWhatKernelsCounted) {
  // Calls of 256 and of 384 tokens, with unions of up to 300 and 500 neurons of 1,000.
  const ActivityCuda counts{.tokens = 640,
                            .nnz = 6400,
                            .unions = 5,
                            .union_neurons = 1500,
                            .union_calls = 2,
                            .largest_union = 800,
                            .max_row_nnz = 30};
  const LayerActivity activity = layer_activity(counts, 1000);
  EXPECT_EQ(activity.nnz_per_token, 10.0);
  EXPECT_EQ(activity.union_share, 0.3);
  EXPECT_EQ(activity.largest_union, 0.4);
  EXPECT_EQ(activity.extra_tiles, 0.0);
  // Few tokens count no unions, so that what is known of them stays.
  const LayerActivity later = layer_activity({.tokens = 8, .nnz = 40}, 1000, activity);
  EXPECT_EQ(later.nnz_per_token, 5.0);
  EXPECT_EQ(later.union_share, 0.3);
  EXPECT_EQ(later.largest_union, 0.4);
}

TEST(FfnPlanCuda, SaysHowMuchMemoryItTakes) {
  TWELL_GPU_TEST();
  for (const int64_t tokens : {1, 1000, 100000}) {
    const FfnWorkspaceCuda workspace(ctx, tokens, 512, 1408, true);
    const int64_t needed = FfnWorkspaceCuda::bytes_needed(ctx, tokens, 1408);
    EXPECT_LE(needed, workspace.bytes());
    EXPECT_LE(workspace.bytes(), needed + (int64_t{8} << 20)) << tokens;
  }
}

TEST(FfnPlanCuda, TakesFewerTokensAtOnceWhereTheyTakeMuchMemory) {
  TWELL_GPU_TEST();
  const int64_t round = ctx.multiprocessors() / 2 * 256, many = 64 * round;
  EXPECT_EQ(FfnWorkspaceCuda::chunk_tokens(ctx, many, 264), 8 * round);
  EXPECT_EQ(FfnWorkspaceCuda::chunk_tokens(ctx, many, 16384), 4 * round);
  EXPECT_EQ(FfnWorkspaceCuda::chunk_tokens(ctx, many, 65536), 2 * round);
  EXPECT_EQ(FfnWorkspaceCuda::chunk_tokens(ctx, 8 * round, 264), 8 * round);
  EXPECT_EQ(FfnWorkspaceCuda::chunk_tokens(ctx, 1000, 264), 1024);
}

TEST(FfnPlanCuda, ReplaysAsAGraph) {
  TWELL_GPU_TEST();
  for (const int64_t tokens : {8, 200}) {
    const PlanLayer layer(tokens, 256, 1024, true, -1.5f);
    for (const FfnPolicy policy :
         {FfnPolicy::kDense, FfnPolicy::kSparse, FfnPolicy::kTileUnion, FfnPolicy::kRowFused}) {
      const Outcome once = run(ctx, stream, layer, policy, false);
      const Outcome replayed = run(ctx, stream, layer, policy, false, 3);
      EXPECT_EQ(difference(replayed.y, once.y), 0.0);
      EXPECT_EQ(replayed.plan.nnz, 4 * once.plan.nnz);
      EXPECT_EQ(replayed.activity.largest_union, once.activity.largest_union);
    }
  }
}

}  // namespace
}  // namespace twell
