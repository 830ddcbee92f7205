// SPDX-License-Identifier: Apache-2.0
#include "twell/train/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "twell/base/error.h"
#include "twell/train/plan.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

using testing::HasSubstr;

std::string refusal(const std::function<void(TrainOptions&)>& change) {
  TrainOptions options = micro_options(100);
  change(options);
  try {
    resolve_options(options, micro_config(300));
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Options, DerivedValues) {
  TrainOptions options;
  options.tokens = 1000;
  options.micro_batch = 3;
  options = resolve_options(options, micro_config(300));
  EXPECT_EQ(options.sequence_length, 16);
  EXPECT_EQ(options.batch_tokens, 48);
  EXPECT_EQ(options.steps, 21);
  EXPECT_EQ(options.tokens, 21 * 48);
  EXPECT_EQ(options.warmup_steps, 2);
  options.tokens = 0;
  options.steps = 10'000;
  options.warmup_steps = -1;
  EXPECT_EQ(resolve_options(options, micro_config(300)).warmup_steps, 600);
}

TEST(Options, RefusesWhatCannotBe) {
  EXPECT_EQ(refusal([](auto&) {}), "accepted");
  EXPECT_THAT(refusal([](auto& o) { o.steps = 0; }), HasSubstr("steps must be between 1"));
  EXPECT_THAT(refusal([](auto& o) { o.steps = -3; }), HasSubstr("got -3"));
  EXPECT_THAT(refusal([](auto& o) { o.tokens = -1; }), HasSubstr("tokens"));
  EXPECT_THAT(refusal([](auto& o) { o.tokens = INT64_MAX; }), HasSubstr("tokens"));
  EXPECT_THAT(refusal([](auto& o) { o.sequence_length = 17; }), HasSubstr("context of 16"));
  EXPECT_THAT(refusal([](auto& o) { o.sequence_length = -1; }),
              HasSubstr("--sequence-length must be at least 0"));
  EXPECT_THAT(refusal([](auto& o) { o.micro_batch = 0; }),
              HasSubstr("--micro-batch must be 1 to 65536, got 0"));
  EXPECT_THAT(refusal([](auto& o) { o.batch_tokens = 65; }), HasSubstr("not a multiple"));
  EXPECT_THAT(refusal([](auto& o) { o.batch_tokens = INT64_MAX; }), HasSubstr("batch tokens"));
  EXPECT_THAT(refusal([](auto& o) { o.warmup_steps = 100; }), HasSubstr("warm-up"));
  EXPECT_THAT(refusal([](auto& o) { o.learning_rate = 0; }),
              HasSubstr("--lr must be above 0 and at most 10, got 0"));
  EXPECT_THAT(refusal([](auto& o) { o.learning_rate = std::nan(""); }), HasSubstr("got nan"));
  EXPECT_THAT(refusal([](auto& o) { o.beta1 = 1; }),
              HasSubstr("--beta1 must be at least 0 and below 1, got 1"));
  EXPECT_THAT(refusal([](auto& o) { o.eps = 0; }), HasSubstr("eps"));
  EXPECT_THAT(refusal([](auto& o) { o.weight_decay = -0.1; }),
              HasSubstr("--weight-decay must be 0 to 100"));
  EXPECT_THAT(refusal([](auto& o) { o.l1_coeff = INFINITY; }),
              HasSubstr("--l1 must be 0 to 1000000, got inf"));
  EXPECT_THAT(refusal([](auto& o) { o.reinit_strength = 1.5; }), HasSubstr("--reinit-strength"));
  EXPECT_THAT(refusal([](auto& o) { o.keep_last = 0; }), HasSubstr("--keep-last"));
  EXPECT_THAT(refusal([](auto& o) { o.momentum = 0.9; }),
              HasSubstr("--momentum 0.9 goes with --optimizer muon"));
  EXPECT_THAT(refusal([](auto& o) { o.decay_fraction = 0.5; }),
              HasSubstr("--decay-fraction 0.5 goes with --schedule wsd"));
  EXPECT_THAT(refusal([](auto& o) { o.reinit_strength = 0.2; }), HasSubstr("with --reinit-dead"));
  EXPECT_THAT(refusal([](auto& o) { o.reinit_std = 0.1; }), HasSubstr("with --reinit-dead"));
  EXPECT_THAT(refusal([](auto& o) { o.sample_tokens = 5; }), HasSubstr("with --sample-every"));
  EXPECT_THROW(parse_l1_reduction("max"), InputError);
  EXPECT_THROW(parse_schedule("linear"), InputError);
  EXPECT_THAT(refusal([](auto& o) {
                o.schedule = Schedule::kWsd;
                o.warmup_steps = 20;
                o.decay_fraction = 0.9;
              }),
              HasSubstr("a warm-up of 20 steps and a decay of 90 do not fit a run of 100"));
}

// A run resumes with the options that decide its weights alone: each of them changes the text that
// is compared.
TEST(Options, TheTrajectoryHasEveryOptionThatDecidesWeights) {
  using Change = std::function<void(TrainOptions&)>;
  const auto changed = [](const TrainOptions& base, const Change& change) {
    TrainOptions options = base;
    change(options);
    return trajectory_text(options) != trajectory_text(base);
  };
  TrainOptions wsd, relufied, muon;
  muon.optimizer = OptimizerKind::kMuon;
  wsd.schedule = Schedule::kWsd;
  relufied.relufy_from = Activation::kSilu;
  const std::pair<TrainOptions, Change> cases[] = {
      {{}, [](auto& o) { o.sequence_length = 8; }},
      {{}, [](auto& o) { o.micro_batch += 1; }},
      {{}, [](auto& o) { o.batch_tokens += 1; }},
      {{}, [](auto& o) { o.document_mask = true; }},
      {{}, [](auto& o) { o.learning_rate *= 2; }},
      {{}, [](auto& o) { o.optimizer = OptimizerKind::kMuon; }},
      {muon, [](auto& o) { o.matrix_learning_rate = 0.01; }},
      {muon, [](auto& o) { o.momentum = 0.9; }},
      {{}, [](auto& o) { o.schedule = Schedule::kWsd; }},
      {wsd, [](auto& o) { o.decay_fraction += 0.1; }},
      {{}, [](auto& o) { o.min_lr_ratio += 0.1; }},
      {{}, [](auto& o) { o.warmup_steps = 3; }},
      {{}, [](auto& o) { o.beta1 -= 0.1; }},
      {{}, [](auto& o) { o.beta2 -= 0.1; }},
      {{}, [](auto& o) { o.eps *= 2; }},
      {{}, [](auto& o) { o.weight_decay += 0.1; }},
      {{}, [](auto& o) { o.clip_norm += 0.1; }},
      {{}, [](auto& o) { o.l1_coeff += 0.1; }},
      {{}, [](auto& o) { o.l1_reduction = L1Reduction::kMean; }},
      {{}, [](auto& o) { o.l1_zero_steps = 3; }},
      {{}, [](auto& o) { o.l1_ramp_steps = 3; }},
      {{}, [](auto& o) { o.relufy_from = Activation::kSilu; }},
      {relufied, [](auto& o) { o.relufy_from = Activation::kGelu; }},
      {relufied, [](auto& o) { o.relufy_steps = 3; }},
      {{}, [](auto& o) { o.distill = 0.5; }},
      {{}, [](auto& o) { o.reinit_dead = true; }},
      {{}, [](auto& o) { o.reinit_strength += 0.1; }},
      {{}, [](auto& o) { o.reinit_std += 0.1; }},
      {{}, [](auto& o) { o.ffn_policy = FfnTrainPolicy::kDense; }},
      {{}, [](auto& o) { o.moment_dtype = DType::kBF16; }},
      {{}, [](auto& o) { o.gradient_dtype = DType::kBF16; }},
      {{}, [](auto& o) { o.compute = MatmulCompute::kBF16; }},
      {{}, [](auto& o) { o.seed += 1; }}};
  for (const auto& [base, change] : cases) {
    EXPECT_TRUE(changed(base, change)) << &base - &cases[0].first;
  }
  // The length of a run and what is saved of it may change.
  EXPECT_FALSE(changed({}, [](auto& o) { o.steps += 1; }));
  EXPECT_FALSE(changed({}, [](auto& o) { o.save_dtype = DType::kBF16; }));
}

TEST(Options, MuonHasARateOfItsOwn) {
  TrainOptions options;
  options.steps = 100;
  options.warmup_steps = 10;
  options.learning_rate = 2e-3;
  options.optimizer = OptimizerKind::kMuon;
  const ModelConfig config = preset_config("tiny");
  TrainOptions resolved = resolve_options(options, config);
  EXPECT_DOUBLE_EQ(resolved.matrix_learning_rate, 8e-3);
  options.matrix_learning_rate = 5e-3;
  resolved = resolve_options(options, config);
  for (const int64_t step : {0, 5, 50, 99}) {
    EXPECT_DOUBLE_EQ(matrix_learning_rate_at(resolved, step),
                     2.5 * learning_rate_at(resolved, step));
  }
  options.moment_dtype = DType::kBF16;
  EXPECT_THROW(resolve_options(options, config), InputError);
  options.moment_dtype = DType::kF32;
  options.optimizer = OptimizerKind::kAdamW;
  EXPECT_THROW(resolve_options(options, config), InputError);
  EXPECT_EQ(parse_optimizer("muon"), OptimizerKind::kMuon);
  EXPECT_THROW(parse_optimizer("sgd"), InputError);
}

TEST(Options, RecipesOfThePresets) {
  EXPECT_EQ(preset_train_options("0.5b").steps, 10'000);
  EXPECT_EQ(preset_train_options("1b").steps, 20'000);
  EXPECT_EQ(preset_train_options("2b").steps, 40'000);
  const TrainOptions options = resolve_options(preset_train_options("1.5b"), preset_config("1.5b"));
  EXPECT_EQ(options.steps, 30'000);
  EXPECT_EQ(options.warmup_steps, 600);
  EXPECT_EQ(options.batch_sequences(), 512);
  EXPECT_THROW(preset_train_options("3b"), InputError);
}

TEST(Plan, CountsEveryParameterFourTimes) {
  const ModelConfig config = micro_config(300);
  const TrainOptions options = resolve_options(micro_options(10), config);
  const RunPlan plan = plan_run(config, options, 0);
  EXPECT_EQ(plan.parameters, config.parameter_count());
  EXPECT_GT(plan.memory_bytes(), 16 * plan.parameters);
  EXPECT_DOUBLE_EQ(plan.flops_per_step, 64 * plan.flops_per_token);
  EXPECT_EQ(plan.mapped_bytes, 0);
  // A long run maps all of its shards, a short one only the pages around its windows.
  EXPECT_EQ(plan_run(config, options, 1000).mapped_bytes, 1000);
  const RunPlan large = plan_run(config, options, int64_t{1} << 40);
  EXPECT_LT(large.mapped_bytes, int64_t{1} << 24);
  EXPECT_EQ(large.memory_bytes(), plan.memory_bytes());
}

TEST(ParseRecomputeTest, LevelsAndLayers) {
  EXPECT_FALSE(parse_recompute("auto").has_value());
  EXPECT_EQ(parse_recompute("none")->of_layer(0), RecomputeLevel::kNone);
  EXPECT_EQ(parse_recompute("norms")->of_layer(99), RecomputeLevel::kNorms);
  const Recompute some = *parse_recompute("qkv:3");
  EXPECT_EQ(some.of_layer(2), RecomputeLevel::kQkv);
  EXPECT_EQ(some.of_layer(3), RecomputeLevel::kInputs);
  for (const char* bad :
       {"", "qkv:", "qkv:0", "qkv:-1", "qkv:2x", "none:2", "all", "qkv:99999999999999999999"}) {
    EXPECT_THROW(parse_recompute(bad), InputError) << bad;
  }
}

TEST(StatedPeak, KnowsVariantsOfAPartAndNothingElse) {
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H200"), 989.4e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H200 NVL"), 835.5e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H100 80GB HBM3"), 989.4e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(stated_peak_flops("NVIDIA GeForce RTX 3060"), 0.0);
  EXPECT_EQ(stated_peak_flops(""), 0.0);
}

}  // namespace
}  // namespace twell
