// SPDX-License-Identifier: Apache-2.0
// Gradients of whole models on the GPU against the CPU's, on the same bf16 weights.
#include "twell/model/training_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <optional>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

constexpr float kL1Coeff = 0.05f;

struct Variant {
  const char* name;
  ModelConfig config;
  MicroBatchShape shape;
  bool masked = false;  // documents
};

ModelConfig small_config(int64_t heads, int64_t kv_heads, int64_t head_dim, bool gated, bool tied) {
  ModelConfig config;
  config.vocab_size = 320;
  config.width = 64;
  config.ffn = 192;
  config.layers = 3;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.context = 160;
  config.gated = gated;
  config.tied_embeddings = tied;
  config.init_std = 0.1;
  return config;
}

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"mha_tied", small_config(4, 4, 16, true, true), {2, 64}},
                              {"gqa_untied", small_config(4, 2, 16, true, false), {3, 37}},
                              {"mqa_not_gated", small_config(4, 1, 32, false, true), {1, 129}},
                              {"odd_vocab_untied", small_config(2, 2, 64, true, false), {2, 128}},
                              {"bias_odd_vocab", small_config(8, 2, 8, true, true), {4, 33}},
                              {"documents", small_config(4, 2, 16, true, false), {3, 150}, true}};
  const auto add = [&](const char* name, bool gated, MicroBatchShape shape,
                       bool masked = false) -> ModelConfig& {
    all.push_back({name, small_config(4, 2, 16, gated, gated), shape, masked});
    return all.back().config;
  };
  add("silu", true, {2, 64}).activation = Activation::kSilu;
  add("gelu_not_gated", false, {3, 37}).activation = Activation::kGelu;
  add("relu2_not_gated", false, {2, 64}).activation = Activation::kRelu2;
  add("drelu", true, {2, 64}).activation = Activation::kDRelu;
  ModelConfig& fatrelu = add("fatrelu", true, {2, 65});
  fatrelu.activation = Activation::kFatRelu;
  fatrelu.activation_threshold = 0.5;
  ModelConfig& scaled = add("minicpm", true, {2, 65});
  scaled.activation = Activation::kFatRelu;
  scaled.activation_threshold = 0.05;
  scaled.embedding_scale = 12.0;
  scaled.depth_scale = 1.4;
  scaled.base_width = 16;
  add("qk_norm", true, {3, 37}).qk_norm = true;
  ModelConfig& biased = add("biases_everywhere", true, {2, 64});
  biased.qkv_bias = biased.o_bias = biased.mlp_bias = true;
  ModelConfig& norm_and_bias = add("biases_norms_not_gated", false, {2, 48});
  norm_and_bias.qkv_bias = norm_and_bias.o_bias = norm_and_bias.mlp_bias = true;
  norm_and_bias.qk_norm = true;
  add("odd_ffn", true, {2, 64}).ffn = 187;
  for (const bool gated : {true, false}) {
    ModelConfig& odd = add(gated ? "odd_biased_ffn" : "odd_biased_ffn_not_gated", gated, {2, 64});
    odd.qkv_bias = odd.o_bias = odd.mlp_bias = true;
    odd.ffn = 187;
  }
  add("odd_ffn_not_gated", false, {2, 64}).ffn = 187;
  add("window", true, {2, 100}).sliding_window = 24;
  ModelConfig& mixed = add("window_of_two_layers", true, {2, 100});
  mixed.sliding_window = 33;
  mixed.full_attention = {false, true, false};
  ModelConfig& documents = add("window_and_documents", true, {3, 150}, true);
  documents.sliding_window = 20;
  documents.full_attention = {true, false, false};
  add("window_everywhere_and_documents", true, {3, 150}, true).sliding_window = 20;
  all[3].config.vocab_size = 331;
  all[4].config.vocab_size = 257;
  all[4].config.qkv_bias = true;
  all[4].config.family = Family::kQwen2;
  return all;
}

