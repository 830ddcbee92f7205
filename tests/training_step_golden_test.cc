// SPDX-License-Identifier: Apache-2.0
// Whole training steps against PyTorch: four steps of the recipe, from a checkpoint saved by
// transformers, are compared with torch.optim.AdamW in double precision. Golden values:
// golden/make_step_golden.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/data/batch_sampler.h"
#include "twell/model/forward.h"
#include "twell/model/reference_model.h"
#include "twell/model/training.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/train/optimizer.h"

namespace twell {
namespace {

constexpr float kL1Coeff = 0.05f;
constexpr double kLearningRate = 3e-3;
constexpr int64_t kSteps = 4, kStepSequences = 3, kStepLength = 10,
                  kStepTokens = kStepSequences * kStepLength;

TrainOptions recipe() {
  TrainOptions options;
  options.steps = kSteps;
  options.learning_rate = kLearningRate;
  options.min_lr_ratio = 1.0;
  options.warmup_steps = 0;
  return options;
}

struct Golden {
  const char* values;
  const char* model;
  bool masked = false;  // documents, which end with token 0, do not attend to each other
};

class GoldenStep : public ::testing::TestWithParam<Golden> {
 protected:
  std::filesystem::path golden() const {
    return std::filesystem::path(TWELL_SOURCE_DIR) / "tests" / "golden";
  }

  template <typename T>
  std::vector<T> values(const std::string& name) const {
    const TensorInfo& info = file_.tensor(name);
    std::vector<T> out(info.bytes.size() / sizeof(T));
    std::memcpy(out.data(), info.bytes.data(), info.bytes.size());
    return out;
  }
  // All parameters, or their gradients, in the order of our memory layout.
  std::vector<float> flat(const std::string& prefix) const {
    std::vector<float> out(static_cast<size_t>(model_->config.parameter_count()));
    for (const ParamSpec& spec : model_->table) {
      const TensorInfo& info = file_.tensor(prefix + spec.name);
      read_tensor(info,
                  {.out = out.data() + spec.offset,
                   .rows = spec.rows,
                   .cols = spec.cols,
                   .transposed = spec.transposed},
                  0, spec.transposed ? spec.cols : spec.rows);
    }
    return out;
  }

  TrainingBatch batch(size_t step) const {
    TrainingBatch out;
    out.inputs = std::span(inputs_).subspan(step * kStepTokens, kStepTokens);
    out.targets = std::span(targets_).subspan(step * kStepTokens, kStepTokens);
    if (GetParam().masked) out.documents = documents_[step];
    out.step_tokens = kStepTokens;
    out.l1_coeff = kL1Coeff;
    return out;
  }

  // Tolerance of the weights' movement. A gradient far smaller than the error d can move its weight
  // by up to 2 * lr in the wrong direction. For gradients spread around zero with deviation s this
  // affects a share of about d / s of the weights, hence sqrt(2 * d / s) in norm.
  double moved_tolerance() const { return std::sqrt(2.0 * float_tolerance(model_->config)); }

