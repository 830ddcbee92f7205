// SPDX-License-Identifier: Apache-2.0
// Checkpoints of every family, saved by transformers, against its logits. Golden values:
// golden/make_family_golden.py.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/model/forward.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

constexpr int64_t kLengths[] = {1, 7, 33};

std::filesystem::path families() {
  return std::filesystem::path(TWELL_SOURCE_DIR) / "tests" / "golden" / "families";
}

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& info = file.tensor(name);
  std::vector<T> out(info.bytes.size() / sizeof(T));
  std::memcpy(out.data(), info.bytes.data(), info.bytes.size());
  return out;
}

class FamilyGolden : public ::testing::TestWithParam<const char*> {
 protected:
  // transformers computes rotation angles in float32: position * frequency has a relative error of
  // up to eps, which rotates queries and keys by that angle.
  double tolerance(int64_t length) const {
    return float_tolerance(model_->config) + static_cast<double>(length) * 0x1p-23;
  }
  // Logits [T, V] of ids that are fed in pieces through a cache.
  Buffer<float> logits_of(std::span<const int32_t> ids, std::span<const int64_t> pieces) {
    ForwardState state(model_->config, FfnPolicy::kAuto);
    KvCache cache(model_->config, 1, std::ssize(ids));
    const Buffer<float> hidden(std::ssize(ids) * model_->config.width);
    Buffer<float> out(std::ssize(ids) * model_->config.vocab_size);
    int64_t begin = 0;
    for (const int64_t tokens : pieces) {
      const ForwardSequence sequence{.tokens = tokens};
      forward(ctx_, *model_, state,
              {.ids = ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(tokens)),
               .sequences = {&sequence, 1},
               .cache = &cache,
               .hidden =
                   hidden.matrix(std::ssize(ids), model_->config.width).slice_rows(begin, tokens)});
      begin += tokens;
    }
    logits(ctx_, *model_, hidden.matrix(std::ssize(ids), model_->config.width),
           out.matrix(std::ssize(ids), model_->config.vocab_size));
    return out;
  }

  const std::filesystem::path folder_ = families() / GetParam();
  const SafetensorsFile golden_{folder_ / "golden.safetensors"};
  Context ctx_{2};
  const std::unique_ptr<Model> model_ = load_model(ctx_, folder_);
};

TEST_P(FamilyGolden, LogitsOfTransformers) {
  for (const int64_t length : kLengths) {
    const auto ids = values<int32_t>(golden_, fmt::format("ids.{}", length));
    const auto expected = values<float>(golden_, fmt::format("logits.{}", length));
    const int64_t whole[] = {length};
    const Buffer<float> at_once = logits_of(ids, whole);
    EXPECT_LE(relative_error(at_once.span(), std::span(expected)), tolerance(length)) << length;
    if (length < 7) continue;
    const int64_t pieces[] = {4, 1, length - 6, 1};
    const Buffer<float> decoded = logits_of(ids, pieces);
    EXPECT_LE(relative_error(decoded.span(), std::span(expected)), tolerance(length)) << length;
  }
}

// The double-precision reference of the gradient checks gives the same logits. The tolerance is
// that of float32, in which transformers computes norms, softmax and rotations of a double model.
TEST_P(FamilyGolden, ReferenceModelAgrees) {
  const auto ids = values<int32_t>(golden_, "ids.33");
  const auto expected = values<float>(golden_, "logits.33");
  const ReferenceResult reference = ReferenceModel(*model_).run(ids, {}, 33);
  EXPECT_LE(relative_error(std::span(reference.logits), std::span(expected)), tolerance(33));
}

INSTANTIATE_TEST_SUITE_P(Variants, FamilyGolden,
                         ::testing::Values("llama3", "llama_linear", "llama_dynamic", "llama_yarn",
                                           "smollm2", "mistral", "qwen2", "qwen3", "llama_sparse",
                                           "qwen2_sparse"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace twell
