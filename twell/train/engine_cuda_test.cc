// SPDX-License-Identifier: Apache-2.0
// Runs of a micro model on the GPU: they follow the CPU's runs, resume bit for bit, switch devices,
// and stop on values that are not finite.
#include "twell/train/engine_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>

#include "twell/base/cuda_gtest.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/run.h"
#include "twell/train/test_run.h"
#include "twell/train/trainer.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class TrainEngineCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    const std::string why = cuda_run_unsupported(config(), options(8));
    if (!why.empty()) GTEST_SKIP() << why;
    stream_ = std::make_unique<CudaStream>();
    device_ = std::make_unique<CudaContext>(stream_->get());
  }
  ModelConfig config() const {
    ModelConfig config = micro_config(data_.tokenizer.vocab_size());
    if (hybrid_) {
      config.width = 64;
      config.ffn = 192;
      config.head_dim = 32;
      config.context = 128;
    }
    TrainOptions unused;
    if (variant_.change != nullptr) variant_.change(config, unused);
    return config;
  }
  TrainOptions options(int64_t steps) const {
    TrainOptions options = micro_options(steps);
    options.validate_every = 1000;
    options.validation_sequences = 7;  // not a multiple of a micro-batch
    if (hybrid_) {
      options.batch_tokens = 512;
      options.ffn_policy = FfnTrainPolicy::kHybrid;
    }
    ModelConfig unused;
    if (variant_.change != nullptr) variant_.change(unused, options);
    return resolve_options(options, config());
  }
  std::unique_ptr<Model> fresh_model() {
    auto model = std::make_unique<Model>(config());
    init_weights(ctx_, *model, 3);
    return model;
  }
  std::unique_ptr<TrainEngine> engine(bool cuda, Model& model, const TrainOptions& options) {
    const Model* const teacher = options.distill > 0.0 ? teacher_.get() : nullptr;
    if (!cuda) return std::make_unique<TrainEngineCpu>(ctx_, model, data(), options, teacher);
    return std::make_unique<TrainEngineCuda>(*device_, model, &data(), options,
                                             std::span<const LayerHint>{}, nullptr, teacher);
  }
  const TrainingData& data() const {
    return talks_ ? static_cast<const TrainingData&>(*talks_) : data_.shards;
  }
  // Conversations of many lengths, trained on in place of text.
  void make_talks(int64_t length) {
    talks_ = micro_talks(ctx_, temp_.path(), data_.tokenizer, length);
  }
  // Trains from checkpoint `from` (or anew) to step `to`, saves to `into`, and returns the weights.
  std::vector<float> train(bool cuda, const TrainOptions& options, int64_t to,
                           const fs::path& from = {}, const fs::path& into = {}) {
    const auto model = from.empty() ? fresh_model() : load_model(ctx_, from);
    const auto engine = this->engine(cuda, *model, options);
    Trainer trainer(ctx_, *engine, data(), options, "data");
    if (!from.empty()) trainer.restore(from);
    while (trainer.steps_done() < to) {
      const StepMetrics metrics = trainer.train_step();
      losses_.push_back(metrics.ce);
      if (metrics.kl) divergences_.push_back(*metrics.kl);
    }
    if (!into.empty()) {
      fs::create_directories(into);
      trainer.save(into);
    }
    return weights(*engine);
  }
  static std::vector<float> weights(TrainEngine& engine) {
    std::vector<float> out;
    engine.read_state([&](const OptimizerTensors& state) {
      out.assign(state.weights.begin(), state.weights.end());
    });
    return out;
  }
  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2.0);
      norm += std::pow(static_cast<double>(a[i]), 2.0);
    }
    return std::sqrt(difference / norm);
  }

  // Three steps, a checkpoint and three more are six, and so are six that compute again in backward
  // what others keep: bit for bit.
  void expect_resumes_and_recomputes() {
    TrainOptions options = this->options(6);
    options.recompute = Recompute{};
    const std::vector<float> straight = train(true, options, 6);
    const fs::path half = temp_.path() / "half";
    train(true, options, 3, {}, half);
    EXPECT_EQ(load_model(ctx_, half)->config.activation, config().activation);
    EXPECT_EQ(train(true, options, 6, half), straight);
    for (const Recompute less : {Recompute{RecomputeLevel::kNorms}, Recompute{RecomputeLevel::kQkv},
                                 Recompute{RecomputeLevel::kInputs, 1}}) {
      options.recompute = less;
      EXPECT_EQ(train(true, options, 6), straight) << static_cast<int>(less.level);
    }
    // Resumed with another choice than before.
    EXPECT_EQ(train(true, options, 6, half), straight);
  }

  RunVariant variant_{};
  bool hybrid_ = false;  // layers that the hybrid execution takes
  TempFolder temp_;
  MicroData data_{temp_.path()};
  std::unique_ptr<ChatData> talks_;
  Context ctx_{1};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> device_;
  std::unique_ptr<Model> teacher_;
  std::vector<double> losses_, divergences_;
};

