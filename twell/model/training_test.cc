// SPDX-License-Identifier: Apache-2.0
#include "twell/model/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/model/activations.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

constexpr float kL1Coeff = 0.07f;

ModelConfig small_config(bool gated, bool tied, int64_t kv_heads) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 13;
  config.width = 8;
  config.ffn = 16;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = kv_heads;
  config.head_dim = 6;
  config.context = 12;
  config.gated = gated;
  config.tied_embeddings = tied;
  config.init_std = 0.2;
  return config;
}

struct Data {
  std::vector<int32_t> inputs, targets;
};

Data random_data(const ModelConfig& config, MicroBatchShape shape) {
  Data data;
  const uint64_t vocab = static_cast<uint64_t>(config.vocab_size);
  for (int64_t i = 0; i < shape.sequences * shape.length; ++i) {
    const uint64_t at = static_cast<uint64_t>(i);
    data.inputs.push_back(static_cast<int32_t>(uniform_below(1, 0, at, vocab)));
    data.targets.push_back(static_cast<int32_t>(uniform_below(1, 1, at, vocab)));
  }
  data.targets[static_cast<size_t>(shape.length - 1)] = -1;
  return data;
}

TrainingBatch whole_step(const Data& data) {
  TrainingBatch batch;
  batch.inputs = data.inputs;
  batch.targets = data.targets;
  batch.step_tokens = std::ssize(data.inputs);
  batch.l1_coeff = kL1Coeff;
  return batch;
}

double reference_loss(const ReferenceResult& result, double tokens) {
  const double l1 = std::accumulate(result.l1_sum.begin(), result.l1_sum.end(), 0.0);
  return (result.ce_sum +
          static_cast<double>(kL1Coeff) * l1 / static_cast<double>(result.l1_sum.size())) /
         tokens;
}

// Central differences of the reference's loss. The step moves no gate across its kink and gives an
// error of about 1e-9: the square of the step, and double rounding divided by the step.
std::vector<double> finite_differences(const ReferenceModel& reference, const Data& data,
                                       int64_t length, std::span<const size_t> parameters) {
  constexpr double kStep = 1e-6;
  const double tokens = static_cast<double>(data.inputs.size());
  std::vector<double> out(parameters.size());
  Context ctx;
  ctx.parallel_for(std::ssize(out), 1, [&](int64_t begin, int64_t end, int) {
    ReferenceModel moved = reference;
    for (size_t n = static_cast<size_t>(begin); n < static_cast<size_t>(end); ++n) {
      const size_t i = parameters[n];
      const double value = std::exchange(moved.flat[i], moved.flat[i] + kStep);
      const double above = reference_loss(moved.run(data.inputs, data.targets, length), tokens);
      moved.flat[i] = value - kStep;
      const double below = reference_loss(moved.run(data.inputs, data.targets, length), tokens);
      moved.flat[i] = value;
      out[n] = (above - below) / (2.0 * kStep);
    }
  });
  return out;
}

struct Variant {
  bool gated, tied;
  int64_t kv_heads;
  Activation activation = Activation::kRelu;
  bool qkv_bias = false, qk_norm = false, o_bias = false;
  int64_t window = 0;  // of the first layer
  int64_t ffn = 0;     // 0: as it is
  bool mlp_bias = false;
  bool scaled = false;  // as MiniCPM is
};

class GradientTest : public ::testing::TestWithParam<Variant> {};

