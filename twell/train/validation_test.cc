// SPDX-License-Identifier: Apache-2.0
#include "twell/train/validation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "twell/data/batch_sampler.h"
#include "twell/model/forward.h"
#include "twell/model/scorer_cpu.h"
#include "twell/model/training.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

constexpr int64_t kLength = 16;

// Cross-entropy of every window of the validation split, computed one window at a time.
std::vector<double> window_losses(Context& ctx, const Model& model, const ShardSet& shards) {
  const BatchSampler sampler(shards, Split::kValidation, kLength, 0, false);
  std::vector<double> losses;
  for (int64_t window = 0; window < sampler.windows(); ++window) {
    std::vector<int32_t> inputs(kLength), targets(kLength);
    sampler.sequence(window, inputs, targets);
    ForwardState state(model.config, FfnPolicy::kDense);
    const std::vector<ForwardSequence> shape{{kLength, 0}};
    const Buffer<float> hidden(kLength * model.config.width);
    forward(
        ctx, model, state,
        {.ids = inputs, .sequences = shape, .hidden = hidden.matrix(kLength, model.config.width)});
    const CrossEntropyResult result =
        cross_entropy(ctx, {.x = hidden.matrix(kLength, model.config.width),
                            .weight = model.weights.head,
                            .targets = targets});
    losses.push_back(result.loss_sum / static_cast<double>(result.tokens));
  }
  return losses;
}

TEST(Validation, WindowsAreSpreadEvenlyOverTheSplit) {
  const TempFolder folder;
  const MicroData data(folder.path());
  Context ctx(1);
  ModelConfig config = micro_config(data.tokenizer.vocab_size());
  config.init_std = 1.0;  // so that windows differ
  Model model(config);
  init_weights(ctx, model, 3);
  ScorerCpu scorer(ctx, model);
  const std::vector<double> losses = window_losses(ctx, model, data.shards);
  const int64_t windows = std::ssize(losses);
  ASSERT_GT(windows, 10);

  const auto mean = [&](int64_t count, const auto& window) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += losses[static_cast<size_t>(window(i))];
    return sum / static_cast<double>(count);
  };
  for (const int64_t asked : {int64_t{1}, int64_t{4}, windows - 1, windows, windows + 5}) {
    const int64_t count = std::min(asked, windows);
    const double expected = mean(count, [&](int64_t i) { return i * windows / count; });
    for (const int64_t micro_batch : {1, 3}) {
      EXPECT_NEAR(validation_cross_entropy(scorer, data.shards, {asked, kLength, micro_batch}),
                  expected, 1e-5 * expected)
          << asked << " of " << windows << " windows";
    }
  }
  // The mean over the first windows differs, so the check above can fail.
  EXPECT_GT(std::abs(mean(4, [](int64_t i) { return i; }) -
                     mean(4, [&](int64_t i) { return i * windows / 4; })),
            1e-3);
}

// Validation is the loss of a training pass behind the same mask.
TEST(Validation, MasksDocumentsAsTrainingDoes) {
  const TempFolder folder;
  const MicroData data(folder.path());
  Context ctx(1);
  ModelConfig config = micro_config(data.tokenizer.vocab_size());
  config.init_std = 1.0;
  Model model(config);
  init_weights(ctx, model, 3);
  const BatchSampler sampler(data.shards, Split::kValidation, kLength, 0, false);
  TrainingState state(config, {1, kLength});
  std::vector<float> grad(static_cast<size_t>(config.parameter_count()));
  double loss = 0.0;
  int64_t cut = 0;
  for (int64_t window = 0; window < sampler.windows(); ++window) {
    std::vector<int32_t> inputs(kLength), targets(kLength);
    sampler.sequence(window, inputs, targets);
    const auto documents = document_lengths(inputs, kLength, data.shards.end_token());
    cut += std::ssize(documents) - 1;
    const TrainingBatch batch{
        .inputs = inputs, .targets = targets, .documents = documents, .step_tokens = kLength};
    loss += forward_backward(ctx, model, batch, state, grad).loss_sum;
  }
  ASSERT_GT(cut, 0);
  const auto tokens = static_cast<double>(sampler.windows() * kLength);
  ValidationOptions options{sampler.windows(), kLength, 3};
  ScorerCpu scorer(ctx, model);
  const double unmasked = validation_cross_entropy(scorer, data.shards, options);
  options.document_mask = true;
  const double masked = validation_cross_entropy(scorer, data.shards, options);
  EXPECT_NEAR(masked, loss / tokens, 1e-5 * masked);
  EXPECT_GT(std::abs(masked - unmasked), 1e-4);
}

}  // namespace
}  // namespace twell
