// SPDX-License-Identifier: Apache-2.0
// Two GPUs train a micro model together; their ranks are threads here. Needs two GPUs and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include "twell/base/cuda_gtest.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/dist/test_ranks.h"
#include "twell/train/engine_cuda.h"
#include "twell/train/micro_batches.h"
#include "twell/train/test_run.h"
#include "twell/train/trainer.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::Each;
using testing::HasSubstr;
using testing::StrEq;

constexpr int kGpus = 2;

class RanksCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    int devices = 0;
    TWELL_CUDA_CHECK(cudaGetDeviceCount(&devices));
    if (devices < kGpus) GTEST_SKIP() << "needs " << kGpus << " GPUs, there are " << devices;
    if (const std::string why = nccl_unavailable(); !why.empty()) GTEST_SKIP() << why;
    const std::string why = cuda_run_unsupported(config(), options(8));
    if (!why.empty()) GTEST_SKIP() << why;
  }
  ModelConfig config() const { return micro_config(data_.tokenizer.vocab_size()); }
  const TrainingData& data() const {
    return talks_ ? static_cast<const TrainingData&>(*talks_) : data_.shards;
  }
  // Five micro-batches a step: three for the first rank, two for the second.
  TrainOptions options(int64_t steps) const {
    TrainOptions options = micro_options(steps);
    options.batch_tokens = 5 * 32;
    options.validate_every = 1000;
    options.validation_sequences = 7;
    options.reinit_dead = true;
    options.clip_norm = 0.5;
    return resolve_options(options, config());
  }

  struct Result {
    std::vector<double> ce;
    std::vector<int64_t> dead;
    std::vector<float> weights;
    double validation = 0.0;
    int64_t replayed = 0;
    int64_t device_bytes = 0;
    std::string error;
  };
  // Trains from checkpoint `from` (or anew) to step `to` and saves to `into`; results by rank.
  std::vector<Result> train(int ranks, TrainOptions options, int64_t to, const fs::path& from = {},
                            const fs::path& into = {}, int poisoned = -1) {
    options.ranks = ranks;
    if (!into.empty()) fs::create_directories(into);
    std::vector<Result> results(static_cast<size_t>(ranks));
    const auto errors = run_rendezvous(ranks, [&](Rendezvous& rendezvous) {
      const int rank = rendezvous.identity().rank;
      const auto all = ranks > 1 ? gloo_communicator(rendezvous) : nullptr;
      TWELL_CUDA_CHECK(cudaSetDevice(rank));
      const CudaStream stream;
      CudaContext device(stream.get());
      Context host(1);
      std::unique_ptr<Model> model;
      if (from.empty()) {
        model = std::make_unique<Model>(config());
        init_weights(host, *model, 3);
      } else {
        model = load_model(host, from);
      }
      if (rank == poisoned) {
        model->flat[model->flat.size() / 2] = std::numeric_limits<float>::quiet_NaN();
      }
      TrainEngineCuda engine(device, *model, &data(), options, {}, all.get());
      Trainer trainer(host, engine, data(), options, "data");
      if (!from.empty()) trainer.restore(from);
      Result& result = results[static_cast<size_t>(rank)];
      while (trainer.steps_done() < to) {
        const StepMetrics metrics = trainer.train_step();
        result.ce.push_back(metrics.ce);
        result.dead.push_back(metrics.layers[0].dead);
      }
      result.validation = trainer.validate();
      result.replayed = engine.replayed();
      result.device_bytes = engine.device_bytes();
      if (!into.empty()) trainer.save(into);
      engine.read_state([&](const OptimizerTensors& state) {
        result.weights.assign(state.weights.begin(), state.weights.end());
      });
    });
    for (size_t rank = 0; rank < results.size(); ++rank) results[rank].error = errors[rank];
    return results;
  }
  // Two GPUs have the curve of one and repeat it bit for bit. Returns what the first rank found.
  Result expect_curve_of_one_gpu(const TrainOptions& options) {
    const Result one = train(1, options, options.steps)[0];
    EXPECT_EQ(one.error, "");
    std::vector<Result> two = train(2, options, options.steps);
    for (const Result& rank : two) {
      EXPECT_EQ(rank.error, "");
      EXPECT_EQ(rank.weights, two[0].weights);
      EXPECT_EQ(rank.ce, two[0].ce);
    }
    if (one.ce.size() != two[0].ce.size() || one.ce.empty()) {
      ADD_FAILURE() << one.ce.size() << " losses on one GPU, " << two[0].ce.size() << " on two";
      return {};
    }
    // The first loss differs by the order of a sum. Later ones differ by weights whose f32 values
    // differ in the last bits, some of which round to another bf16.
    EXPECT_NEAR(two[0].ce[0], one.ce[0], 1e-6);
    for (size_t i = 0; i < one.ce.size(); ++i) EXPECT_NEAR(two[0].ce[i], one.ce[i], 0.01) << i;
    EXPECT_NEAR(two[0].validation, one.validation, 0.01);
    EXPECT_EQ(two[0].dead[0], one.dead[0]);
    EXPECT_LT(distance(two[0].weights, one.weights), 0.02);
    const std::vector<Result> again = train(2, options, options.steps);
    EXPECT_EQ(again[0].ce, two[0].ce);
    EXPECT_EQ(again[0].weights, two[0].weights);
    return two[0];
  }
  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(a[i] - b[i], 2.0);
      norm += std::pow(a[i], 2.0);
    }
    return std::sqrt(difference / norm);
  }

  TempFolder temp_;
  MicroData data_{temp_.path()};
  std::unique_ptr<ChatData> talks_;  // trained on in place of text, where there are some
};

