// SPDX-License-Identifier: Apache-2.0
// Checkpoints of every family on the CPU, against transformers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/family_golden.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/model/forward.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

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

  const std::filesystem::path folder_ = golden_family(GetParam());
  const SafetensorsFile golden_{folder_ / "golden.safetensors"};
  Context ctx_{2};
  const std::unique_ptr<Model> model_ = load_model(ctx_, folder_);
};

TEST_P(FamilyGolden, LogitsOfTransformers) {
  for (const int64_t length : kGoldenLengths) {
    const auto ids = golden_values<int32_t>(golden_, fmt::format("ids.{}", length));
    const auto expected = golden_values<float>(golden_, fmt::format("logits.{}", length));
    const int64_t whole[] = {length};
    const Buffer<float> at_once = logits_of(ids, whole);
    EXPECT_LE(relative_error(at_once.span(), std::span(expected)), tolerance(length)) << length;
    if (length < 7) continue;
    const int64_t pieces[] = {4, 1, length - 6, 1};
    const Buffer<float> decoded = logits_of(ids, pieces);
    EXPECT_LE(relative_error(decoded.span(), std::span(expected)), tolerance(length)) << length;
  }
}

TEST_P(FamilyGolden, CrossEntropyOfTransformers) {
  const auto ids = golden_values<int32_t>(golden_, "ids.33");
  const int64_t whole[] = {33};
  const Buffer<float> logits = logits_of(ids, whole);
  const double expected = golden_values<double>(golden_, "cross_entropy").at(0);
  EXPECT_NEAR(golden_cross_entropy(logits.span(), ids), expected, tolerance(33) * expected);
}

// Token after token through the cache up to the end of the context, past every window.
TEST_P(FamilyGolden, GreedyTextOfTransformers) {
  const auto text = golden_values<int32_t>(golden_, "greedy");
  ASSERT_EQ(std::ssize(text), model_->config.context);
  std::vector<int64_t> pieces = {kGoldenPrompt};
  pieces.resize(text.size() + 1 - kGoldenPrompt, 1);
  const Buffer<float> logits = logits_of(text, pieces);
  const auto vocab = static_cast<size_t>(model_->config.vocab_size);
  for (size_t t = kGoldenPrompt; t < text.size(); ++t) {
    EXPECT_EQ(most_likely(logits.span().subspan((t - 1) * vocab, vocab)), text[t]) << t;
  }
}

// Any FFN width, biases, windows and tensors of mixed types.
TEST_P(FamilyGolden, IsSavedAsItWasLoaded) {
  const TempFolder folder;
  save_model(*model_, folder.path(), DType::kF32);
  const std::unique_ptr<Model> again = load_model(ctx_, folder.path());
  EXPECT_EQ(again->config, model_->config);
  const auto bytes = static_cast<size_t>(model_->flat.size()) * sizeof(float);
  EXPECT_EQ(std::memcmp(again->flat.data(), model_->flat.data(), bytes), 0);
  const CheckpointTensors loaded(folder_), saved(folder.path());
  for (const TensorInfo* tensor : saved.all()) {
    EXPECT_EQ(tensor->shape, loaded.find(tensor->name)->shape) << tensor->name;
  }
}

// The double-precision reference of the gradient checks gives the same logits. The tolerance is
// that of float32, in which transformers computes norms, softmax and rotations of a double model.
TEST_P(FamilyGolden, ReferenceModelAgrees) {
  const auto ids = golden_values<int32_t>(golden_, "ids.33");
  const auto expected = golden_values<float>(golden_, "logits.33");
  const ReferenceResult reference = ReferenceModel(*model_).run(ids, {}, 33);
  EXPECT_LE(relative_error(std::span(reference.logits), std::span(expected)), tolerance(33));
}

INSTANTIATE_TEST_SUITE_P(Variants, FamilyGolden, ::testing::ValuesIn(kGoldenFamilies),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace twell