TEST_F(TrainEngineCudaTest, FollowsTheCpusCurve) {
  for (const OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
    TrainOptions options = micro_options(40);
    options.optimizer = optimizer;
    if (optimizer == OptimizerKind::kMuon) options.learning_rate = 2e-3;
    options = resolve_options(options, config());
    losses_.clear();
    train(true, options, 40);
    const std::vector<double> got = std::exchange(losses_, {});
    train(false, options, 40);
    ASSERT_EQ(got.size(), losses_.size());
    EXPECT_LT(got.back(), got.front() - 0.5);
    // In the first step losses differ only by rounding: 2^-9 in each of about 30 places.
    EXPECT_NEAR(got[0], losses_[0], 0.002 * losses_[0]);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], losses_[i], 0.03 * losses_[0]) << i;
  }
}

// From SiLU to ReLU in steps, with a teacher, across the end of the blend; and resumed within it.
TEST_F(TrainEngineCudaTest, RelufiesAndDistillsAsTheCpu) {
  TrainOptions options = this->options(12);
  options.relufy_from = Activation::kSilu;
  options.relufy_steps = 5;
  options.distill = 0.5;
  teacher_ = fresh_model();
  for (float& weight : teacher_->flat.span()) weight *= 1.25f;
  teacher_->set_activation(Activation::kSilu);
  for (const bool documents : {false, true}) {
    options.document_mask = documents;
    losses_.clear();
    divergences_.clear();
    const std::vector<float> weights = train(true, options, 12);
    const std::vector<double> got = std::exchange(losses_, {}),
                              got_kl = std::exchange(divergences_, {});
    train(false, options, 12);
    ASSERT_EQ(got_kl.size(), 12u);
    EXPECT_NEAR(got[0], losses_[0], 0.002 * losses_[0]);
    EXPECT_NEAR(got_kl[0], divergences_[0], 0.01 * divergences_[0] + 1e-3);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], losses_[i], 0.03 * losses_[0]) << i;
      EXPECT_NEAR(got_kl[i], divergences_[i], 0.03 * losses_[0]) << i;
    }
    const fs::path half = temp_.path() / (documents ? "half_masked" : "half");
    train(true, options, 3, {}, half);
    EXPECT_EQ(train(true, options, 12, half), weights);
  }
}

TEST_F(TrainEngineCudaTest, MasksDocumentsAsTheCpu) {
  TrainOptions options = this->options(12);
  const std::vector<float> unmasked = train(true, options, 12);
  options.document_mask = true;
  losses_.clear();
  const std::vector<float> weights = train(true, options, 12);
  EXPECT_GT(distance(weights, unmasked), 1e-3);
  const std::vector<double> got = std::exchange(losses_, {});
  train(false, options, 12);
  EXPECT_NEAR(got[0], losses_[0], 0.002 * losses_[0]);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], losses_[i], 0.03 * losses_[0]) << i;
  const auto a = fresh_model(), b = fresh_model();
  const double want = engine(false, *a, options)->validate();
  EXPECT_NEAR(engine(true, *b, options)->validate(), want, 0.002 * want);
}