// Random weights, rounded to bf16, which the GPU holds. Steady: the residual stream has a constant
// that nothing adds to, on which each gate has a weight so large that a neuron fires always or
// never, whatever the rounding.
std::unique_ptr<Model> rounded_model(Context& ctx, const ModelConfig& config, bool steady) {
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, 3);
  for (const ParamSpec& spec : model->table) {
    for (int64_t i = spec.offset; i < spec.offset + spec.size(); ++i) {
      if (spec.is_vector) model->flat[i] += 0.1f * normal(9, 0, static_cast<uint64_t>(i));
    }
  }
  const auto weights = model_matrices<float>(config, model->flat.data());
  for (const LayerMatrices<float>& layer : weights.layers) {
    if (!steady) break;
    for (int64_t v = 0; v < config.vocab_size; ++v) weights.embedding(v, 0) = 2.0f;
    for (int64_t i = 0; i < layer.w_o.cols; ++i) layer.w_o(0, i) = 0.0f;
    layer.ffn_norm[0] = 1.0f;
    // Products of two large values, which h is here, weigh less.
    const bool large =
        config.activation == Activation::kRelu2 || config.activation == Activation::kDRelu;
    const float small = large ? 0.01f : 0.1f;
    const MatrixF firing = layer.ffn.firing();
    for (int64_t j = 0; j < config.ffn; ++j) {
      // Small, so that the constant stays large beside what the layers add.
      for (int64_t d = 0; d < config.width; ++d) layer.ffn.w_down(j, d) *= d == 0 ? 0.0f : small;
      firing(j, 0) = j % 3 == 0 ? 4.0f : -4.0f;
      if (config.activation == Activation::kDRelu) {
        layer.ffn.w_up(j, 0) = j % 2 == 0 ? 4.0f : -4.0f;
      }
    }
    // Nothing is added to the constant by a bias.
    if (layer.b_o != nullptr) layer.b_o[0] = 0.0f;
    if (layer.ffn.b_down != nullptr) layer.ffn.b_down[0] = 0.0f;
  }
  for (float& weight : model->flat.span()) weight = to_float(to_bf16(weight));
  return model;
}

struct Batch {
  std::vector<int32_t> inputs, targets;
  std::vector<int64_t> documents;  // their lengths, behind a mask
};

Batch random_batch(const Variant& variant, uint64_t seed) {
  const ModelConfig& config = variant.config;
  const MicroBatchShape shape = variant.shape;
  Batch batch;
  const auto vocab = static_cast<uint64_t>(config.vocab_size);
  for (int64_t i = 0; i < shape.sequences * shape.length; ++i) {
    const auto at = static_cast<uint64_t>(i);
    batch.inputs.push_back(static_cast<int32_t>(uniform_below(seed, 0, at, vocab)));
    batch.targets.push_back(static_cast<int32_t>(uniform_below(seed, 1, at, vocab)));
  }
  batch.targets[static_cast<size_t>(shape.length - 1)] = -1;
  for (int64_t token = 0; variant.masked && token < std::ssize(batch.inputs);) {
    const int64_t left = shape.length - token % shape.length;
    const auto wanted =
        static_cast<int64_t>(1 + uniform_below(seed, 2, static_cast<uint64_t>(token), 80));
    batch.documents.push_back(std::min(left, wanted));
    token += batch.documents.back();
  }
  return batch;
}

struct Result {
  std::vector<float> grads;
  CrossEntropySum loss;
  std::vector<FfnTrainCountsCuda> counts;
  std::vector<uint8_t> active;
};

// A model's weights on the device, and what passes over them give.
class Device {
 public:
  Device(const Model& model, MicroBatchShape shape, TrainingPlanCuda plan = {})
      : config_(model.config), tokens_(shape.sequences * shape.length) {
    plan.shape = shape;
    std::vector<BF16> rounded;
    for (const float weight : model.flat.span()) rounded.push_back(to_bf16(weight));
    weights_ = upload(rounded);
    training = std::make_unique<TrainingCuda>(ctx, config_, plan);
  }