TEST_P(GradientTest, AgreesWithFiniteDifferencesOfTheWholeModel) {
  const Variant variant = GetParam();
  ModelConfig config = small_config(variant.gated, variant.tied, variant.kv_heads);
  config.activation = variant.activation;
  config.qkv_bias = variant.qkv_bias;
  config.qk_norm = variant.qk_norm;
  config.o_bias = variant.o_bias;
  config.mlp_bias = variant.mlp_bias;
  if (variant.scaled) {
    config.embedding_scale = 12.0;
    config.depth_scale = 1.4;
    config.base_width = 6;
  }
  if (variant.activation == Activation::kFatRelu) config.activation_threshold = 0.05;
  config.sliding_window = variant.window;
  if (variant.window > 0) config.full_attention = {false, true};
  if (variant.ffn > 0) config.ffn = variant.ffn;
  if (variant.qk_norm) {
    config.rope_scaling = {.type = RopeType::kYarn, .factor = 4.0, .original_context = 8};
  }
  const MicroBatchShape shape = {2, 5};
  const Model model = sparse_model(config, 3, 0.5f);
  const Data data = random_data(config, shape);
  const ReferenceModel reference(model);
  const ReferenceResult expected = reference.run(data.inputs, data.targets, shape.length);
  ASSERT_TRUE(!leaves_zeros(config.activation) || expected.min_gate > 5e-5)
      << "too close to a kink for differences; choose another seed";
  // Each difference takes two runs: of a large tensor every fourth parameter has one, from another
  // first one on in other variants.
  const size_t first = static_cast<size_t>(variant.activation) +
                       static_cast<size_t>(variant.kv_heads) +
                       2 * static_cast<size_t>(variant.gated) + static_cast<size_t>(variant.tied);
  std::vector<size_t> parameters;
  for (const ParamSpec& spec : model.table) {
    const size_t step = spec.size() > 64 ? 4 : 1;
    const auto end = static_cast<size_t>(spec.offset + spec.size());
    for (size_t i = static_cast<size_t>(spec.offset) + first % step; i < end; i += step) {
      parameters.push_back(i);
    }
  }
  const std::vector<double> differences =
      finite_differences(reference, data, shape.length, parameters);

  Context ctx(2);
  for (const FfnTrainPolicy policy : {FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid}) {
    TrainingState state(config, shape);
    Buffer<float> grad(model.flat.size());
    TrainingBatch batch = whole_step(data);
    batch.policy = policy;
    const TrainingResult result = forward_backward(ctx, model, batch, state, grad.span());

    const double tolerance = float_tolerance(config);
    EXPECT_EQ(result.loss_tokens, 9);
    EXPECT_NEAR(result.loss_sum, expected.ce_sum, tolerance * expected.ce_sum);
    ASSERT_EQ(result.layers.size(), 2u);
    for (size_t layer = 0; layer < 2; ++layer) {
      const FfnTrainStats& stats = result.layers[layer];
      const std::vector<int32_t>& row_nnz = expected.row_nnz[layer];
      EXPECT_EQ(stats.nnz, std::accumulate(row_nnz.begin(), row_nnz.end(), int64_t{0}));
      EXPECT_EQ(stats.max_row_nnz, *std::max_element(row_nnz.begin(), row_nnz.end()));
      EXPECT_NEAR(stats.l1_sum, expected.l1_sum[layer], tolerance * expected.l1_sum[layer]);
    }
    for (const ParamSpec& spec : model.table) {
      std::vector<double> got, want;
      for (size_t n = 0; n < parameters.size(); ++n) {
        const auto at = static_cast<int64_t>(parameters[n]);
        if (at < spec.offset || at >= spec.offset + spec.size()) continue;
        got.push_back(static_cast<double>(grad.span()[parameters[n]]));
        want.push_back(differences[n]);
      }
      const double error = relative_error(std::span(got), std::span(want));
      EXPECT_LE(error, tolerance) << spec.name
                                  << (policy == FfnTrainPolicy::kDense ? " dense" : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Variants, GradientTest,
    ::testing::Values(
        Variant{true, true, 2}, Variant{true, false, 4}, Variant{false, true, 1},
        Variant{false, false, 2}, Variant{true, true, 2, Activation::kSilu, true, false},
        Variant{true, false, 2, Activation::kRelu, false, true},
        Variant{false, true, 2, Activation::kGelu, true, true},
        Variant{true, false, 2, Activation::kRelu, true, false, true, 2, 19},
        Variant{true, true, 2, Activation::kFatRelu}, Variant{false, true, 2, Activation::kFatRelu},
        Variant{true, true, 2, Activation::kDRelu}, Variant{false, true, 2, Activation::kRelu2},
        Variant{true, true, 2, Activation::kSilu, true, false, true, 0, 19, true},
        Variant{false, true, 2, Activation::kRelu, true, false, true, 0, 0, true},
        Variant{true, true, 2, Activation::kDRelu, false, false, false, 0, 0, true},
        Variant{true, true, 2, Activation::kFatRelu, false, false, false, 0, 0, false, true},
        Variant{true, false, 4, Activation::kSilu, true, false, false, 2, 0, false, true}),
    [](const auto& instance) {
      const Variant v = instance.param;
      return fmt::format("{}_{}_{}kv_{}{}{}{}{}{}{}", v.gated ? "gated" : "plain",
                         v.tied ? "tied" : "untied", v.kv_heads, activation_name(v.activation),
                         v.qkv_bias ? "_bias" : "", v.qk_norm ? "_norm" : "",
                         v.o_bias ? "_obias" : "", v.window > 0 ? "_window" : "",
                         v.mlp_bias ? "_mlpbias" : "", v.scaled ? "_scaled" : "");
    });

// The results of one call, as bits.
struct TrainingOutcome {
  double loss_sum;
  std::vector<float> grad;
  bool operator==(const TrainingOutcome& other) const {
    return loss_sum == other.loss_sum &&
           std::memcmp(grad.data(), other.grad.data(), grad.size() * sizeof(float)) == 0;
  }
};

class TrainingTest : public ::testing::Test {
 protected:
  TrainingOutcome run(Context& ctx, TrainingState& state, const TrainingBatch& batch) const {
    TrainingOutcome out;
    out.grad.resize(static_cast<size_t>(config_.parameter_count()));
    out.loss_sum = forward_backward(ctx, model_, batch, state, out.grad).loss_sum;
    return out;
  }

  const ModelConfig config_ = small_config(true, true, 2);
  const MicroBatchShape shape_ = {4, 9};
  const Model model_ = sparse_model(config_, 1, 3.0f);
  const Data data_ = random_data(config_, shape_);
};

TEST_F(TrainingTest, RepeatsBitForBitWhateverTheMemoryHeld) {
  Context ctx(2);
  TrainingState state(config_, shape_);
  const TrainingBatch batch = whole_step(data_);
  const TrainingOutcome first = run(ctx, state, batch);
  EXPECT_TRUE(first == run(ctx, state, batch));
  std::fill_n(state.activations().memory.data(), state.activations().memory.size(),
              std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(first == run(ctx, state, batch));
}

TEST_F(TrainingTest, MicroBatchesAddUpToTheStep) {
  Context ctx(2);
  TrainingState whole_state(config_, shape_);
  const TrainingOutcome whole = run(ctx, whole_state, whole_step(data_));

  const size_t half = data_.inputs.size() / 2;
  TrainingState state(config_, {2, 9});
  std::vector<float> grad(whole.grad.size());
  double loss_sum = 0.0;
  for (const size_t begin : {size_t{0}, half}) {
    TrainingBatch batch = whole_step(data_);
    batch.inputs = batch.inputs.subspan(begin, half);
    batch.targets = batch.targets.subspan(begin, half);
    loss_sum += forward_backward(ctx, model_, batch, state, grad).loss_sum;
  }
  EXPECT_NEAR(loss_sum, whole.loss_sum, float_tolerance(config_) * whole.loss_sum);
  EXPECT_LE(relative_error(std::span(grad), std::span(whole.grad)), float_tolerance(config_));
}

// A document in a sequence has the loss and the gradients that it has by itself, where its
// positions start at 0: attention depends on distances alone.
TEST_F(TrainingTest, ADocumentIsAsItIsByItself) {
  Context ctx(2);
  const std::vector<int64_t> documents = {9, 1, 8, 4, 4, 1, 2, 2, 2, 2, 1};
  TrainingState state(config_, shape_);
  TrainingBatch batch = whole_step(data_);
  const TrainingOutcome unmasked = run(ctx, state, batch);
  batch.documents = documents;
  const TrainingOutcome masked = run(ctx, state, batch);
  EXPECT_TRUE(masked == run(ctx, state, batch));

  std::vector<float> grad(masked.grad.size());
  double loss_sum = 0.0;
  size_t begin = 0;
  for (const int64_t length : documents) {
    TrainingState alone(config_, {1, length});
    TrainingBatch document = whole_step(data_);
    document.inputs = document.inputs.subspan(begin, static_cast<size_t>(length));
    document.targets = document.targets.subspan(begin, static_cast<size_t>(length));
    loss_sum += forward_backward(ctx, model_, document, alone, grad).loss_sum;
    begin += static_cast<size_t>(length);
  }
  const double tolerance = float_tolerance(config_);
  EXPECT_NEAR(loss_sum, masked.loss_sum, tolerance * masked.loss_sum);
  EXPECT_LE(relative_error(std::span(grad), std::span(masked.grad)), tolerance);
  EXPECT_GT(relative_error(std::span(unmasked.grad), std::span(masked.grad)), 100 * tolerance);

  for (const std::vector<int64_t>& wrong :
       {std::vector<int64_t>{10, 8, 9, 9}, {9, 9, 9}, {9, 0, 9, 9, 9}}) {
    batch.documents = wrong;
    EXPECT_THROW(run(ctx, state, batch), Error);
  }
}

TEST_F(TrainingTest, ActiveFlagsGatherTheNeuronsThatFired) {
  Context ctx(2);
  TrainingState state(config_, shape_);
  std::vector<std::vector<uint8_t>> active(2, std::vector<uint8_t>(16, 0));
  TrainingBatch batch = whole_step(data_);
  batch.active = &active;
  run(ctx, state, batch);
  for (const std::vector<uint8_t>& layer : active) {
    const auto fired = std::accumulate(layer.begin(), layer.end(), 0);
    EXPECT_GT(fired, 2);
    EXPECT_LT(fired, 16);
  }
}

TEST_F(TrainingTest, RefusesShapesThatDoNotFit) {
  EXPECT_THROW(TrainingState(config_, {1, 13}), InputError);
  EXPECT_THROW(TrainingState(config_, {0, 8}), InputError);
  EXPECT_THROW(TrainingState::memory_plan(config_, {int64_t{1} << 40, 8}), InputError);
  Context ctx(1);
  TrainingState state(config_, {2, 9});
  EXPECT_THROW(run(ctx, state, whole_step(data_)), Error);
}

int64_t total(const std::vector<MemoryItem>& items) {
  int64_t bytes = 0;
  for (const MemoryItem& item : items) bytes += item.bytes;
  return bytes;
}

TEST(MemoryPlan, IsWhatAStepTakes) {
  for (const bool gated : {true, false}) {
    const ModelConfig config = preset_config("tiny", gated);
    const MicroBatchShape shape = {2, 256};
    const std::vector<MemoryItem> plan = TrainingState::memory_plan(config, shape);

    TrainingState state(config, shape);
    const TrainingState::Activations& held = state.activations();
    const int64_t planned_scratch = plan.back().bytes;
    const int64_t allocated = held.memory.size() * 4 + held.positions.size() * 4 +
                              held.rope.cos.size() * 4 + held.rope.sin.size() * 4 +
                              std::ssize(held.ffn) * FfnSaved::bytes(512, config.ffn, gated);
    EXPECT_EQ(total(plan), allocated + planned_scratch);

    Context ctx(2);
    Model model(config);
    init_weights(ctx, model, 1);
    const std::vector<int32_t> ids(512, 1);
    Buffer<float> grad(config.parameter_count());
    forward_backward(ctx, model, {.inputs = ids, .targets = ids, .step_tokens = 512}, state,
                     grad.span());
    const int64_t taken = allocated + static_cast<int64_t>(ctx.scratch().peak_bytes());
    EXPECT_LE(static_cast<int64_t>(ctx.scratch().peak_bytes()), planned_scratch);
    // The size of packed operands depends on a product's shape; the plan uses the largest.
    constexpr int64_t kProductBytes = int64_t{6} << 20;
    EXPECT_GE(static_cast<double>(taken + kProductBytes), 0.98 * static_cast<double>(total(plan)));
  }
}

}  // namespace
}  // namespace twell
