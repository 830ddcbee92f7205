// SPDX-License-Identifier: Apache-2.0
// Whole runs of a micro model: learning, resuming bit for bit, and stopping on non-finite values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <vector>

#include "twell/checkpoint/checkpoint.h"
#include "twell/train/run.h"
#include "twell/train/test_run.h"
#include "twell/train/trainer.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class TrainerTest : public testing::Test {
 protected:
  ModelConfig config() const { return micro_config(data_.tokenizer.vocab_size()); }
  std::unique_ptr<Model> fresh_model() {
    auto model = std::make_unique<Model>(config());
    init_weights(ctx_, *model, 3);
    return model;
  }

  TrainSummary run_on_cpu(Model& model, const TrainRun& run) {
    TrainEngineCpu engine(ctx_, model, run.data, run.options);
    return run_training(ctx_, engine, run);
  }

  // Runs in `out`, starting from its newest checkpoint if there is one; returns the model.
  std::unique_ptr<Model> run(const fs::path& out, TrainOptions options,
                             const std::function<void(const Progress&)>& on_progress = {}) {
    const RunFolder folder(out, fs::exists(out));
    const auto resume_from = folder.latest();
    auto model = resume_from ? load_model(ctx_, resume_from->folder) : fresh_model();
    options = resolve_options(options, config());
    TrainRun training{options,     data_.tokenizer, data_.shards, folder, "{}",
                      resume_from, false,           stop_,        {},     on_progress};
    summary_ = run_on_cpu(*model, training);
    return model;
  }

  void expect_same(const Model& a, const Model& b) {
    ASSERT_EQ(a.flat.size(), b.flat.size());
    EXPECT_EQ(std::memcmp(a.flat.data(), b.flat.data(), a.flat.span().size_bytes()), 0);
  }
  fs::path out(const char* name) const { return temp_.path() / name; }

  TempFolder temp_;
  MicroData data_{temp_.path()};
  Context ctx_{1};
  std::atomic<bool> stop_{false};
  TrainSummary summary_;
};

TEST_F(TrainerTest, LearnsAndReports) {
  TrainOptions options = micro_options(40);
  options.validate_every = 20;
  options.validation_sequences = 8;
  int64_t reports = 0;
  run(out("a"), options, [&](const Progress& now) {
    if (now.metrics.step == 0) return;
    ++reports;
    EXPECT_EQ(now.metrics.layers.size(), 2u);
  });
  EXPECT_EQ(reports, 40);
  EXPECT_EQ(summary_.steps_done, 40);
  EXPECT_FALSE(summary_.interrupted);
  EXPECT_NEAR(*summary_.first_validation_ce, std::log(300.0), 0.3);
  EXPECT_LT(*summary_.last_validation_ce, *summary_.first_validation_ce - 1.0);
  EXPECT_TRUE(fs::exists(out("a") / "checkpoint" / "tokenizer.json"));
  std::ifstream metrics(out("a") / "metrics.jsonl");
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(metrics), {}, '\n'), 41);
}

// Embedding and norms hardly move at so small a rate, so that what is learned is in the matrices.
TEST_F(TrainerTest, MuonMovesTheMatricesAtTheirOwnRate) {
  TrainOptions options = micro_options(40);
  options.learning_rate = 1e-5;
  options.validate_every = 40;
  options.optimizer = OptimizerKind::kMuon;
  options.matrix_learning_rate = 1e-5;
  run(out("still"), options);
  EXPECT_GT(*summary_.last_validation_ce, *summary_.first_validation_ce - 0.05);
  options.matrix_learning_rate = 5e-2;
  run(out("moved"), options);
  EXPECT_LT(*summary_.last_validation_ce, *summary_.first_validation_ce - 0.12);
}

class TrainVariantsTest : public testing::TestWithParam<RunVariant> {};