  // All layers take this execution from the next pass on.
  void prepare(FfnTrainExecution execution) {
    training->prepare(std::vector<FfnExpectation>(
        static_cast<size_t>(config_.layers), {execution, static_cast<double>(config_.ffn) / 3.0}));
  }
  Result run(const Batch& batch, int64_t step_tokens = 0) {
    return run(std::vector<Batch>{batch}, step_tokens);
  }
  // Micro-batches whose gradients add up.
  Result run(const std::vector<Batch>& batches, int64_t step_tokens = 0) {
    // Written by the first one, whatever was there.
    const auto grads = upload(std::vector<float>(
        static_cast<size_t>(flat_size(parameter_table(config_))), std::nanf("")));
    const auto loss = zeros<CrossEntropySum>(1);
    const auto counts = zeros<FfnTrainCountsCuda>(config_.layers);
    const auto active = zeros<uint8_t>(config_.layers * config_.ffn);
    if (step_tokens == 0) step_tokens = tokens_ * std::ssize(batches);
    const auto l1_scale =
        upload(std::vector<float>{kL1Coeff / static_cast<float>(config_.layers * step_tokens)});
    TrainingPassCuda pass;
    pass.weights = reinterpret_cast<const __nv_bfloat16*>(weights_.data());
    pass.grad_scale = 1.0f / static_cast<float>(step_tokens);
    pass.l1_scale = l1_scale.data();
    pass.grads = grads.data();
    pass.loss = loss.data();
    pass.counts = counts.data();
    pass.active = active.data();
    if (change_pass) change_pass(pass);
    for (const Batch& batch : batches) {
      training->stage(batch.inputs, batch.targets, batch.documents);
      pass.add = &batch != &batches.front();
      training->forward_backward(pass);
    }
    stream.synchronize();
    return {download(grads), download(loss)[0], download(counts), download(active)};
  }
  CrossEntropySum evaluate(const Batch& batch) {
    const auto loss = zeros<CrossEntropySum>(1);
    TrainingPassCuda pass;
    pass.weights = reinterpret_cast<const __nv_bfloat16*>(weights_.data());
    pass.loss = loss.data();
    training->stage(batch.inputs, batch.targets, batch.documents);
    training->evaluate(pass);
    stream.synchronize();
    return download(loss)[0];
  }

  CudaStream stream;
  CudaContext ctx{stream.get()};
  std::unique_ptr<TrainingCuda> training;
  std::function<void(TrainingPassCuda&)> change_pass;

 private:
  template <typename T>
  static DeviceBuffer<T> zeros(int64_t n) {
    return upload(std::vector<T>(static_cast<size_t>(n)));
  }
  ModelConfig config_;
  int64_t tokens_;
  DeviceBuffer<BF16> weights_;
};

struct Reference {
  Buffer<float> grads;
  TrainingResult result;
  std::vector<std::vector<uint8_t>> active;
};

Reference on_cpu(Context& ctx, const Model& model, const Batch& batch, MicroBatchShape shape) {
  Reference out;
  out.grads = Buffer<float>(model.flat.size());
  out.active.assign(static_cast<size_t>(model.config.layers),
                    std::vector<uint8_t>(static_cast<size_t>(model.config.ffn)));
  TrainingState state(model.config, shape);
  TrainingBatch problem;
  problem.inputs = batch.inputs;
  problem.targets = batch.targets;
  problem.documents = batch.documents;
  problem.step_tokens = std::ssize(batch.inputs);
  problem.l1_coeff = kL1Coeff;
  problem.policy = FfnTrainPolicy::kDense;
  problem.active = &out.active;
  out.result = forward_backward(ctx, model, problem, state, out.grads.span());
  return out;
}

// Relative error, in norm, of a value behind all layers: a layer rounds to bf16 in about ten
// places, each a relative 2^-9 at most; errors of different places are independent.
double rounding(const ModelConfig& config) {
  return std::ldexp(std::sqrt(10.0 * static_cast<double>(config.layers) + 2.0), -9);
}

