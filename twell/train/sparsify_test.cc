// SPDX-License-Identifier: Apache-2.0
// Sparsifying continues a model with SiLU gates as a ReLU model, with or without a teacher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "twell/checkpoint/checkpoint.h"
#include "twell/model/scorer_cpu.h"
#include "twell/train/run.h"
#include "twell/train/side_by_side.h"
#include "twell/train/test_run.h"
#include "twell/train/trainer.h"
#include "twell/train/validation.h"

namespace twell {
namespace {

namespace fs = std::filesystem;

class SparsifyTest : public testing::Test {
 protected:
  std::unique_ptr<Model> silu_model() {
    ModelConfig config = micro_config(data_.tokenizer.vocab_size());
    config.activation = Activation::kSilu;
    auto model = std::make_unique<Model>(config);
    init_weights(ctx_, *model, 3);
    return model;
  }
  static TrainOptions relufy_options(int64_t steps, int64_t blend) {
    TrainOptions options = micro_options(steps);
    options.relufy_from = Activation::kSilu;
    options.relufy_steps = blend;
    return options;
  }
  CpuTrainer trainer(Model& model, const TrainOptions& options, const Model* teacher = nullptr) {
    return {ctx_, model, data_.shards, resolve_options(options, model.config), "data", teacher};
  }

  TempFolder temp_;
  MicroData data_{temp_.path()};
  Context ctx_{1};
};

TEST_F(SparsifyTest, ReluTakesOverWhileTheModelTrainsOn) {
  auto model = silu_model();
  model->set_activation(Activation::kRelu);
  TrainOptions options = relufy_options(6, 3);
  CpuTrainer trainer = this->trainer(*model, options);
  std::vector<double> shares;
  while (!trainer.finished()) shares.push_back(*trainer.train_step().relu_share);
  EXPECT_EQ(shares, (std::vector<double>{0.25, 0.5, 0.75, 1.0, 1.0, 1.0}));
}

// With a blend the first step is close to that of the SiLU model, without one it equals that of the
// ReLU model.
TEST_F(SparsifyTest, TheBlendStartsAtTheOldActivation) {
  const auto first_ce = [&](Activation own, const TrainOptions& options) {
    auto model = silu_model();
    model->set_activation(own);
    return trainer(*model, options).train_step().ce;
  };
  const double silu = first_ce(Activation::kSilu, micro_options(2000));
  const double relu = first_ce(Activation::kRelu, micro_options(2000));
  ASSERT_GT(std::abs(silu - relu), 1e-5);
  EXPECT_NEAR(first_ce(Activation::kRelu, relufy_options(2000, 1000)), silu,
              0.01 * std::abs(silu - relu));
  EXPECT_EQ(first_ce(Activation::kRelu, relufy_options(2000, 0)), relu);
}

TEST_F(SparsifyTest, ATeacherThatIsTheModelHasNothingToTeach) {
  auto model = silu_model();
  const auto teacher = silu_model();
  TrainOptions options = micro_options(10);
  options.distill = 1.0;
  options.l1_coeff = 0.0;
  const StepMetrics metrics = trainer(*model, options, teacher.get()).train_step();
  EXPECT_NEAR(*metrics.kl, 0.0, 1e-6);
  EXPECT_LT(metrics.grad_norm, 1e-5);
}

TEST_F(SparsifyTest, DistillationBringsTheModelsTogether) {
  auto model = silu_model();
  const auto teacher = silu_model();
  for (float& weight : teacher->flat.span()) weight *= 3.0f;  // so that they differ
  TrainOptions options = relufy_options(60, 0);
  options.distill = 1.0;
  options.l1_coeff = 0.0;
  model->set_activation(Activation::kRelu);
  CpuTrainer trainer = this->trainer(*model, options, teacher.get());
  const double before = *trainer.train_step().kl;
  double after = before;
  while (!trainer.finished()) after = *trainer.train_step().kl;
  EXPECT_LT(after, 0.6 * before);
}

TEST_F(SparsifyTest, ResumesBitForBitInTheMiddleOfABlend) {
  const TrainOptions options = relufy_options(6, 4);
  auto whole = silu_model();
  whole->set_activation(Activation::kRelu);
  CpuTrainer uninterrupted = trainer(*whole, options);
  while (!uninterrupted.finished()) uninterrupted.train_step();

  auto model = silu_model();
  model->set_activation(Activation::kRelu);
  const fs::path folder = temp_.path() / "checkpoint";
  fs::create_directories(folder);
  CpuTrainer first = trainer(*model, options);
  for (int step = 0; step < 2; ++step) first.train_step();
  first.save(folder);

  const auto resumed = load_model(ctx_, folder);
  EXPECT_EQ(resumed->config.activation, Activation::kRelu);
  CpuTrainer second = trainer(*resumed, options);
  second.restore(folder);
  while (!second.finished()) second.train_step();
  EXPECT_EQ(std::memcmp(resumed->flat.data(), whole->flat.data(), whole->flat.span().size_bytes()),
            0);

  CpuTrainer other = trainer(*resumed, relufy_options(6, 3));
  EXPECT_THROW(other.restore(folder), InputError) << "another blend is another run";
}

TEST_F(SparsifyTest, SideBySideMeasuresBoth) {
  const auto original = silu_model();
  auto sparse = silu_model();
  sparse->set_activation(Activation::kRelu);
  ScorerCpu dense_scorer(ctx_, *original), sparse_scorer(ctx_, *sparse);
  const ValidationOptions held_out{.sequences = 4, .length = 16};
  const SideBySide figures =
      compare_side_by_side(dense_scorer, sparse_scorer, data_.shards, held_out);
  EXPECT_NEAR(figures.sparse.ce, validation_cross_entropy(sparse_scorer, data_.shards, held_out),
              1e-5);
  EXPECT_EQ(figures.original.active_share, 1.0);
  EXPECT_GT(figures.sparse.active_share, 0.2);
  EXPECT_LT(figures.sparse.active_share, 0.8);
  EXPECT_NE(figures.original.ce, figures.sparse.ce);
  EXPECT_GT(figures.sparse.tokens_per_second, 0.0);
  EXPECT_EQ(side_by_side_json(figures)["original"]["active_per_token"], 48.0);
  SideBySide known;
  known.original = {.ce = 2.0, .tokens_per_second = 100.0};
  known.sparse = {.ce = 3.0, .tokens_per_second = 150.0};
  EXPECT_EQ(side_by_side_json(known)["ce_ratio"], 1.5);
  EXPECT_EQ(side_by_side_json(known)["speedup"], 1.5);
}

}  // namespace
}  // namespace twell