TEST_F(RanksCudaTest, TheCurveIsThatOfOneGpuAndRepeatsBitForBit) {
  const Result result = expect_curve_of_one_gpu(options(12));
  EXPECT_GT(result.replayed, 0);  // micro-batches between the first and the last are graphs
}

TEST_F(RanksCudaTest, OneMicroBatchOfAStepGathersAndReduces) {
  TrainOptions options = this->options(12);
  options.batch_tokens = 2 * 32;
  const Result result = expect_curve_of_one_gpu(options);
  EXPECT_EQ(result.replayed, 0);
}

TEST_F(RanksCudaTest, MuonOrthogonalisesEachMatrixOnOneOfThem) {
  TrainOptions options = this->options(12);
  options.optimizer = OptimizerKind::kMuon;
  options.learning_rate = 2e-3;
  options.matrix_learning_rate = 8e-3;
  expect_curve_of_one_gpu(options);
}

// The ranks' micro-batches have unlike many targets, and the loss is the mean over all of them.
TEST_F(RanksCudaTest, ConversationsHaveTheCurveOfOneGpu) {
  Context host(1);
  talks_ = micro_talks(host, temp_.path(), data_.tokenizer, config().context);
  TrainOptions options = this->options(12);
  options.micro_batch = 8;
  options.batch_tokens = 5 * 8 * config().context;
  options.document_mask = true;
  const MicroBatches batches(data(), options);
  std::set<int64_t> targets;
  for (int64_t step = 1; step <= 12; ++step) targets.insert(batches.step_targets(step));
  EXPECT_GT(targets.size(), 1u);
  EXPECT_LT(*targets.rbegin(), options.batch_tokens * 3 / 4);
  expect_curve_of_one_gpu(options);
}

TEST_F(RanksCudaTest, GradientsMayTravelInBf16) {
  TrainOptions rounded = options(12);
  rounded.gradient_dtype = DType::kBF16;
  const Result f32 = train(2, options(12), 12)[0], bf16 = train(2, rounded, 12)[0];
  ASSERT_EQ(bf16.error, "");
  EXPECT_EQ(bf16.ce[0], f32.ce[0]);
  EXPECT_NE(bf16.weights, f32.weights);
  for (size_t i = 0; i < f32.ce.size(); ++i) EXPECT_NEAR(bf16.ce[i], f32.ce[i], 0.02) << i;
}

TEST_F(RanksCudaTest, ACheckpointIsContinuedByAnyNumberOfGpus) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TrainOptions options = this->options(6);
    options.save_dtype = options.moment_dtype = dtype;
    const std::string name = dtype == DType::kF32 ? "f32" : "bf16";
    const std::vector<float> straight = train(2, options, 6)[0].weights;
    const fs::path half = temp_.path() / name, single = temp_.path() / (name + "-1");
    train(2, options, 3, {}, half);
    EXPECT_EQ(train(2, options, 6, half)[0].weights, straight);
    // On one GPU for a step, and on two again.
    EXPECT_EQ(train(1, options, 4, half, single)[0].error, "");
    const Result two = train(2, options, 6, single)[0];
    EXPECT_EQ(two.error, "");
    EXPECT_LT(distance(two.weights, straight), 0.02);
  }
}

TEST_F(RanksCudaTest, ANonFiniteNumberNamesItsRank) {
  for (const Result& rank : train(2, options(4), 4, {}, {}, /*poisoned=*/1)) {
    EXPECT_THAT(rank.error, HasSubstr("at step 1 on rank 1"));
  }
}

}  // namespace
}  // namespace twell