TEST_P(TrainVariantsTest, ResumeBitForBit) {
  const TempFolder temp;
  const MicroData data(temp.path());
  Context ctx(1);
  ModelConfig config = micro_config(data.tokenizer.vocab_size());
  TrainOptions options = micro_options(6);
  options.reinit_dead = true;
  GetParam().change(config, options);
  options = resolve_options(options, config);
  Model teacher(config);
  init_weights(ctx, teacher, 4);
  const auto train = [&](int64_t to, const fs::path& from, const fs::path& into) {
    std::unique_ptr<Model> model;
    if (from.empty()) {
      model = std::make_unique<Model>(config);
      init_weights(ctx, *model, 3);
    } else {
      model = load_model(ctx, from);
      EXPECT_EQ(model->config, config);
    }
    CpuTrainer trainer(ctx, *model, data.shards, options, "data",
                       options.distill > 0.0 ? &teacher : nullptr);
    if (!from.empty()) trainer.restore(from);
    while (trainer.steps_done() < to) trainer.train_step();
    if (!into.empty()) {
      fs::create_directories(into);
      trainer.save(into);
    }
    return std::vector<float>(model->flat.span().begin(), model->flat.span().end());
  };
  const fs::path half = temp.path() / "half";
  const std::vector<float> straight = train(6, {}, {});
  EXPECT_NE(train(3, {}, half), straight);
  EXPECT_EQ(train(6, half, {}), straight);
}

INSTANTIATE_TEST_SUITE_P(Runs, TrainVariantsTest, testing::ValuesIn(kRunVariants), variant_name);

TEST_F(TrainerTest, ThreeStepsAndThreeMoreAreSixBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TrainOptions options = micro_options(6);
    options.save_dtype = dtype;
    if (dtype == DType::kBF16) options.optimizer = OptimizerKind::kMuon;
    options.reinit_dead = true;
    const std::string suffix = dtype == DType::kF32 ? "f32" : "bf16";
    const auto straight = run(out(("straight-" + suffix).c_str()), options);
    const fs::path folder = out(("halves-" + suffix).c_str());
    run(folder, options, [&](const Progress& now) { stop_ = now.metrics.step == 3; });
    EXPECT_TRUE(summary_.interrupted);
    EXPECT_EQ(summary_.steps_done, 3);
    stop_ = false;
    const auto halves = run(folder, options);
    EXPECT_EQ(summary_.steps_done, 6);
    expect_same(*straight, *halves);
  }
}

TEST_F(TrainerTest, ARunKilledBetweenSavesContinuesFromTheLastOne) {
  TrainOptions options = micro_options(6);
  options.save_every = 2;
  const auto straight = run(out("straight"), options);
  const auto die = [](const Progress& now) {
    if (now.metrics.step == 5) throw std::runtime_error("killed");
  };
  EXPECT_THROW(run(out("killed"), options, die), std::runtime_error);
  std::vector<int64_t> steps;
  const auto resumed =
      run(out("killed"), options, [&](const Progress& now) { steps.push_back(now.metrics.step); });
  EXPECT_EQ(steps, (std::vector<int64_t>{5, 6}));
  expect_same(*straight, *resumed);
}

