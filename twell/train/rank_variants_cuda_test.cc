// SPDX-License-Identifier: Apache-2.0
// Two GPUs train every family, activation and loss as one GPU does. Their ranks are threads here,
// which connect once for all of them. Needs two GPUs and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "twell/base/cuda_gtest.h"
#include "twell/dist/test_ranks.h"
#include "twell/train/engine_cuda.h"
#include "twell/train/test_rank_variants.h"

namespace twell {
namespace {

// A GPU and what runs on it.
class VariantDevice {
 public:
  explicit VariantDevice(int gpu) : chosen_(gpu) {}
  VariantRun train(const RunVariant& variant, int64_t vocab_size, const TrainingData& data,
                   Communicator* all) {
    const VariantSetup setup(variant, vocab_size, all);
    const std::string why = cuda_run_unsupported(setup.config, setup.options);
    TWELL_REQUIRE(why.empty(), "{}", why);
    Model model = setup.model(host_, 3);
    const auto teacher = setup.teacher(host_);
    TrainEngineCuda engine(ctx_, model, &data, setup.options, {}, all, teacher.get());
    return run_variant(host_, engine, data, setup.options);
  }

 private:
  struct Chosen {
    explicit Chosen(int gpu) { TWELL_CUDA_CHECK(cudaSetDevice(gpu)); }
  };
  Chosen chosen_;
  Context host_{1};
  CudaStream stream_;
  CudaContext ctx_{stream_.get()};
};

class RankVariantsCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    int devices = 0;
    TWELL_CUDA_CHECK(cudaGetDeviceCount(&devices));
    if (devices < kDevices) GTEST_SKIP() << "needs " << kDevices << " GPUs, there are " << devices;
    if (const std::string why = nccl_unavailable(); !why.empty()) GTEST_SKIP() << why;
    const VariantSetup any(kTalkVariants[0], data_.tokenizer.vocab_size(), nullptr);
    const std::string why = cuda_run_unsupported(any.config, any.options);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  void expect_each_as_on_one_gpu(std::span<const RunVariant> variants, const TrainingData& data) {
    const int64_t vocab_size = data_.tokenizer.vocab_size();
    std::array<std::vector<VariantRun>, kDevices> two;
    const auto errors = run_ranks(kDevices, [&](Communicator& all) {
      VariantDevice device(all.rank());
      for (const RunVariant& variant : variants) {
        two[static_cast<size_t>(all.rank())].push_back(
            device.train(variant, vocab_size, data, &all));
      }
    });
    EXPECT_THAT(errors, testing::Each(testing::StrEq("")));
    VariantDevice device(0);
    Context ctx(1);
    for (size_t i = 0; i < variants.size(); ++i) {
      SCOPED_TRACE(variants[i].name);
      ASSERT_GT(std::min(two[0].size(), two[1].size()), i) << "a rank failed in this variant";
      expect_run_of_one_rank(VariantSetup(variants[i], vocab_size, nullptr).model(ctx, 3),
                             {two[0][i], two[1][i]},
                             device.train(variants[i], vocab_size, data, nullptr), kTolerance);
    }
  }

  static constexpr int kDevices = 2;
  // The first step as on the CPU (rank_variants_test.cc). Weights that then differ in the last bits
  // of f32 may round to other bf16, with which layers compute.
  static constexpr RankTolerance kTolerance{
      .first_loss = 1e-6, .loss = 0.01, .gradient = 1e-5, .weights = 0.1};
  TempFolder temp_;
  MicroData data_{temp_.path()};
};

TEST_F(RankVariantsCudaTest, TwoGpusTrainEachAsOne) {
  expect_each_as_on_one_gpu(kRunVariants, data_.shards);
}

TEST_F(RankVariantsCudaTest, NeuronsThatFireOnOneRankAloneAreNotDead) {
  expect_each_as_on_one_gpu(kSeldomVariants, data_.shards);
}

TEST_F(RankVariantsCudaTest, TwoGpusTrainOnConversationsAsOne) {
  Context ctx(1);
  const int64_t length = micro_config(data_.tokenizer.vocab_size()).context;
  const auto talks = micro_talks(ctx, temp_.path(), data_.tokenizer, length);
  expect_each_as_on_one_gpu(kTalkVariants, *talks);
}

}  // namespace
}  // namespace twell