class TrainingCudaTest : public testing::TestWithParam<Variant> {
 public:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    const std::string why = cuda_training_unsupported(GetParam().config, GetParam().shape.length);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  // Those that this GPU has for the model's layers.
  static std::vector<FfnTrainExecution> executions() {
    const auto& [name, config, shape, masked] = GetParam();
    const CudaStream stream;
    CudaContext ctx(stream.get());
    std::vector<FfnTrainExecution> all = {FfnTrainExecution::kDense};
    if (ffn_train_hybrid_unsupported(ctx, {.max_tokens = shape.sequences * shape.length,
                                           .width = config.width,
                                           .ffn = config.ffn,
                                           .gated = config.gated,
                                           .biased = config.mlp_bias,
                                           .activation = config.activation})
            .empty()) {
      all.push_back(FfnTrainExecution::kHybrid);
    }
    return all;
  }
  // Each parameter's gradient within `tolerance` of its norm. What is nearly nothing, because terms
  // cancel (keys' biases), is held to a tenth of the mean size instead.
  static void expect_gradients(const Model& model, const std::vector<float>& got,
                               std::span<const float> want, double tolerance) {
    double all = 0.0;
    for (const float value : want) all += std::pow(static_cast<double>(value), 2.0);
    const double mean_square = all / static_cast<double>(want.size());
    for (const ParamSpec& spec : model.table) {
      double error = 0.0, norm = 0.0;
      for (auto i = static_cast<size_t>(spec.offset);
           i < static_cast<size_t>(spec.offset + spec.size()); ++i) {
        error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2.0);
        norm += std::pow(static_cast<double>(want[i]), 2.0);
      }
      norm += 0.01 * mean_square * static_cast<double>(spec.size());
      EXPECT_LE(std::sqrt(error / norm), tolerance) << spec.name;
    }
  }
  Context cpu_{2};
};

// Backward rounds as often as forward, and twice that is allowed.
TEST_P(TrainingCudaTest, GradientsAreTheCpusWhereNoNeuronIsAtItsKink) {
  const auto& [name, config, shape, masked] = GetParam();
  const auto model = rounded_model(cpu_, config, /*steady=*/true);
  const Batch batch = random_batch(GetParam(), 1);
  const Reference want = on_cpu(cpu_, *model, batch, shape);
  Device device(*model, shape, {.document_mask = masked});
  const double tolerance = 2.0 * std::numbers::sqrt2 * rounding(config);
  for (const FfnTrainExecution execution : executions()) {
    device.prepare(execution);
    const Result got = device.run(batch);
    EXPECT_EQ(got.loss.tokens, want.result.loss_tokens);
    EXPECT_NEAR(got.loss.loss_sum, want.result.loss_sum, tolerance * want.result.loss_sum);
    expect_gradients(*model, got.grads, want.grads.span(), tolerance);
    for (size_t layer = 0; layer < want.active.size(); ++layer) {
      const FfnTrainStats& stats = want.result.layers[layer];
      EXPECT_EQ(got.counts[layer].tokens, static_cast<unsigned long long>(stats.tokens));
      if (leaves_zeros(config.activation)) {
        EXPECT_EQ(got.counts[layer].nnz, static_cast<unsigned long long>(stats.nnz));
        EXPECT_EQ(got.counts[layer].max_row_nnz, stats.max_row_nnz);
      }
      EXPECT_NEAR(got.counts[layer].l1_sum, stats.l1_sum, tolerance * stats.l1_sum);
      const uint8_t* active = got.active.data() + static_cast<int64_t>(layer) * config.ffn;
      EXPECT_EQ(std::vector<uint8_t>(active, active + config.ffn), want.active[layer]);
    }
    EXPECT_NEAR(device.evaluate(batch).loss_sum, got.loss.loss_sum, 1e-6 * got.loss.loss_sum);
  }
}

// A gate of a normal distribution that carries a relative error e changes its sign on a share
// e / pi of all tokens; a gradient that is then there or not is lost whole, beside half of all.
TEST_P(TrainingCudaTest, GradientsOfRandomWeightsAreTheCpusButForFlippedNeurons) {
  const auto& [name, config, shape, masked] = GetParam();
  const auto model = rounded_model(cpu_, config, /*steady=*/false);
  const Batch batch = random_batch(GetParam(), 2);
  const Reference want = on_cpu(cpu_, *model, batch, shape);
  Device device(*model, shape, {.document_mask = masked});
  const Result got = device.run(batch);
  const double e = rounding(config);
  expect_gradients(*model, got.grads, want.grads.span(),
                   2.0 * std::sqrt(2.0 * e * e + 2.0 * e / std::numbers::pi));
}

