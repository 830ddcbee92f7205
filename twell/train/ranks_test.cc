// SPDX-License-Identifier: Apache-2.0
// Runs of several ranks, which are threads here: the same curve as one rank, the same bits every
// time, checkpoints that any number of ranks continues, and failures that name the rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "twell/checkpoint/checkpoint.h"
#include "twell/dist/test_ranks.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/plan.h"
#include "twell/train/rank_outcome.h"
#include "twell/train/run.h"
#include "twell/train/test_run.h"
#include "twell/train/trainer_state.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::Each;
using testing::HasSubstr;
using testing::StrEq;

constexpr double kPeakFlops = 1e9;

class RanksTest : public testing::Test {
 protected:
  struct Curve {
    std::vector<double> ce, validation;
    std::vector<int64_t> dead;
  };
  using Weights = std::vector<std::vector<float>>;  // of each rank
  struct Fault {
    int rank = -1;
    int64_t after_step = 0;
  };

  virtual ModelConfig config() const { return micro_config(data_.tokenizer.vocab_size()); }

  // Four micro-batches a step; dead neurons are reinitialised, gradients clipped.
  static TrainOptions options(int64_t steps) {
    TrainOptions options = micro_options(steps);
    options.batch_tokens = 128;
    options.reinit_dead = true;
    options.clip_norm = 0.5;
    options.validate_every = 4;
    options.validation_sequences = 7;
    return options;
  }

  // Runs in `out`, from its newest checkpoint if there is one. Returns the error of each rank.
  std::vector<std::string> run(int ranks, const fs::path& out, TrainOptions options,
                               int64_t stop_after = -1) {
    curve_ = {};
    weights_.assign(static_cast<size_t>(ranks), {});
    layers_.assign(static_cast<size_t>(ranks), {});
    options.ranks = ranks;
    options = resolve_options(options, config());
    const bool resume = fs::exists(out);
    fs::create_directories(out);
    const RunFolder first(out, resume);
    const RunFolder follower(out);
    const auto resume_from = first.latest();
    return run_rendezvous(ranks, [&](Rendezvous& rendezvous) {
      auto all = ranks > 1 ? gloo_communicator(rendezvous) : nullptr;
      if (late_ && ranks > 1) all = std::make_unique<LateGathers>(std::move(all));
      const int rank = rendezvous.identity().rank;
      Context ctx(1);
      std::unique_ptr<Model> model;
      if (resume_from) {
        model = load_model(ctx, resume_from->folder);
      } else {
        model = std::make_unique<Model>(config());
        init_weights(ctx, *model, 3);
      }
      std::atomic<bool> stop{false};
      TrainRun training{options,      data_.tokenizer,
                        data_.shards, rank == 0 ? first : follower,
                        "{}",         resume_from,
                        false,        stop,
                        {},           {}};
      training.log = [this](LogLevel, std::string_view line) {
        if (on_log_) on_log_(line);
      };
      training.sample = [&, rank](const Model& trained) {
        EXPECT_EQ(rank, 0);
        return on_sample_(trained);
      };
      training.last_save_attempts = 2;
      training.last_save_pause = std::chrono::milliseconds(10);
      TrainEngineCpu engine(ctx, *model, data_.shards, options, nullptr, all.get());
      Watched watched(engine, [&](int64_t step, const StepOutcome& outcome) {
        layers_[static_cast<size_t>(rank)].push_back(outcome.layers);
        if (rank == out_of_memory_.rank && step == out_of_memory_.after_step)
          throw std::bad_alloc();
        if (poison_.rank == rank && poison_.after_step == step) {
          engine.read_state([](const OptimizerTensors& state) {
            state.weights[state.weights.size() / 2] = std::numeric_limits<float>::quiet_NaN();
          });
        }
        // The last rank alone asks to stop.
        if (rank == ranks - 1 && step == stop_after) stop = true;
      });
      training.on_progress = [&](const Progress& now) {
        if (now.metrics.validation_ce) curve_.validation.push_back(*now.metrics.validation_ce);
        if (now.metrics.step == 0) return;
        if (!now.metrics.samples.empty()) samples_[now.metrics.step] = now.metrics.samples;
        if (on_step_) on_step_(now.metrics.step);
        // The peak is one rank's.
        EXPECT_NEAR(*now.metrics.mfu * kPeakFlops * ranks,
                    now.metrics.tokens_per_second * training_flops_per_token(config(), options),
                    1e-6 * kPeakFlops);
        curve_.ce.push_back(now.metrics.ce);
        curve_.dead.push_back(now.metrics.layers[0].dead);
      };
      const TrainSummary summary = run_training(ctx, watched, training);
      EXPECT_EQ(summary.interrupted, stop_after >= 0);
      const auto flat = model->flat.span();
      weights_[static_cast<size_t>(rank)].assign(flat.begin(), flat.end());
    });
  }