  SafetensorsFile file_{golden() / (std::string(GetParam().values) + ".safetensors")};
  Context ctx_{2};
  std::unique_ptr<Model> model_ = load_model(ctx_, golden() / GetParam().model);
  std::vector<int32_t> inputs_ = values<int32_t>("inputs");
  std::vector<int32_t> targets_ = values<int32_t>("targets");
  std::vector<std::vector<int64_t>> documents_ = [this] {
    std::vector<std::vector<int64_t>> out;
    for (size_t step = 0; step < kSteps; ++step) {
      out.push_back(document_lengths(std::span(inputs_).subspan(step * kStepTokens, kStepTokens),
                                     kStepLength,
                                     /*end=*/0));
    }
    return out;
  }();
};

TEST_P(GoldenStep, LogitsOfATransformersCheckpoint) {
  ForwardState state(model_->config, FfnPolicy::kAuto);
  const Buffer<float> hidden(kStepTokens * model_->config.width);
  const Buffer<float> out(kStepTokens * model_->config.vocab_size);
  std::vector<ForwardSequence> sequences(kStepSequences, {.tokens = kStepLength});
  if (GetParam().masked) {
    // Each document from position 0 on, where PyTorch counts positions in the packed sequence.
    sequences.clear();
    for (const int64_t length : documents_[0]) sequences.push_back({.tokens = length});
  }
  const MatrixF hidden_matrix = hidden.matrix(kStepTokens, model_->config.width);
  forward(ctx_, *model_, state,
          {.ids = batch(0).inputs, .sequences = sequences, .hidden = hidden_matrix});
  logits(ctx_, *model_, hidden_matrix, out.matrix(kStepTokens, model_->config.vocab_size));
  const std::vector<float> expected = values<float>("logits");
  EXPECT_LE(relative_error(out.span(), std::span(expected)), float_tolerance(model_->config));
}

TEST_P(GoldenStep, LossesGradientsAndWeightsOfFourSteps) {
  const std::vector<float> ce = values<float>("ce"), l1 = values<float>("l1"),
                           grad_norm = values<float>("grad_norm");
  const std::vector<float> expected_grad = flat("grad."), expected_after = flat("after.");
  const std::vector<float> before(model_->flat.span().begin(), model_->flat.span().end());
  const int64_t size = model_->flat.size(), layers = model_->config.layers;
  const double tolerance = float_tolerance(model_->config);

  TrainingState state(model_->config, {kStepSequences, kStepLength});
  Optimizer optimizer(*model_, ShardLayout(*model_), OptimizerKind::kAdamW, nullptr);
  Buffer<float> grad(size);
  std::vector<std::vector<uint8_t>> active(static_cast<size_t>(layers));
  for (auto& layer : active) layer.resize(static_cast<size_t>(model_->config.ffn));
  for (size_t step = 0; step < kSteps; ++step) {
    std::fill_n(grad.data(), size, 0.0f);
    TrainingBatch step_batch = batch(step);
    if (step == 0) step_batch.active = &active;
    const TrainingResult result = forward_backward(ctx_, *model_, step_batch, state, grad.span());
    double l1_sum = 0.0;
    for (const FfnTrainStats& layer : result.layers) l1_sum += layer.l1_sum;
    const double norm = global_norm(ctx_, grad.span());
    if (step == 0) {
      EXPECT_LE(relative_error(grad.span(), std::span(expected_grad)), tolerance);
    }
    // Adam divides a gradient by its own size. An error d of a gradient g thus moves the weight by
    // up to lr * d / |g| too far, and changes the loss by lr * d per weight and step.
    const double drift = static_cast<double>(step) * kLearningRate * tolerance * norm *
                         std::sqrt(static_cast<double>(size));
    EXPECT_NEAR(result.loss_sum / kStepTokens, ce[step], tolerance * ce[step] + drift) << step;
    EXPECT_NEAR(l1_sum / static_cast<double>(kStepTokens * layers), l1[step],
                tolerance * l1[step] + drift / kL1Coeff)
        << step;
    EXPECT_NEAR(norm, grad_norm[step], step == 0 ? tolerance * norm : moved_tolerance() * norm);
    optimizer.step(ctx_, recipe(), static_cast<int64_t>(step) + 1, norm, grad.span(), *model_);
  }

  std::vector<float> moved(before), expected_moved(before);
  for (size_t i = 0; i < before.size(); ++i) {
    moved[i] = model_->flat.span()[i] - before[i];
    expected_moved[i] = expected_after[i] - before[i];
  }
  EXPECT_LE(relative_error(std::span(moved), std::span(expected_moved)), moved_tolerance());
  const std::vector<uint8_t> expected_active = values<uint8_t>("active");
  for (size_t layer = 0; layer < active.size(); ++layer) {
    const auto expected =
        std::span(expected_active).subspan(layer * active[layer].size(), active[layer].size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), active[layer].begin()));
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, GoldenStep,
                         ::testing::Values(Golden{"tied_gqa", "tied_gqa"},
                                           Golden{"untied_mha", "untied_mha"},
                                           Golden{"minicpm", "minicpm"},
                                           Golden{"documents", "tied_gqa", /*masked=*/true}),
                         [](const auto& instance) { return instance.param.values; });

}  // namespace
}  // namespace twell