TEST_F(TrainerTest, ADamagedCheckpointIsNamedWithTheNewestIntactOne) {
  TrainOptions options = micro_options(6);
  options.save_every = 2;
  options.keep_last = 3;
  const auto straight = run(out("run"), options);
  const RunFolder folder(out("run"), true);
  const auto refusal = [&](const ResumeRequest& request) -> std::string {
    try {
      return "accepted step " + std::to_string(folder.resume_point(request)->step);
    } catch (const InputError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal({}), "accepted step 6");
  EXPECT_EQ(refusal({.step = 2}), "accepted step 2");
  EXPECT_THAT(refusal({.step = 3}), HasSubstr("no checkpoint of step 3"));
  const fs::path newest = out("run") / "checkpoints" / "step-000006";
  fs::resize_file(newest / "model.safetensors", 3000);
  EXPECT_THAT(refusal({}), HasSubstr("model.safetensors"));
  EXPECT_THAT(refusal({}), HasSubstr("step 4 is intact"));
  EXPECT_EQ(refusal({.fall_back = true}), "accepted step 4");
  std::ofstream(out("run") / "checkpoints" / "step-000004" / "trainer" / "state.json") << "{\"a\":";
  EXPECT_THAT(refusal({.step = 4}),
              HasSubstr("state.json: not valid JSON at byte 6: it ends early"));
  EXPECT_EQ(refusal({.fall_back = true}), "accepted step 2");
  EXPECT_THAT(refusal({.step = 4}), testing::Not(HasSubstr("json.exception")));

  // The run continues from the intact checkpoint, and the damaged ones are removed.
  const Checkpoint from = *folder.resume_point({.fall_back = true});
  const auto model = load_model(ctx_, from.folder);
  options = resolve_options(options, config());
  TrainRun training{options, data_.tokenizer, data_.shards, folder, "{}",
                    from,    false,           stop_,        {},     {}};
  run_on_cpu(*model, training);
  expect_same(*straight, *model);
  EXPECT_EQ(refusal({}), "accepted step 6");
}

TEST_F(TrainerTest, MetricsWithoutACheckpointAreNotOverwritten) {
  run(out("run"), micro_options(4));
  fs::remove_all(out("run") / "checkpoints");
  const RunFolder folder(out("run"), true);
  try {
    folder.resume_point({});
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the checkpoints of"));
  }
}

TEST_F(TrainerTest, MicroBatchesAddUpToTheBatch) {
  TrainOptions whole = micro_options(3);
  whole.micro_batch = 4;
  const auto a = run(out("whole"), whole);
  const auto b = run(out("parts"), micro_options(3));
  double distance = 0.0, norm = 0.0;
  for (int64_t i = 0; i < a->flat.size(); ++i) {
    distance += std::pow(a->flat[i] - b->flat[i], 2.0);
    norm += std::pow(a->flat[i], 2.0);
  }
  EXPECT_LT(std::sqrt(distance / norm), 1e-4);
}

TEST_F(TrainerTest, ABrokenNumberStopsTheRunAndIsNeverSaved) {
  TrainOptions options = micro_options(6);
  options.save_every = 2;
  for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const fs::path folder = out(std::isnan(poison) ? "nan" : "inf");
    const RunFolder run_folder(folder, false);
    const auto model = fresh_model();
    options = resolve_options(options, config());
    TrainRun training{options,      data_.tokenizer, data_.shards, run_folder, "{}",
                      std::nullopt, false,           stop_,        {},         {}};
    training.on_progress = [&](const Progress& now) {
      if (now.metrics.step == 3) model->flat[model->flat.size() / 2] = poison;
    };
    try {
      run_on_cpu(*model, training);
      FAIL() << "went on";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr("diverged"));
      EXPECT_THAT(error.what(), HasSubstr("step-000002"));
    }
    const auto good = load_model(ctx_, run_folder.link_path());
    for (const float weight : good->flat.span()) ASSERT_TRUE(std::isfinite(weight));
  }
}

// AdamW's first step moves every weight by the learning rate, whatever its gradient, which here is
// that of the first step of the warm-up.
TEST_F(TrainerTest, TheOptimizersLearningRateIsThatOfTheMetrics) {
  TrainOptions options = micro_options(20);
  options.warmup_steps = 10;
  options.weight_decay = 0.0;
  const auto model = fresh_model();
  const std::vector<float> before(model->flat.span().begin(), model->flat.span().end());
  options = resolve_options(options, config());
  CpuTrainer trainer(ctx_, *model, data_.shards, options, "data");
  const double rate = trainer.train_step().learning_rate;
  double most = 0.0;
  for (size_t i = 0; i < before.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(model->flat.span()[i]) - before[i]));
  }
  EXPECT_NEAR(most, rate, 1e-3 * rate);
}

