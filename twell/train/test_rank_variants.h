// SPDX-License-Identifier: Apache-2.0
// A few steps of each variant of test_run.h, on one rank or as one of several, and what a run of
// several ranks has in common with that of one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "twell/train/engine.h"
#include "twell/train/test_run.h"

namespace twell {

// A variant's model and options. A step has five micro-batches: of two ranks the first has three.
struct VariantSetup {
  static constexpr int64_t kSteps = 5;  // blends end after the fourth

  VariantSetup(const RunVariant& variant, int64_t vocab_size, Communicator* all)
      : config(micro_config(vocab_size)), options(micro_options(kSteps)) {
    options.batch_tokens = 5 * options.micro_batch * config.context;
    options.reinit_dead = true;
    options.clip_norm = 0.5;
    variant.change(config, options);
    options.ranks = all == nullptr ? 1 : all->size();
    options = resolve_options(options, config);
  }
  Model model(Context& ctx, uint64_t seed) const {
    Model model(config);
    init_weights(ctx, model, seed);
    return model;
  }
  // Null without distillation.
  std::unique_ptr<Model> teacher(Context& ctx) const {
    if (options.distill == 0.0) return nullptr;
    return std::make_unique<Model>(model(ctx, 4));
  }

  ModelConfig config;
  TrainOptions options;
};

// Answers of conversations, of which the ranks' micro-batches have unlike numbers, with a teacher.
inline constexpr RunVariant kTalkVariants[] = {{"talks", [](auto&, auto& o) {
                                                  o.document_mask = true;
                                                  o.distill = 0.5;
                                                }}};

// Neurons fire on so few tokens that some do on those of one rank alone. Dead ones stay as they
// are, because a token at the threshold may decide otherwise after a step in bf16.
inline constexpr RunVariant kSeldomVariants[] = {{"seldom", [](auto& c, auto& o) {
                                                    c.family = Family::kProSparse;
                                                    c.activation = Activation::kFatRelu;
                                                    c.activation_threshold = 0.18;
                                                    o.reinit_dead = false;
                                                  }}};

// What a rank found.
struct VariantRun {
  std::vector<StepMetrics> steps;
  // [N] AdamW's first moments after the first step: gradients, clipped, times 1 - beta1. The values
  // of other ranks' pieces are 0.
  std::vector<float> first_moments;
  std::vector<float> weights;  // [N] in the end
};

inline VariantRun run_variant(Context& ctx, TrainEngine& engine, const TrainingData& data,
                              const TrainOptions& options) {
  VariantRun run;
  Trainer trainer(ctx, engine, data, options, "data");
  run.steps.push_back(trainer.train_step());
  run.first_moments.assign(static_cast<size_t>(engine.layout().parameters()), 0.0f);
  engine.read_state([&](const OptimizerTensors& state) {
    for (const ShardPiece& piece : engine.layout().pieces()) {
      std::copy_n(state.exp_avg.begin() + piece.local, piece.size,
                  run.first_moments.begin() + piece.begin);
    }
  });
  while (!trainer.finished()) run.steps.push_back(trainer.train_step());
  engine.read_state([&](const OptimizerTensors& state) {
    run.weights.assign(state.weights.begin(), state.weights.end());
  });
  return run;
}

// How far runs may be apart for no other reason than the order of sums.
struct RankTolerance {
  double first_loss = 0.0;  // nats, of weights that are the same
  double loss = 0.0;        // nats, of later steps
  double gradient = 0.0;    // of the first step: of a parameter's norm
  double weights = 0.0;     // in the end: of the way that a parameter has gone
};

inline void expect_near_parameters(const Model& start, std::span<const float> got,
                                   std::span<const float> want, bool ways, double tolerance) {
  const auto square = [](double value) { return value * value; };
  const auto moved = [&](size_t i) {
    return static_cast<double>(want[i]) - (ways ? static_cast<double>(start.flat[i]) : 0.0);
  };
  double all = 0.0;
  for (size_t i = 0; i < want.size(); ++i) all += square(moved(i));
  for (const ParamSpec& spec : start.table) {
    // Terms of a gradient may cancel, so that it is little more than the error of their sum.
    double norm = 0.01 * all / static_cast<double>(want.size()) * static_cast<double>(spec.size());
    double error = 0.0;
    for (auto i = static_cast<size_t>(spec.offset);
         i < static_cast<size_t>(spec.offset + spec.size()); ++i) {
      error += square(static_cast<double>(got[i]) - static_cast<double>(want[i]));
      norm += square(moved(i));
    }
    EXPECT_LE(std::sqrt(error / norm), tolerance) << spec.name << (ways ? "" : ": its gradient");
  }
}

// start: the model that all runs began with.
inline void expect_run_of_one_rank(const Model& start, const std::vector<VariantRun>& ranks,
                                   const VariantRun& one, const RankTolerance& tolerance) {
  std::vector<float> first_moments(one.first_moments.size());
  for (const VariantRun& rank : ranks) {
    EXPECT_EQ(rank.weights, ranks[0].weights);
    ASSERT_EQ(rank.steps.size(), one.steps.size());
    for (size_t i = 0; i < first_moments.size(); ++i) first_moments[i] += rank.first_moments[i];
    for (size_t step = 0; step < one.steps.size(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step + 1));
      const StepMetrics &got = rank.steps[step], &want = one.steps[step];
      const double nats = step == 0 ? tolerance.first_loss : tolerance.loss;
      EXPECT_NEAR(got.ce, want.ce, nats);
      ASSERT_EQ(got.kl.has_value(), want.kl.has_value());
      EXPECT_NEAR(got.kl.value_or(0.0), want.kl.value_or(0.0), nats);
      EXPECT_EQ(got.relu_share, want.relu_share);
      if (step > 0) continue;
      EXPECT_NEAR(got.l1, want.l1, tolerance.gradient * want.l1);
      EXPECT_NEAR(got.grad_norm, want.grad_norm, tolerance.gradient * want.grad_norm);
      for (size_t layer = 0; layer < want.layers.size(); ++layer) {
        EXPECT_EQ(got.layers[layer].dead, want.layers[layer].dead);
        EXPECT_EQ(got.layers[layer].max_nnz, want.layers[layer].max_nnz);
        EXPECT_NEAR(got.layers[layer].nnz, want.layers[layer].nnz, 1e-9);
      }
    }
  }
  expect_near_parameters(start, first_moments, one.first_moments, false, tolerance.gradient);
  expect_near_parameters(start, ranks[0].weights, one.weights, true, tolerance.weights);
}

}  // namespace twell