// Losses of answers alone: their gradients are scaled by a number that differs from step to step,
// also where a step is replayed as a graph.
TEST_F(TrainEngineCudaTest, TrainsOnConversationsAsTheCpu) {
  make_talks(16);
  TrainOptions options = this->options(12);
  options.document_mask = true;
  options.clip_norm = 0.0;
  const MicroBatches batches(data(), options);
  EXPECT_LT(batches.step_targets(1), options.batch_tokens * 3 / 4);
  std::set<int64_t> targets;
  for (int64_t step = 1; step <= 12; ++step) targets.insert(batches.step_targets(step));
  EXPECT_GT(targets.size(), 1u);
  for (const double distill : {0.0, 0.5}) {
    options.distill = distill;
    teacher_ = fresh_model();
    for (float& weight : teacher_->flat.span()) weight *= 1.25f;
    losses_.clear();
    train(true, options, 12);
    const std::vector<double> got = std::exchange(losses_, {});
    train(false, options, 12);
    EXPECT_NEAR(got[0], losses_[0], 0.002 * losses_[0]);
    // A step's loss is a mean over some 25 tokens.
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], losses_[i], 0.06 * losses_[0]) << i;
    const auto a = fresh_model(), b = fresh_model();
    const auto first = engine(true, *a, options), second = engine(false, *b, options);
    // Before a step, because the first one of Adam takes the sign of every gradient, also of those
    // that are rounding errors.
    EXPECT_NEAR(first->validate(), second->validate(), 0.002 * losses_[0]);
    const StepRequest request{
        .step = 1, .learning_rate = 1e-3, .l1_coeff = 1e-3, .relu_share = {}, .hints = {}};
    const double norm = second->step(request).grad_norm;
    EXPECT_NEAR(first->step(request).grad_norm, norm, 0.05 * norm);
  }
}

// The memory that a hybrid layer keeps follows its activity, and differs between a run and a
// resumed one.
TEST_F(TrainEngineCudaTest, HybridLayersResumeBitForBit) {
  hybrid_ = true;
  const ModelConfig config = this->config();
  const std::string why =
      ffn_train_hybrid_unsupported(*device_, {256, config.width, config.ffn, config.gated});
  if (!why.empty()) GTEST_SKIP() << why;
  TrainOptions options = this->options(24);
  options.l1_coeff = 0.3;  // the activity falls from half of the neurons to a few
  const std::vector<float> straight = train(true, options, 24);
  for (const int64_t at : {1, 7, 16}) {
    const fs::path half = temp_.path() / std::to_string(at);
    train(true, options, at, {}, half);
    EXPECT_EQ(train(true, options, 24, half), straight) << at;
  }
}

TEST_F(TrainEngineCudaTest, ThreeStepsAndThreeMoreAreSixBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TrainOptions options = this->options(6);
    options.save_dtype = options.moment_dtype = dtype;
    options.reinit_dead = true;
    options.document_mask = dtype == DType::kBF16;
    const fs::path half = temp_.path() / (dtype == DType::kF32 ? "f32" : "bf16");
    const std::vector<float> straight = train(true, options, 6);
    train(true, options, 3, {}, half);
    EXPECT_EQ(train(true, options, 6, half), straight);
  }
  TrainOptions muon = micro_options(6);
  muon.optimizer = OptimizerKind::kMuon;
  muon = resolve_options(muon, config());
  const std::vector<float> straight = train(true, muon, 6);
  train(true, muon, 3, {}, temp_.path() / "muon");
  EXPECT_EQ(train(true, muon, 6, temp_.path() / "muon"), straight);
}

class TrainVariantsCudaTest : public TrainEngineCudaTest,
                              public testing::WithParamInterface<RunVariant> {
 protected:
  TrainVariantsCudaTest() {
    variant_ = GetParam();
    teacher_ = fresh_model();
    for (float& weight : teacher_->flat.span()) weight *= 1.25f;
  }
};

TEST_P(TrainVariantsCudaTest, ResumesAndRecomputesBitForBit) { expect_resumes_and_recomputes(); }

// The losses of the first steps, before rounding has moved the two apart.
TEST_P(TrainVariantsCudaTest, TrainsAsTheCpu) {
  const TrainOptions options = this->options(6);
  train(true, options, 6);
  const std::vector<double> got = std::exchange(losses_, {});
  train(false, options, 6);
  ASSERT_EQ(got.size(), losses_.size());
  EXPECT_NEAR(got[0], losses_[0], 0.002 * losses_[0]);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], losses_[i], 0.03 * losses_[0]) << i;
}

INSTANTIATE_TEST_SUITE_P(Runs, TrainVariantsCudaTest, testing::ValuesIn(kRunVariants),
                         variant_name);