  // Gathers weights when they are waited for, and not before: until then those of other ranks are
  // NaN. Everything else is the communicator's.
  class LateGathers : public Communicator {
   public:
    explicit LateGathers(std::unique_ptr<Communicator> all) : all_(std::move(all)) {}
    int rank() const override { return all_->rank(); }
    int size() const override { return all_->size(); }
    Rendezvous& rendezvous() override { return all_->rendezvous(); }
    void all_reduce_sum(std::span<double> values) override { all_->all_reduce_sum(values); }
    void all_reduce_max(std::span<uint8_t> values) override { all_->all_reduce_max(values); }
    void reduce_scatter_sum(std::span<float> values) override { all_->reduce_scatter_sum(values); }
    std::unique_ptr<PendingCall> start_all_gather(std::span<float> values) override {
      const PieceRange own = piece_of(std::ssize(values), size(), rank());
      for (int64_t i = 0; i < std::ssize(values); ++i) {
        if (i >= own.begin && i < own.end) continue;
        values[static_cast<size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
      }
      return std::make_unique<Pending>(*all_, values);
    }
    void all_gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all) override {
      all_->all_gather_bytes(mine, all);
    }
    void broadcast(std::span<std::byte> bytes, int root) override { all_->broadcast(bytes, root); }
    void barrier() override { all_->barrier(); }

   private:
    class Pending : public PendingCall {
     public:
      Pending(Communicator& ranks, std::span<float> weights) : ranks_(ranks), weights_(weights) {}
      void wait() override { ranks_.all_gather(weights_); }

     private:
      Communicator& ranks_;
      std::span<float> weights_;
    };
    std::unique_ptr<Communicator> all_;
  };

  // Calls after_step on every rank, where on_progress is called on the first only.
  class Watched : public TrainEngine {
   public:
    using AfterStep = std::function<void(int64_t step, const StepOutcome& outcome)>;
    Watched(TrainEngine& engine, AfterStep after_step)
        : TrainEngine(engine.model(), engine.ranks()),
          engine_(engine),
          after_step_(std::move(after_step)) {}
    StepOutcome step(const StepRequest& request) override {
      StepOutcome outcome = engine_.step(request);
      after_step_(request.step, outcome);
      return outcome;
    }
    double validate() override { return engine_.validate(); }
    void read_state(const StateFn& use) override { engine_.read_state(use); }
    void write_state(const StateFn& fill) override { engine_.write_state(fill); }
    double peak_flops() const override { return kPeakFlops; }