TEST_P(TrainingCudaTest, RepeatsBitForBitAndWhateverIsKept) {
  const auto& [name, config, shape, masked] = GetParam();
  const auto model = rounded_model(cpu_, config, false);
  const Batch batch = random_batch(GetParam(), 3), other = random_batch(GetParam(), 4);
  for (const FfnTrainExecution execution : executions()) {
    SCOPED_TRACE(execution == FfnTrainExecution::kHybrid ? "hybrid" : "dense");
    Device device(*model, shape, {.document_mask = masked});
    device.prepare(execution);
    const Result first = device.run(batch);
    device.run(other);
    device.evaluate(other);
    EXPECT_EQ(device.run(batch).grads, first.grads);
    for (const RecomputeLevel level :
         {RecomputeLevel::kNorms, RecomputeLevel::kInputs, RecomputeLevel::kQkv}) {
      for (const int64_t layers : {int64_t{1}, config.layers}) {
        Device again(*model, shape, {.recompute = {level, layers}, .document_mask = masked});
        again.prepare(execution);
        EXPECT_EQ(again.run(batch).grads, first.grads);
      }
    }
  }
}

TEST_P(TrainingCudaTest, MicroBatchesAddUp) {
  const auto& [name, config, shape, masked] = GetParam();
  const auto model = rounded_model(cpu_, config, true);
  const Batch a = random_batch(GetParam(), 5), b = random_batch(GetParam(), 6);
  Batch both = a;
  both.inputs.insert(both.inputs.end(), b.inputs.begin(), b.inputs.end());
  both.targets.insert(both.targets.end(), b.targets.begin(), b.targets.end());
  both.documents.insert(both.documents.end(), b.documents.begin(), b.documents.end());
  const Result parts =
      Device(*model, shape, {.document_mask = masked}).run(std::vector<Batch>{a, b});
  const Result whole =
      Device(*model, {2 * shape.sequences, shape.length}, {.document_mask = masked}).run(both);
  EXPECT_EQ(parts.loss.tokens, whole.loss.tokens);
  EXPECT_NEAR(parts.loss.loss_sum, whole.loss.loss_sum, 1e-3 * whole.loss.loss_sum);
  expect_gradients(*model, parts.grads, whole.grads, 2.0 * rounding(config));
}

