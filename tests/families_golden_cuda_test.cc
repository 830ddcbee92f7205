// SPDX-License-Identifier: Apache-2.0
// Checkpoints of every family on the GPU, against transformers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/family_golden.h"
#include "twell/base/cuda_gtest.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/model/forward_cuda.h"

namespace twell {
namespace {

class FamilyGoldenCuda : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    const std::string why = cuda_model_unsupported(load_config(folder_));
    if (!why.empty()) GTEST_SKIP() << why;
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    model_ = load_model_cuda(*ctx_, folder_, 0);
  }

  // Logits [T, V] of ids that are fed in pieces, through a cache or all at once without one.
  std::vector<float> logits_of(std::span<const int32_t> ids, std::span<const int64_t> pieces,
                               bool cached) {
    const ModelConfig& config = model_->config();
    ForwardCuda forward(
        *ctx_, *model_,
        {.max_tokens = std::ssize(ids), .max_sequences = 1, .max_length = std::ssize(ids)});
    KvCacheCuda cache(config, 1, std::ssize(ids));
    std::vector<float> out;
    size_t begin = 0;
    for (const int64_t tokens : pieces) {
      const ForwardSequence sequence{.tokens = tokens};
      forward.run(ids.subspan(begin, static_cast<size_t>(tokens)), {&sequence, 1},
                  cached ? &cache : nullptr);
      const auto values = poisoned<float>(tokens * config.vocab_size);
      forward.logits(forward.hidden(), tokens, values.data());
      stream_->synchronize();
      const std::vector<float> piece = download(values);
      out.insert(out.end(), piece.begin(), piece.end());
      begin += static_cast<size_t>(tokens);
    }
    return out;
  }

  // The bound is that of forward_cuda_test.cc, twice ten independent roundings of a relative 2^-9
  // per layer; weights that are stored in f16 or f32 are rounded as often again.
  double tolerance() const {
    const double layers = static_cast<double>(model_->config().layers);
    return 2.0 * std::ldexp(std::sqrt(20.0 * layers + 4.0), -9);
  }
  // The root mean square of a row's logits less their mean, which softmax ignores, times the
  // tolerance.
  double error_of_row(std::span<const float> row) const {
    double mean = 0.0, squares = 0.0;
    for (const float value : row) mean += static_cast<double>(value);
    mean /= static_cast<double>(row.size());
    for (const float value : row) {
      squares += (static_cast<double>(value) - mean) * (static_cast<double>(value) - mean);
    }
    return tolerance() * std::sqrt(squares / static_cast<double>(row.size()));
  }

  const std::filesystem::path folder_ = golden_family(GetParam());
  const SafetensorsFile golden_{folder_ / "golden.safetensors"};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<ModelCuda> model_;
};

TEST_P(FamilyGoldenCuda, LogitsAndCrossEntropyOfTransformers) {
  for (const int64_t length : kGoldenLengths) {
    const auto ids = golden_values<int32_t>(golden_, fmt::format("ids.{}", length));
    const auto expected = golden_values<float>(golden_, fmt::format("logits.{}", length));
    std::vector<std::vector<int64_t>> ways = {{length}};
    if (length >= 7) ways.push_back({4, 1, length - 6, 1});
    for (const auto& pieces : ways) {
      const std::vector<float> got = logits_of(ids, pieces, /*cached=*/pieces.size() > 1);
      double error = 0.0, size = 0.0;
      for (size_t i = 0; i < got.size(); ++i) {
        const double difference = static_cast<double>(got[i]) - static_cast<double>(expected[i]);
        error += difference * difference;
        size += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
      }
      EXPECT_LE(std::sqrt(error), tolerance() * std::sqrt(size)) << length;
      if (length < 33) continue;
      const double entropy = golden_values<double>(golden_, "cross_entropy").at(0);
      EXPECT_NEAR(golden_cross_entropy(got, ids), entropy, tolerance() * entropy);
    }
  }
}

// transformers' text is fed token after token up to the end of the context, past every window. The
// most likely token is the same wherever it leads the second by more than the error of both.
TEST_P(FamilyGoldenCuda, GreedyTextOfTransformers) {
  const auto text = golden_values<int32_t>(golden_, "greedy");
  std::vector<int64_t> pieces = {kGoldenPrompt};
  pieces.resize(text.size() + 1 - kGoldenPrompt, 1);
  const std::vector<float> logits = logits_of(text, pieces, /*cached=*/true);
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  for (size_t t = kGoldenPrompt; t < text.size(); ++t) {
    const auto row = std::span(logits).subspan((t - 1) * vocab, vocab);
    const float expected = row[static_cast<size_t>(text[t])];
    float best_other = -std::numeric_limits<float>::infinity();
    for (size_t v = 0; v < vocab; ++v) {
      if (v != static_cast<size_t>(text[t])) best_other = std::max(best_other, row[v]);
    }
    EXPECT_GT(expected, best_other - 3.0 * error_of_row(row)) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, FamilyGoldenCuda, ::testing::ValuesIn(kGoldenFamilies),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace twell