   private:
    TrainEngine& engine_;
    AfterStep after_step_;
  };

  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(a[i] - b[i], 2.0);
      norm += std::pow(a[i], 2.0);
    }
    return std::sqrt(difference / norm);
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  fs::path out(const std::string& name) const { return temp_.path() / name; }

  TempFolder temp_;
  MicroData data_{temp_.path()};
  Curve curve_;
  Weights weights_;
  std::vector<std::vector<std::vector<LayerMetrics>>> layers_;  // [ranks][steps][L]
  Fault poison_;                                                // a weight becomes NaN
  Fault out_of_memory_;
  bool late_ = false;                          // LateGathers
  std::function<void(int64_t step)> on_step_;  // rank 0 only, as the next one
  std::function<void(std::string_view line)> on_log_;
  std::function<std::vector<std::string>(const Model& model)> on_sample_;
  std::map<int64_t, std::vector<TextSample>> samples_;
};

class CurveTest : public RanksTest, public testing::WithParamInterface<FfnTrainPolicy> {};

TEST_P(CurveTest, IsThatOfOneRankAndRepeatsBitForBit) {
  TrainOptions given = options(12);
  given.ffn_policy = GetParam();
  EXPECT_THAT(run(1, out("1"), given), Each(StrEq("")));
  const Curve one = curve_;
  const std::vector<float> weights = weights_[0];
  for (const int ranks : {2, 3, 4}) {
    EXPECT_THAT(run(ranks, out(std::to_string(ranks)), given), Each(StrEq("")));
    ASSERT_EQ(curve_.ce.size(), one.ce.size());
    ASSERT_EQ(curve_.validation.size(), one.validation.size());
    // The first loss differs by the order of a sum of doubles; later ones by weights that differ
    // in their last bits, which AdamW's division by the root of v amplifies.
    EXPECT_NEAR(curve_.ce[0], one.ce[0], 1e-12);
    for (size_t i = 0; i < one.ce.size(); ++i) EXPECT_NEAR(curve_.ce[i], one.ce[i], 1e-4) << i;
    for (size_t i = 0; i < one.validation.size(); ++i) {
      EXPECT_NEAR(curve_.validation[i], one.validation[i], 1e-4) << i;
    }
    EXPECT_EQ(curve_.dead, one.dead);
    EXPECT_LT(distance(weights_[0], weights), 1e-4);
    for (const std::vector<float>& of_rank : weights_) EXPECT_TRUE(same(of_rank, weights_[0]));
    const Curve first = curve_;
    const std::vector<float> before = weights_[0];
    run(ranks, out(std::to_string(ranks) + "-again"), given);
    EXPECT_EQ(curve_.ce, first.ce);
    EXPECT_EQ(curve_.validation, first.validation);
    EXPECT_TRUE(same(weights_[0], before));
  }
}

INSTANTIATE_TEST_SUITE_P(Executions, CurveTest,
                         testing::Values(FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid),
                         [](const auto& param) {
                           return param.param == FfnTrainPolicy::kDense ? "dense" : "hybrid";
                         });

// Layers wide enough for hybrid, which become sparse enough for it in the middle of the run.
class OnePlanTest : public RanksTest {
 protected:
  ModelConfig config() const override {
    ModelConfig config = RanksTest::config();
    config.width = 64;
    config.head_dim = 32;
    config.ffn = 160;
    return config;
  }
};

TEST_F(OnePlanTest, AllRanksRunTheSameExecutionsAndKnowTheSameActivity) {
  TrainOptions given = options(24);
  given.micro_batch = 8;
  given.batch_tokens = 4 * 8 * 16;
  given.l1_coeff = 0.5;
  given.validate_every = 0;
  given.reinit_dead = false;
  EXPECT_THAT(run(4, out("run"), given), Each(StrEq("")));
  int64_t hybrid = 0, all = 0, dead = 0;
  for (size_t step = 0; step < layers_[0].size(); ++step) {
    for (size_t layer = 0; layer < layers_[0][step].size(); ++layer) {
      const LayerMetrics& first = layers_[0][step][layer];
      hybrid += first.execution == FfnTrainExecution::kHybrid ? 1 : 0;
      dead += first.dead;
      ++all;
      for (size_t rank = 1; rank < layers_.size(); ++rank) {
        const LayerMetrics& other = layers_[rank][step][layer];
        EXPECT_EQ(other.execution, first.execution) << "rank " << rank << ", step " << step;
        EXPECT_EQ(other.nnz, first.nnz) << "rank " << rank << ", step " << step;
        EXPECT_EQ(other.dead, first.dead) << "rank " << rank << ", step " << step;
      }
    }
  }
  EXPECT_GT(hybrid, 0);
  EXPECT_LT(hybrid, all);
  EXPECT_GT(dead, 0);
}

