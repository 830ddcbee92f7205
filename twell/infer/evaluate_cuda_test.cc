// SPDX-License-Identifier: Apache-2.0
// Evaluation and profiles on the GPU against the CPU, on the same bf16 weights.
#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/infer/evaluate.h"
#include "twell/infer/test_model.h"
#include "twell/model/scorer_cpu.h"
#include "twell/model/scorer_cuda.h"

namespace twell {
namespace {

class EvaluateCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    model_ = test_model(cpu_, kVocab);
    for (float& value : model_->flat.span()) value = to_float(to_bf16(value));
    device_model_ = std::make_unique<ModelCuda>(*ctx_, *model_);
  }

  static void add_texts(Evaluator& evaluator) {
    for (const int64_t length : {300, 2, 49, 1000, 17}) {
      evaluator.add(random_ids(length, kVocab, static_cast<uint64_t>(length)));
    }
  }

  Context cpu_{2};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ModelCuda> device_model_;
};

TEST_F(EvaluateCudaTest, FiguresEqualCpu) {
  for (const EvaluateOptions& options :
       std::vector<EvaluateOptions>{{.length = 48, .stride = 48},
                                    {.length = 48, .stride = 16, .batch_tokens = 500},
                                    {.length = 10, .stride = 3, .batch_tokens = 64},
                                    {.length = 48, .stride = 48, .document_end = 5}}) {
    ScorerCpu cpu_scorer(cpu_, *model_);
    Evaluator cpu(cpu_scorer, options);
    add_texts(cpu);
    const Evaluation& want = cpu.finish();
    double first = 0.0;
    for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse}) {
      if (policy != FfnPolicy::kDense && ctx_->compute_capability() != 90) continue;
      ScorerCuda scorer(*ctx_, *device_model_, policy);
      Evaluator gpu(scorer, options);
      add_texts(gpu);
      const Evaluation& got = gpu.finish();
      EXPECT_EQ(got.tokens, want.tokens);
      // The loss of a token has about the error of a logit, a few hundredths (forward_cuda_test);
      // the mean over more than a thousand tokens is much more accurate.
      EXPECT_NEAR(got.cross_entropy(), want.cross_entropy(), 0.01);
      ASSERT_EQ(got.layers.size(), want.layers.size());
      for (size_t layer = 0; layer < want.layers.size(); ++layer) {
        EXPECT_EQ(got.layers[layer].tokens(), want.layers[layer].tokens());
        EXPECT_NEAR(got.layers[layer].mean(), want.layers[layer].mean(),
                    0.01 * want.layers[layer].mean());
      }
      ScorerCuda second(*ctx_, *device_model_, policy);
      Evaluator again(second, options);
      add_texts(again);
      EXPECT_EQ(again.finish().loss_sum, got.loss_sum) << "a second run differs";
      if (first == 0.0) first = got.loss_sum;
      EXPECT_NEAR(got.loss_sum, first, 0.01 * static_cast<double>(got.tokens));
    }
  }
}

TEST_F(EvaluateCudaTest, ProfileEqualsCpu) {
  ScorerCpu cpu_scorer(cpu_, *model_);
  ActivityProfiler cpu_profiler(model_->config, cpu_costs(cpu_, model_->config));
  Evaluator cpu(cpu_scorer, {.batch_tokens = 600, .profiler = &cpu_profiler});
  add_texts(cpu);
  cpu.finish();
  ScorerCuda gpu_scorer(*ctx_, *device_model_);
  ActivityProfiler gpu_profiler(model_->config, gpu_costs(model_->config, gpu_device(*ctx_)));
  Evaluator gpu(gpu_scorer, {.batch_tokens = 600, .profiler = &gpu_profiler});
  add_texts(gpu);
  const Evaluation& evaluation = gpu.finish();

  const ActivityProfile &want = cpu_profiler.profile(), &got = gpu_profiler.profile();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.tokens_at, want.tokens_at);
  for (size_t layer = 0; layer < want.layers.size(); ++layer) {
    const LayerProfile &a = got.layers[layer], &b = want.layers[layer];
    EXPECT_EQ(a.tiles_64, b.tiles_64);
    EXPECT_NEAR(a.mean_union_64(), b.mean_union_64(), 0.01 * b.mean_union_64());
    int64_t nnz = 0, difference = 0, expected = 0;
    for (size_t neuron = 0; neuron < b.fired.size(); ++neuron) {
      nnz += a.fired[neuron];
      expected += b.fired[neuron];
      difference += std::abs(a.fired[neuron] - b.fired[neuron]);
    }
    // Only gates very close to 0 can change sign by rounding, and these are few.
    EXPECT_LE(difference, expected / 50);
    // The pattern and the counts come from the same gate.
    EXPECT_NEAR(static_cast<double>(nnz) / static_cast<double>(got.tokens),
                evaluation.layers[layer].mean(), 0.002 * evaluation.layers[layer].mean());
    EXPECT_GE(a.prompt.speedup(), 1.0);
    EXPECT_FALSE(a.prompt.runs.empty());
  }
}

}  // namespace
}  // namespace twell