// Unions are counted in hybrid layers alone: what is known of them is no mean with "unknown".
TEST_F(TrainerTest, HintsOfUnionsAreForgottenWithThem) {
  struct Engine : TrainEngineCpu {
    using TrainEngineCpu::TrainEngineCpu;
    StepOutcome step(const StepRequest& request) override {
      for (const LayerHint& hint : request.hints) hints.push_back(hint.union_neurons);
      StepOutcome outcome = TrainEngineCpu::step(request);
      for (LayerMetrics& layer : outcome.layers) {
        layer.union_neurons = request.step == 2 || request.step == 3 ? -1.0 : 40.0;
      }
      return outcome;
    }
    std::vector<double> hints;
  };
  const TrainOptions options = resolve_options(micro_options(5), config());
  const auto model = fresh_model();
  Engine engine(ctx_, *model, data_.shards, options);
  Trainer trainer(ctx_, engine, data_.shards, options, "data");
  for (int step = 0; step < 5; ++step) trainer.train_step();
  EXPECT_EQ(engine.hints, (std::vector<double>{40, 40, -1, -1, -1, -1, 40, 40}));
}

TEST_F(TrainerTest, AModelThatBrokeAfterItsLastStepIsNotSaved) {
  TrainOptions options = micro_options(4);
  const auto model = fresh_model();
  options = resolve_options(options, config());
  CpuTrainer trainer(ctx_, *model, data_.shards, options, "data");
  trainer.train_step();
  model->flat[0] = std::nanf("");
  EXPECT_THROW(trainer.save(temp_.path()), DivergenceError);
  EXPECT_FALSE(fs::exists(temp_.path() / "model.safetensors"));
}

TEST_F(TrainerTest, ResumeRefusesOtherOptionsAndOtherData) {
  TrainOptions options = resolve_options(micro_options(4), config());
  const auto model = fresh_model();
  fs::create_directories(out("checkpoint"));
  CpuTrainer(ctx_, *model, data_.shards, options, "data").save(out("checkpoint"));

  const auto refusal = [&](const TrainOptions& other, const char* data) -> std::string {
    try {
      CpuTrainer(ctx_, *model, data_.shards, other, data).restore(out("checkpoint"));
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(options, "data"), "accepted");
  EXPECT_THAT(refusal(options, "other"), HasSubstr("other data"));
  TrainOptions longer = options;
  longer.steps = 100;
  EXPECT_EQ(refusal(longer, "data"), "accepted");
  options.learning_rate *= 2;
  EXPECT_THAT(refusal(options, "data"), HasSubstr("another lr"));
  fs::resize_file(out("checkpoint") / "trainer" / "optimizer.safetensors", 1000);
  EXPECT_THAT(refusal(longer, "data"), HasSubstr("optimizer.safetensors"));
  std::ofstream(out("checkpoint") / "trainer" / "state.json") << "{}";
  EXPECT_THAT(refusal(longer, "data"), HasSubstr("state.json"));
}

// The engine makes the context's products those of its options, f32 again too.
TEST_F(TrainerTest, ProductsOfRoundedFactorsTrainNearlyAlike) {
  TrainOptions options = micro_options(12);
  const auto exact = run(out("f32"), options);
  const double loss = summary_.last.ce;
  options.compute = MatmulCompute::kRoundedF32;
  const auto rounded = run(out("rounded"), options);
  EXPECT_NEAR(summary_.last.ce, loss, 0.01 * loss);
  EXPECT_NE(std::memcmp(exact->flat.data(), rounded->flat.data(), exact->flat.span().size_bytes()),
            0);
  options.compute = MatmulCompute::kF32;
  expect_same(*exact, *run(out("again"), options));
}

TEST_F(TrainerTest, CountsNeuronsThatNoTokenActivated) {
  const auto model = fresh_model();
  const auto weights = model_matrices<float>(model->config, model->flat.data());
  // x is the output of a norm and has values of both signs; a zero row of the gate is never active.
  for (int64_t j = 0; j < 10; ++j) {
    float* row = weights.layers[0].ffn.w_gate.row(j);
    std::fill(row, row + model->config.width, 0.0f);
  }
  CpuTrainer trainer(ctx_, *model, data_.shards, resolve_options(micro_options(4), config()),
                     "data");
  const StepMetrics metrics = trainer.train_step();
  EXPECT_GE(metrics.layers[0].dead, 10);
  EXPECT_LT(metrics.layers[0].dead, 20);
  EXPECT_NEAR(metrics.layers[0].dead_share, static_cast<double>(metrics.layers[0].dead) / 48,
              1e-12);
}

}  // namespace
}  // namespace twell