// Nothing reads another rank's weights of a layer before they were waited for: neither the next
// step's forward pass nor the validation, a checkpoint or the reinitialisation.
TEST_F(RanksTest, WeightsAreWaitedForBeforeTheirFirstUse) {
  for (const int ranks : {2, 4}) {
    const std::string name = std::to_string(ranks);
    TrainOptions given = options(8);
    given.save_every = 3;
    late_ = false;
    EXPECT_THAT(run(ranks, out(name), given), Each(StrEq("")));
    const Curve curve = curve_;
    const std::vector<float> weights = weights_[0];
    late_ = true;
    EXPECT_THAT(run(ranks, out(name + "-late"), given), Each(StrEq("")));
    EXPECT_EQ(curve_.ce, curve.ce);
    EXPECT_EQ(curve_.validation, curve.validation);
    EXPECT_TRUE(same(weights_[0], weights));
  }
}

TEST_F(RanksTest, TextsAreOfUpToDateWeightsAndChangeNothing) {
  late_ = true;
  on_sample_ = [](const Model& model) {
    const std::span<const float> flat = model.flat.span();
    EXPECT_TRUE(std::all_of(flat.begin(), flat.end(), [](float x) { return std::isfinite(x); }));
    return std::vector<std::string>{fmt::format("{}", flat[0]), "b"};
  };
  for (const int ranks : {1, 3}) {
    const std::string name = std::to_string(ranks);
    TrainOptions given = options(8);
    EXPECT_THAT(run(ranks, out(name), given), Each(StrEq("")));
    const Curve curve = curve_;
    const std::vector<float> weights = weights_[0];
    EXPECT_TRUE(samples_.empty());
    given.sample_every = 3;
    given.sample_prompts = {"x", "y"};
    EXPECT_THAT(run(ranks, out(name + "-texts"), given), Each(StrEq("")));
    EXPECT_EQ(curve_.ce, curve.ce);
    EXPECT_EQ(curve_.validation, curve.validation);
    EXPECT_TRUE(same(weights_[0], weights));
    ASSERT_EQ(samples_.size(), 3u);  // of steps 3, 6 and the last
    EXPECT_EQ(samples_.begin()->first, 3);
    EXPECT_EQ(samples_.at(8)[0].prompt, "x");
    EXPECT_EQ(samples_.at(8)[0].text, fmt::format("{}", weights[0]));
    EXPECT_EQ(samples_.at(8)[1].prompt, "y");
    EXPECT_NE(samples_.at(6)[0].text, samples_.at(8)[0].text);
    samples_.clear();
  }
}

TEST_F(RanksTest, TrainingGoesOnWithoutTextsThatCannotBeWritten) {
  on_sample_ = [](const Model&) -> std::vector<std::string> { throw InputError("not finite"); };
  std::vector<std::string> lines;
  on_log_ = [&](std::string_view line) { lines.emplace_back(line); };
  TrainOptions given = options(4);
  given.sample_every = 3;
  EXPECT_THAT(run(2, out("run"), given), Each(StrEq("")));
  EXPECT_EQ(curve_.ce.size(), 4u);
  EXPECT_TRUE(samples_.empty());
  EXPECT_THAT(lines, testing::ElementsAre("no texts of step 3: not finite",
                                          "no texts of step 4: not finite"));
}