TEST_F(TrainEngineCudaTest, ARunChangesDevices) {
  const TrainOptions options = this->options(8);
  const std::vector<float> cpu = train(false, options, 8);
  const std::vector<float> start = weights(*engine(false, *fresh_model(), options));
  for (const bool cuda_first : {false, true}) {
    const fs::path half = temp_.path() / (cuda_first ? "gpu-half" : "cpu-half");
    train(cuda_first, options, 4, {}, half);
    const std::vector<float> both = train(!cuda_first, options, 8, half);
    // Adam moves every weight by about the learning rate regardless of its gradient's size, so
    // weights with tiny gradients move differently; all other weights move the same way.
    EXPECT_LT(distance(cpu, both), 0.5 * distance(cpu, start));
  }
  EXPECT_GT(distance(cpu, start), 0.1);
}

TEST_F(TrainEngineCudaTest, GraphsAndSinglePassesGiveTheSameBits) {
  const TrainOptions options = this->options(4);
  const auto run = [&](bool hooks) {
    const auto model = fresh_model();
    TrainEngineCuda engine(*device_, *model, &data_.shards, options);
    if (hooks) engine.set_hooks({.after_stage = [](TrainingStage) {}});
    Trainer trainer(ctx_, engine, data_.shards, options, "data");
    while (!trainer.finished()) trainer.train_step();
    EXPECT_EQ(engine.replayed() > 0, !hooks);
    return weights(engine);
  };
  EXPECT_EQ(run(false), run(true));
}

TEST_F(TrainEngineCudaTest, ValidatesAsTheCpuAndDisturbsNothing) {
  const TrainOptions options = this->options(4);
  const auto a = fresh_model(), b = fresh_model();
  const auto gpu = engine(true, *a, options), cpu = engine(false, *b, options);
  const double want = cpu->validate();
  EXPECT_NEAR(gpu->validate(), want, 0.002 * want);
  Trainer trainer(ctx_, *gpu, data_.shards, options, "data");
  while (!trainer.finished()) {
    trainer.train_step();
    trainer.validate();
  }
  EXPECT_EQ(weights(*gpu), train(true, options, 4));
}

TEST_F(TrainEngineCudaTest, BrokenNumbersStopItWithTheWeightsBefore) {
  const TrainOptions options = this->options(6);
  for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const auto model = fresh_model();
    const auto engine = this->engine(true, *model, options);
    Trainer trainer(ctx_, *engine, data_.shards, options, "data");
    trainer.train_step();
    std::vector<float> before = weights(*engine);
    // The weight of a norm affects every token.
    before[static_cast<size_t>(model->flat.size()) - 1] = poison;
    std::vector<float> avg, avg_sq;
    engine->read_state([&](const OptimizerTensors& state) {
      avg.assign(state.exp_avg.begin(), state.exp_avg.end());
      avg_sq.assign(state.exp_avg_sq.begin(), state.exp_avg_sq.end());
    });
    engine->write_state([&](const OptimizerTensors& state) {
      std::copy(before.begin(), before.end(), state.weights.begin());
      std::copy(avg.begin(), avg.end(), state.exp_avg.begin());
      std::copy(avg_sq.begin(), avg_sq.end(), state.exp_avg_sq.begin());
    });
    EXPECT_THROW(trainer.train_step(), DivergenceError);
    const std::vector<float> after = weights(*engine);
    for (size_t i = 0; i + 1 < after.size(); ++i) ASSERT_EQ(after[i], before[i]);
    EXPECT_THROW(trainer.save(temp_.path()), DivergenceError);
  }
}

TEST_F(TrainEngineCudaTest, DeadNeuronsAreCountedAndMovedAsOnTheCpu) {
  TrainOptions options = this->options(4);
  options.reinit_dead = true;
  options.learning_rate = 1e-9;  // tiny, so that only reinitialisation moves weights
  const auto with_dead_rows = [&] {
    auto model = fresh_model();
    const auto weights = model_matrices<float>(model->config, model->flat.data());
    for (int64_t j = 0; j < 10; ++j) {
      float* row = weights.layers[0].ffn.w_gate.row(j);
      std::fill(row, row + model->config.width, 0.0f);
    }
    return model;
  };
  const auto a = with_dead_rows(), b = with_dead_rows();
  const auto gpu = engine(true, *a, options), cpu = engine(false, *b, options);
  Trainer on_gpu(ctx_, *gpu, data_.shards, options, "data");
  Trainer on_cpu(ctx_, *cpu, data_.shards, options, "data");
  const StepMetrics got = on_gpu.train_step(), want = on_cpu.train_step();
  EXPECT_GE(got.layers[0].dead, 10);
  EXPECT_NEAR(static_cast<double>(got.layers[0].dead), static_cast<double>(want.layers[0].dead), 2);
  EXPECT_NEAR(got.layers[0].nnz, want.layers[0].nnz, 0.02 * want.layers[0].nnz);
  EXPECT_NEAR(got.layers[0].l1, want.layers[0].l1, 0.02 * want.layers[0].l1);
  const std::vector<float> all_got = weights(*gpu), all_want = weights(*cpu);
  const auto views = model_matrices<const float>(config(), all_got.data());
  const auto reference = model_matrices<const float>(config(), all_want.data());
  for (int64_t j = 0; j < 10; ++j) {
    for (int64_t d = 0; d < config().width; ++d) {
      const float value = reference.layers[0].ffn.w_gate(j, d);
      EXPECT_NE(value, 0.0f);
      EXPECT_NEAR(views.layers[0].ffn.w_gate(j, d), value, 1e-6);
    }
  }
}