// What training options ask for, against the CPU: a blend with ReLU, and a teacher.
TEST(TrainingCudaOptions, BlendsAndDistillsAsTheCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  Variant variant{"options", small_config(4, 2, 16, true, true), {2, 64}};
  if (const std::string why = cuda_training_unsupported(variant.config, 64); !why.empty()) {
    GTEST_SKIP() << why;
  }
  Context cpu(2);
  const auto model = rounded_model(cpu, variant.config, /*steady=*/true);
  const Batch batch = random_batch(variant, 1);
  constexpr int64_t kTeacherWidth = 40;
  const int64_t tokens = variant.shape.tokens();
  const auto teacher_x = random_bf16(tokens * kTeacherWidth, 31, 1.0f),
             teacher_head = random_bf16(variant.config.vocab_size * kTeacherWidth, 32, 0.3f);
  const std::vector<float> hidden = to_floats(teacher_x), head = to_floats(teacher_head);
  const auto device_hidden = upload(teacher_x), device_head = upload(teacher_head);
  for (const float share : {0.0f, 0.4f}) {
    for (const std::optional<float> relu : {std::optional<float>(), std::optional(0.25f)}) {
      if (share == 0.0f && !relu) continue;
      SCOPED_TRACE(testing::Message() << "share " << share << ", ReLU " << relu.value_or(1.0f));
      Buffer<float> want(variant.config.parameter_count());
      TrainingState state(variant.config, variant.shape);
      TrainingBatch problem;
      problem.inputs = batch.inputs;
      problem.targets = batch.targets;
      problem.step_tokens = tokens;
      problem.l1_coeff = kL1Coeff;
      problem.policy = FfnTrainPolicy::kDense;
      if (relu) problem.activation = {Activation::kSilu, *relu};
      if (share > 0.0f) {
        problem.teacher_hidden = ConstMatrixF(hidden.data(), tokens, kTeacherWidth);
        problem.teacher_head = ConstMatrixF(head.data(), variant.config.vocab_size, kTeacherWidth);
        problem.teacher_share = share;
      }
      const TrainingResult expected = forward_backward(cpu, *model, problem, state, want.span());
      Device device(*model, variant.shape, {.distills = share > 0.0f});
      const auto relu_share = upload(std::vector<float>{relu.value_or(1.0f)});
      device.change_pass = [&](TrainingPassCuda& pass) {
        if (relu) {
          pass.activation = Activation::kSilu;
          pass.relu_share = relu_share.data();
        }
        if (share > 0.0f) {
          pass.teacher = {.x = device_hidden.data(),
                          .weight = device_head.data(),
                          .width = kTeacherWidth,
                          .share = share};
        }
      };
      const Result got = device.run(batch);
      const double tolerance = 2.0 * std::numbers::sqrt2 * rounding(variant.config);
      EXPECT_NEAR(got.loss.loss_sum, expected.loss_sum, tolerance * expected.loss_sum);
      EXPECT_NEAR(got.loss.kl_sum, expected.kl_sum, tolerance * expected.kl_sum);
      TrainingCudaTest::expect_gradients(*model, got.grads, want.span(), tolerance);
      EXPECT_EQ(device.run(batch).grads, got.grads);
    }
  }
}

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

INSTANTIATE_TEST_SUITE_P(Models, TrainingCudaTest, testing::ValuesIn(variants()),
                         [](const auto& variant) { return std::string(variant.param.name); });

TEST(TrainingCudaPlan, IsWhatAPassTakes) {
  TWELL_SKIP_WITHOUT_GPU();
  ModelConfig config = preset_config("0.5b");
  config.layers = 2;
  const MicroBatchShape shape{4, 1024};
  Context cpu(2);
  Model model(config);
  init_weights(cpu, model, 1);
  const auto free_now = [] {
    size_t free = 0, total = 0;
    TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<double>(free);
  };
  const Batch batch = random_batch({"plan", config, shape}, 1);
  // The first one loads kernels and libraries, which are not the plan's.
  auto warm_up = std::make_unique<Device>(model, shape);
  warm_up->run(batch);
  warm_up.reset();
  const double weights = static_cast<double>(config.parameter_count() * 2);
  double taken = 0.0, planned = 0.0;
  const auto as_planned = [&] {
    return planned > 0.0 && taken <= 1.02 * planned && taken >= 0.75 * planned;
  };
  // Other programs on the same GPU may take or give back memory meanwhile, but not every time.
  for (int attempt = 0; attempt < 5 && !as_planned(); ++attempt) {
    const double before = free_now();
    Device device(model, shape);
    device.run(batch);  // gives its gradients back
    taken = before - free_now() - weights;
    planned = 0.0;
    for (const MemoryItem& item : TrainingCuda::memory_plan(device.ctx, config, {.shape = shape})) {
      planned += static_cast<double>(item.bytes);
    }
  }
  EXPECT_LE(taken, 1.02 * planned);
  EXPECT_GE(taken, 0.75 * planned);
}

TEST(TrainingCudaRefusals, NameTheReason) {
  TWELL_SKIP_WITHOUT_GPU();
  ModelConfig config = small_config(4, 4, 16, true, true);
  EXPECT_THAT(cuda_training_unsupported(config, 1), testing::HasSubstr("at least 2"));
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto huge = [&] { TrainingCuda(ctx, preset_config("2b"), {.shape = {512, 2048}}); };
  EXPECT_THAT(huge, testing::ThrowsMessage<InputError>(testing::HasSubstr("GiB")));
}

}  // namespace
}  // namespace twell
