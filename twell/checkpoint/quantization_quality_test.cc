// SPDX-License-Identifier: Apache-2.0
// What 8 bits with a scale per output do to a model's final hidden states, with outlier columns, as
// large language models have: a few inputs of each projection whose weights are many times as large
// as all others.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/convert.h"
#include "twell/model/forward.h"

namespace twell {
namespace {

constexpr float kOutlier = 32.0f;  // a power of two, so that factors that cancel are exact

bool is_outlier(int64_t column) { return column % 41 == 7; }  // 3 of 128

ModelConfig quality_config() {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 64;
  config.width = 128;
  config.ffn = 256;
  config.layers = 3;
  config.heads = config.kv_heads = 4;
  config.head_dim = 32;
  config.init_std = 0.09;
  return config;
}

enum class Outliers { kNone, kWeights };

class QuantisedQualityTest : public testing::Test {
 protected:
  // Outlier weights are undone by the norm in front, so that the model computes what it does
  // without.
  Model make(Outliers outliers) {
    Model model(quality_config());
    init_weights(ctx_, model, 5);
    for (const ParamSpec& spec : model.table) {
      const bool norm = spec.is_vector && spec.name.starts_with("model.layers.");
      const bool behind_norm = spec.name.find("q_proj") != std::string::npos ||
                               spec.name.find("k_proj") != std::string::npos ||
                               spec.name.find("v_proj") != std::string::npos ||
                               spec.name.find("gate_proj") != std::string::npos ||
                               spec.name.find("up_proj") != std::string::npos;
      float factor = 1.0f;
      if (norm && outliers == Outliers::kWeights) factor = 1.0f / kOutlier;
      if (behind_norm && outliers == Outliers::kWeights) factor = kOutlier;
      for (int64_t i = 0; i < spec.size(); ++i) {
        if (is_outlier(i % spec.cols)) model.flat[spec.offset + i] *= factor;
      }
    }
    return model;
  }

  std::vector<float> hidden(const ModelView& model) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 48; ++i) ids.push_back(i * 11 % 64);
    ForwardState state(model.config, FfnPolicy::kDense);
    std::vector<float> out(ids.size() * 128);
    forward(ctx_, model, state,
            {.ids = ids,
             .sequences = {{{std::ssize(ids), 0}}},
             .hidden = MatrixF(out.data(), std::ssize(ids), 128)});
    return out;
  }

  // The relative error of the hidden states in 8 bits.
  double error(Outliers outliers, ByteType type) {
    const TempFolder folder;
    std::filesystem::create_directory(folder.path() / "wide");
    const Model model = make(outliers);
    save_model(model, folder.path() / "wide", DType::kF32);
    convert_checkpoint(folder.path() / "wide", folder.path() / "bytes", {.weights = type});
    const std::vector<float> want = hidden(model);
    const std::vector<float> got = hidden(*load_model(ctx_, folder.path() / "bytes"));
    double sum = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      sum += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      size += double{want[i]} * want[i];
    }
    return std::sqrt(sum / size);
  }

  Context ctx_{2};
};

// An outlier weight makes its row's steps larger. e4m3 has steps relative to each value, so that it
// loses nothing; int8 has one step for all. Dividing the columns by a power of two that the norm in
// front takes over gives int8 what it has without outliers: that is kNone.
TEST_F(QuantisedQualityTest, OutlierWeightsCostInt8AndNotE4M3) {
  const double fp8 = error(Outliers::kNone, ByteType::kE4M3);
  EXPECT_LT(error(Outliers::kWeights, ByteType::kE4M3), 1.5 * fp8);
  const double int8 = error(Outliers::kNone, ByteType::kInt8);
  const double int8_outliers = error(Outliers::kWeights, ByteType::kInt8);
  EXPECT_GT(int8_outliers, 3.0 * int8);
  EXPECT_LT(int8_outliers, kOutlier * int8);
  printf("relative error: fp8 %.4f, with outliers %.4f; int8 %.4f, with outliers %.4f\n", fp8,
         error(Outliers::kWeights, ByteType::kE4M3), int8, int8_outliers);
}

}  // namespace
}  // namespace twell