TEST_F(TrainEngineCudaTest, AWholeRunReportsTheDevice) {
  const TrainOptions options = this->options(5);
  const RunFolder folder(temp_.path() / "run", false);
  const std::atomic<bool> stop{false};
  const auto model = fresh_model();
  TrainRun run{options,      data_.tokenizer, data_.shards, folder, "{}",
               std::nullopt, false,           stop,         {},     {}};
  run.on_progress = [&](const Progress& now) {
    if (now.metrics.step == 0) return;
    EXPECT_GT(now.metrics.device_bytes, 0);
    EXPECT_EQ(now.metrics.layers.size(), 2u);
  };
  const auto engine = this->engine(true, *model, options);
  const TrainSummary summary = run_training(ctx_, *engine, run);
  EXPECT_EQ(summary.steps_done, 5);
  EXPECT_LT(*summary.last_validation_ce, *summary.first_validation_ce);
  const auto saved = load_model(ctx_, folder.link_path());
  EXPECT_EQ(std::vector<float>(saved->flat.span().begin(), saved->flat.span().end()),
            weights(*engine));
}

// Hybrid layers share a workspace that is larger than the memory a single one of them saves.
TEST_F(TrainEngineCudaTest, AutoTakesNoMoreMemoryThanDense) {
  const ModelConfig config = preset_config("0.5b");
  TrainOptions options;
  options.sequence_length = 2048;
  options = resolve_options(options, config);
  if (!ffn_train_hybrid_unsupported(*device_, {16384, config.width, config.ffn, true}).empty()) {
    GTEST_SKIP() << "dense only";
  }
  std::vector<LayerHint> hints(8, {2800.0, 5632.0});
  const auto bytes = [&](FfnTrainPolicy policy) {
    options.ffn_policy = policy;
    TrainingPlanCuda plan = training_plan(*device_, config, options, hints);
    plan.may_become_hybrid = false;
    int64_t sum = 0;
    for (const MemoryItem& item : TrainingCuda::memory_plan(*device_, config, plan)) {
      sum += item.bytes;
    }
    return sum;
  };
  options.recompute = Recompute{};
  const int64_t dense = bytes(FfnTrainPolicy::kDense);
  for (size_t sparse = 0; sparse < hints.size(); ++sparse) {
    hints[sparse] = {15.0, 500.0};
    EXPECT_LE(bytes(FfnTrainPolicy::kAuto), dense) << sparse + 1;
  }
  EXPECT_LT(bytes(FfnTrainPolicy::kAuto), 0.8 * static_cast<double>(dense));
  EXPECT_LT(bytes(FfnTrainPolicy::kAuto), bytes(FfnTrainPolicy::kHybrid) + 1);
}

TEST_F(TrainEngineCudaTest, RefusesWhatItDoesNotDo) {
  ModelConfig config = this->config();
  config.width = 16392;
  EXPECT_THAT(cuda_run_unsupported(config, options(8)), HasSubstr("at most 16384"));
  Model model(config);
  EXPECT_THROW(TrainEngineCuda(*device_, model, &data_.shards, options(8)), InputError);
  TrainOptions options = this->options(8);
  options.distill = 0.5;
  const auto other = fresh_model();
  EXPECT_THROW(TrainEngineCuda(*device_, *other, &data_.shards, options), Error);  // no teacher
}

}  // namespace
}  // namespace twell