TEST_F(RanksTest, AnyNumberOfRanksContinuesARun) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string name = dtype == DType::kF32 ? "f32" : "bf16";
    TrainOptions given = options(9);
    given.save_dtype = dtype;
    given.document_mask = dtype == DType::kBF16;
    given.validate_every = 0;
    run(4, out(name + "-straight"), given);
    const std::vector<float> straight = weights_[0];
    // Four ranks, stopped by the last one, and four again: the same bits.
    EXPECT_THAT(run(4, out(name), given, 3), Each(StrEq("")));
    EXPECT_EQ(curve_.ce.size(), 3u);
    fs::copy(out(name), out(name + "-other"),
             fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    EXPECT_THAT(run(4, out(name), given), Each(StrEq("")));
    EXPECT_EQ(saved_document_mask(out(name) / "checkpoint"), given.document_mask);
    EXPECT_EQ(curve_.ce.size(), 6u);
    EXPECT_TRUE(same(weights_[0], straight));
    // Three, one and two ranks continue: the same curve.
    EXPECT_THAT(run(3, out(name + "-other"), given, 5), Each(StrEq("")));
    EXPECT_THAT(run(1, out(name + "-other"), given, 7), Each(StrEq("")));
    EXPECT_THAT(run(2, out(name + "-other"), given), Each(StrEq("")));
    EXPECT_EQ(curve_.ce.size(), 2u);
    EXPECT_LT(distance(weights_[0], straight), 1e-4);
  }
}

// Matrices are cut into pieces and orthogonalised as a whole by one of the ranks.
TEST_F(RanksTest, MuonTakesTheSameStepsOnAnyNumberOfRanks) {
  TrainOptions given = options(5);
  given.optimizer = OptimizerKind::kMuon;
  given.validate_every = 0;
  given.reinit_dead = false;
  EXPECT_THAT(run(1, out("1"), given), Each(StrEq("")));
  const std::vector<float> one = weights_[0];
  const Curve curve = curve_;
  for (const int ranks : {2, 3, 4}) {
    const std::string name = std::to_string(ranks);
    EXPECT_THAT(run(ranks, out(name), given), Each(StrEq("")));
    for (size_t i = 0; i < curve.ce.size(); ++i) EXPECT_NEAR(curve_.ce[i], curve.ce[i], 1e-4);
    // The order of sums of gradients alone is another. A step without one matrix's part would be
    // some 0.01 away.
    float most = 0.0f;
    for (size_t i = 0; i < one.size(); ++i)
      most = std::max(most, std::abs(weights_[0][i] - one[i]));
    EXPECT_LT(most, 2e-4f) << ranks;
  }
  // Two ranks, stopped, and four: the rest of the run is the same.
  EXPECT_THAT(run(2, out("half"), given, 3), Each(StrEq("")));
  EXPECT_THAT(run(4, out("half"), given), Each(StrEq("")));
  float most = 0.0f;
  for (size_t i = 0; i < one.size(); ++i) most = std::max(most, std::abs(weights_[0][i] - one[i]));
  EXPECT_LT(most, 2e-4f);
}

TEST_F(RanksTest, ADamagedShardIsNoticed) {
  run(2, out("run"), options(4));
  const fs::path checkpoint = out("run") / "checkpoint";
  EXPECT_EQ(checkpoint_fault(checkpoint), "");
  const fs::path shard = checkpoint / "trainer" / "optimizer-00001-of-00002.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 8);
  EXPECT_THAT(checkpoint_fault(checkpoint), HasSubstr("optimizer-00001-of-00002"));
  fs::remove(shard);
  EXPECT_THAT(checkpoint_fault(checkpoint), HasSubstr("optimizer-00001-of-00002"));
}

