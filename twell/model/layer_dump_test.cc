// SPDX-License-Identifier: Apache-2.0
// The stages of a dumped layer against the layer's definition, computed from one stage to the next.
#include "twell/model/layer_dump.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/error.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

ModelConfig dumped_config(bool gated) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 19;
  config.width = 16;
  config.ffn = 40;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 10;
  config.context = 24;
  config.gated = gated;
  config.init_std = 0.2;
  return config;
}

const std::vector<float>& stage(const LayerDump& dump, const std::string& name) {
  for (const DumpedStage& stage : dump.stages) {
    if (stage.name == name) return stage.values;
  }
  throw Error("no stage " + name);
}

// x [M, cols] w^T, w [rows, cols].
std::vector<float> product(const std::vector<float>& x, const float* w, int64_t rows,
                           int64_t cols) {
  std::vector<float> y;
  for (size_t m = 0; m < x.size(); m += static_cast<size_t>(cols)) {
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0.0;
      for (int64_t c = 0; c < cols; ++c) {
        sum += double{x[m + static_cast<size_t>(c)]} * double{w[r * cols + c]};
      }
      y.push_back(static_cast<float>(sum));
    }
  }
  return y;
}

std::vector<float> normed(const std::vector<float>& x, const float* weight, int64_t width,
                          double eps) {
  std::vector<float> y = x;
  for (size_t m = 0; m < x.size(); m += static_cast<size_t>(width)) {
    double sum = 0.0;
    for (size_t c = m; c < m + static_cast<size_t>(width); ++c) sum += double{x[c]} * double{x[c]};
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (size_t c = 0; c < static_cast<size_t>(width); ++c) {
      y[m + c] = static_cast<float>(x[m + c] * scale * double{weight[c]});
    }
  }
  return y;
}

std::vector<float> sum_of(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

const std::vector<int32_t> kIds = {3, 1, 4, 1, 5, 9, 2};

TEST(LayerDump, EveryStageFollowsFromTheOneBefore) {
  constexpr double kTolerance = 1e-5;
  for (const bool gated : {true, false}) {
    for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kRowFused}) {
      const ModelConfig config = dumped_config(gated);
      const Model model = sparse_model(config, 1, 1.0f);
      Context ctx(2);
      const LayerDump dump = dump_layer(ctx, model, kIds, 1, policy);
      EXPECT_EQ(dump.execution, policy == FfnPolicy::kDense ? "dense" : "row-fused");
      const LayerMatrices<const float> w =
          model_matrices<const float>(config, model.flat.data()).layers[1];
      const auto expect = [&](const char* name, const std::vector<float>& wanted) {
        EXPECT_LT(relative_difference(stage(dump, name), wanted), kTolerance) << name;
      };
      const std::vector<float>& x = stage(dump, "ffn_norm");
      expect("attention_norm",
             normed(stage(dump, "input"), w.attention_norm, config.width, config.norm_eps));
      expect("after_attention",
             sum_of(product(stage(dump, "attention"), w.w_o.data, config.width, config.q_width()),
                    stage(dump, "input")));
      expect("ffn_norm",
             normed(stage(dump, "after_attention"), w.ffn_norm, config.width, config.norm_eps));
      expect("up", product(x, w.ffn.w_up.data, config.ffn, config.width));
      std::vector<float> gate =
          gated ? product(x, w.ffn.w_gate.data, config.ffn, config.width) : stage(dump, "up");
      for (float& value : gate) value = std::max(value, 0.0f);
      std::vector<float> hidden = gate;
      if (gated) {
        expect("gate", gate);
        for (size_t i = 0; i < hidden.size(); ++i) hidden[i] *= stage(dump, "up")[i];
      }
      expect("hidden", hidden);
      // w_down [F, D] has a neuron per row.
      std::vector<float> y(static_cast<size_t>(std::ssize(kIds) * config.width));
      for (size_t m = 0; m < kIds.size(); ++m) {
        for (size_t n = 0; n < static_cast<size_t>(config.ffn); ++n) {
          for (size_t c = 0; c < static_cast<size_t>(config.width); ++c) {
            y[m * static_cast<size_t>(config.width) + c] +=
                hidden[m * static_cast<size_t>(config.ffn) + n] *
                w.ffn.w_down.data[n * static_cast<size_t>(config.width) + c];
          }
        }
      }
      expect("ffn", y);
      expect("output", sum_of(stage(dump, "after_attention"), stage(dump, "ffn")));
    }
  }
}

TEST(LayerDump, TheOutputOfALayerIsTheInputOfTheNext) {
  const Model model = sparse_model(dumped_config(true), 1, 1.0f);
  Context ctx(2);
  const LayerDump first = dump_layer(ctx, model, kIds, 0, FfnPolicy::kDense);
  const LayerDump second = dump_layer(ctx, model, kIds, 1, FfnPolicy::kDense);
  EXPECT_EQ(stage(first, "output"), stage(second, "input"));
  EXPECT_NE(stage(first, "input"), stage(second, "input"));
}

TEST(LayerDump, WrongLayersAndPromptsAreRefused) {
  const ModelConfig config = dumped_config(true);
  const auto message = [&](const std::vector<int32_t>& ids, int64_t layer) -> std::string {
    try {
      check_layer_dump(config, ids, layer);
    } catch (const InputError& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_EQ(message(kIds, 2), "");
  EXPECT_THAT(message(kIds, 3), testing::HasSubstr("layer 3 of a model with layers 0 to 2"));
  EXPECT_THAT(message(kIds, -1), testing::HasSubstr("layer -1"));
  EXPECT_THAT(message({}, 0), testing::HasSubstr("empty"));
  EXPECT_THAT(message(std::vector<int32_t>(25, 1), 0), testing::HasSubstr("25 tokens"));
  EXPECT_THAT(message({19}, 0), testing::HasSubstr("token id 19"));
}

TEST(LayerDump, DifferencesAreRelativeToTheSecond) {
  EXPECT_EQ(relative_difference(std::vector<float>{0, 0}, std::vector<float>{0, 0}), 0.0);
  EXPECT_DOUBLE_EQ(relative_difference(std::vector<float>{3, 5}, std::vector<float>{3, 4}), 0.2);
  EXPECT_FALSE(relative_difference(std::vector<float>{NAN}, std::vector<float>{1}) <= 1e6);
}

}  // namespace
}  // namespace twell