TEST_F(RanksTest, ANonFiniteNumberNamesItsRankAndStep) {
  TrainOptions given = options(6);
  given.save_every = 2;
  given.validate_every = 0;
  poison_ = {.rank = 1, .after_step = 3};
  const auto errors = run(3, out("run"), given);
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("at step 4 on rank 1"));
    EXPECT_THAT(error, HasSubstr("step-000002"));
  }
  EXPECT_EQ(checkpoint_fault(out("run") / "checkpoint"), "");
  EXPECT_EQ(RunFolder(out("run")).latest()->step, 2);
}

TEST_F(RanksTest, ARankWithoutMemoryIsNamedWithItsStep) {
  TrainOptions given = options(6);
  given.save_every = 2;
  given.validate_every = 0;
  out_of_memory_ = {.rank = 2, .after_step = 3};
  const auto errors = run(3, out("run"), given);
  EXPECT_EQ(errors[0], "rank 2 failed in step 3: std::bad_alloc");
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], "std::bad_alloc");
  EXPECT_EQ(checkpoint_fault(out("run") / "checkpoint"), "");
  EXPECT_EQ(RunFolder(out("run")).latest()->step, 2);
}

TEST_F(RanksTest, ACheckpointThatOneRankCannotWriteIsNotKept) {
  TrainOptions given = options(4);
  given.save_every = 2;
  given.validate_every = 0;
  poison_ = {.rank = 1, .after_step = 4};  // its weights are not saved
  const auto errors = run(2, out("run"), given);
  EXPECT_THAT(errors[0], HasSubstr("step 4"));
  EXPECT_THAT(errors[1], HasSubstr("step 4"));
  EXPECT_EQ(RunFolder(out("run")).latest()->step, 2);
}

// While a file may have 16 KiB at most, metrics can be written, and checkpoints cannot.
class TightDisk {
 public:
  TightDisk() : handler_(std::signal(SIGXFSZ, SIG_IGN)) { ::getrlimit(RLIMIT_FSIZE, &before_); }
  ~TightDisk() {
    make_room();
    std::signal(SIGXFSZ, handler_);
  }
  TightDisk(const TightDisk&) = delete;
  TightDisk& operator=(const TightDisk&) = delete;
  void fill() const {
    const rlimit tight{16 << 10, before_.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  }
  void make_room() const { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(RanksTest, AFullDiskEndsNoRun) {
  TrainOptions given = options(6);
  given.save_every = 2;
  given.validate_every = 0;
  for (const int ranks : {1, 2}) {
    const auto folder = [&](const char* name) { return out(name) / std::to_string(ranks); };
    ASSERT_THAT(run(ranks, folder("whole"), given), Each(StrEq("")));
    const Weights whole = weights_;
    const TightDisk disk;
    std::vector<std::string> warnings;
    on_step_ = [&](int64_t step) {
      if (step == 3) disk.fill();
    };
    on_log_ = [&](std::string_view line) {
      if (line.find("could not be saved") != line.npos) warnings.emplace_back(line);
      if (line.find("tried again") != line.npos) disk.make_room();
    };
    // Room is made during the last save.
    EXPECT_THAT(run(ranks, folder("full"), given), Each(StrEq("")));
    ASSERT_EQ(warnings.size(), 2u);
    EXPECT_THAT(warnings[0], HasSubstr("the checkpoint of step 4 could not be saved: "));
    EXPECT_THAT(warnings[0], HasSubstr("File too large (a checkpoint needs "));
    EXPECT_THAT(warnings[0], HasSubstr("free); training goes on, and the next"));
    EXPECT_THAT(warnings[1], HasSubstr("make room, it is tried again in 0 s (1 of 2 attempts)"));
    EXPECT_EQ(weights_, whole);
    EXPECT_EQ(RunFolder(folder("full")).latest()->step, 6);
    EXPECT_EQ(checkpoint_fault(folder("full") / "checkpoint"), "");

    // None is made; the run goes on from the checkpoint before.
    on_log_ = {};
    for (const std::string& error : run(ranks, folder("lost"), given)) {
      EXPECT_THAT(error, HasSubstr("the checkpoint of step 6 could not be saved"));
      EXPECT_THAT(error, HasSubstr("free); the last good checkpoint is "));
      EXPECT_THAT(error, HasSubstr("step-000002"));
    }
    disk.make_room();
    on_step_ = {};
    EXPECT_EQ(checkpoint_fault(folder("lost") / "checkpoint"), "");
    EXPECT_THAT(run(ranks, folder("lost"), given), Each(StrEq("")));
    EXPECT_EQ(weights_, whole);
  }
}

// Losses are means over the targets of all ranks, of which a rank may have few however many tokens.
TEST(CombineOutcomes, WeighsRanksByTheirTargetsAndMicroBatches) {
  const auto errors = run_ranks(2, [](Communicator& all) {
    const bool first = all.rank() == 0;
    StepOutcome outcome;
    outcome.ce = first ? 2.0 : 4.0;
    outcome.kl = first ? 8.0 : 16.0;
    outcome.layers.resize(2);
    for (size_t i = 0; i < 2; ++i) {
      const double unit = i == 0 ? 1.0 : 1000.0;
      outcome.layers[i] = {.nnz = (first ? 40.0 : 80.0) * unit,
                           .max_nnz = first ? 7 : 5,
                           .union_neurons = (first ? 20.0 : 24.0) * unit,
                           .recomputed = first ? 1 : 2,
                           .tail_rows = first ? 3 : 4,
                           .l1 = (first ? 12.0 : 16.0) * unit};
    }
    combine_outcomes(all, {.micro_batches = first ? 1 : 3, .targets = first ? 30 : 10}, outcome);
    EXPECT_DOUBLE_EQ(outcome.ce, 2.5);
    EXPECT_DOUBLE_EQ(outcome.kl, 10.0);
    EXPECT_EQ(outcome.culprit, -1);
    for (size_t i = 0; i < 2; ++i) {
      const LayerMetrics& layer = outcome.layers[i];
      const double unit = i == 0 ? 1.0 : 1000.0;
      EXPECT_DOUBLE_EQ(layer.nnz, 70.0 * unit);
      EXPECT_DOUBLE_EQ(layer.l1, 15.0 * unit);
      EXPECT_DOUBLE_EQ(layer.union_neurons, 23.0 * unit);
      EXPECT_EQ(layer.recomputed, 3);
      EXPECT_EQ(layer.tail_rows, 7);
      EXPECT_EQ(layer.max_nnz, 7);
    }
  });
  EXPECT_THAT(errors, Each(StrEq("")));
}

TEST_F(RanksTest, TooFewMicroBatchesForTheRanks) {
  TrainOptions given = options(4);
  given.ranks = 5;
  try {
    resolve_options(given, config());
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("too few for 5 ranks"));
  }
  given.batch_tokens = 0;
  EXPECT_EQ(resolve_options(given, config()).micro_batches(), 5);
}

TEST_F(RanksTest, BucketsAndPiecesCoverTheParametersOnce) {
  const Model model(config());
  for (const int ranks : {1, 2, 3, 5}) {
    std::vector<int> covered(static_cast<size_t>(model.flat.size()));
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardLayout layout(model, ranks, rank);
      int64_t local = 0;
      for (const ShardPiece& piece : layout.pieces()) {
        EXPECT_EQ(piece.local, local);
        local += piece.size;
        for (int64_t i = 0; i < piece.size; ++i) ++covered[static_cast<size_t>(piece.begin + i)];
      }
      EXPECT_EQ(local, layout.size());
      // Every rank has room for pieces as long as the longest, which is the first rank's.
      EXPECT_EQ(layout.padded_parameters(), ShardLayout(model, ranks, 0).padded_parameters());
      EXPECT_GE(layout.padded_parameters(), model.flat.size());
    }
    EXPECT_THAT(covered, Each(1)) << ranks;
  }
}

}  // namespace
}  // namespace twell
