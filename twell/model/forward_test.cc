// SPDX-License-Identifier: Apache-2.0
#include "twell/model/forward.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

ModelConfig small_config(bool gated, bool tied) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 19;
  config.width = 16;
  config.ffn = 40;
  config.layers = 3;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 10;
  config.context = 24;
  config.gated = gated;
  config.tied_embeddings = tied;
  config.init_std = 0.2;
  return config;
}

std::vector<int32_t> random_ids(int64_t count, uint64_t seed) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(uniform_below(seed, 0, static_cast<uint64_t>(i), 19)));
  }
  return ids;
}

// Logits and non-zeros of one call whose output memory held NaN before.
struct Outcome {
  Outcome(Context& ctx, const Model& model, ForwardState& state, std::span<const int32_t> ids,
          std::span<const ForwardSequence> sequences, KvCache* cache = nullptr)
      : vocab(model.config.vocab_size),
        hidden(std::ssize(ids) * model.config.width),
        logit_values(std::ssize(ids) * vocab) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(hidden.data(), hidden.size(), kNan);
    std::fill_n(logit_values.data(), logit_values.size(), kNan);
    const MatrixF hidden_matrix = hidden.matrix(std::ssize(ids), model.config.width);
    forward(ctx, model, state,
            {.ids = ids,
             .sequences = sequences,
             .cache = cache,
             .hidden = hidden_matrix,
             .row_nnz = &row_nnz});
    logits(ctx, model, hidden_matrix, logit_values.matrix(std::ssize(ids), vocab));
  }
  // Logits of `count` tokens, starting at token `begin`.
  std::span<const float> rows(int64_t begin, int64_t count) const {
    return logit_values.span().subspan(static_cast<size_t>(begin * vocab),
                                       static_cast<size_t>(count * vocab));
  }
  std::span<const float> all() const { return logit_values.span(); }

  int64_t vocab;
  Buffer<float> hidden, logit_values;
  std::vector<std::vector<int32_t>> row_nnz;
};

class ForwardTest : public ::testing::Test {
 protected:
  const ModelConfig config_ = small_config(true, true);
  const Model model_ = sparse_model(config_, 1, 1.0f);
  const double tolerance_ = float_tolerance(config_);
  Context ctx_{2};
};

TEST_F(ForwardTest, AgreesWithTheReference) {
  for (const bool gated : {true, false}) {
    for (const bool tied : {true, false}) {
      const ModelConfig config = small_config(gated, tied);
      const Model model = sparse_model(config, 2, 1.0f);
      const std::vector<int32_t> ids = random_ids(3 * 11, 1);
      const ReferenceResult expected = ReferenceModel(model).run(ids, {}, 11);
      ASSERT_GT(expected.min_gate, 1e-5);
      for (const FfnPolicy policy :
           {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
        ForwardState state(config, policy);
        const std::vector<ForwardSequence> sequences(3, {.tokens = 11});
        const Outcome out(ctx_, model, state, ids, sequences);
        EXPECT_LE(relative_error(out.all(), std::span(expected.logits)), float_tolerance(config));
        EXPECT_EQ(out.row_nnz, expected.row_nnz);
      }
    }
  }
}

TEST_F(ForwardTest, EveryOptionOfTheFamiliesAgreesWithTheReference) {
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu,
        Activation::kRelu, Activation::kRelu2}) {
    ModelConfig config = small_config(true, activation != Activation::kSilu);
    config.activation = activation;
    config.qkv_bias = activation != Activation::kGelu;
    config.qk_norm = activation != Activation::kRelu;
    config.rope_scaling = {.type = RopeType::kLlama3, .factor = 8.0, .original_context = 16};
    const Model model = sparse_model(config, 4, 1.0f);
    const std::vector<int32_t> ids = random_ids(2 * 17, 1);
    const ReferenceResult expected = ReferenceModel(model).run(ids, {}, 17);
    ForwardState state(config, FfnPolicy::kAuto);
    const std::vector<ForwardSequence> sequences(2, {.tokens = 17});
    const Outcome out(ctx_, model, state, ids, sequences);
    EXPECT_LE(relative_error(out.all(), std::span(expected.logits)), float_tolerance(config));
  }
}

TEST_F(ForwardTest, BiasesOnAllProjectionsAgreeWithTheReference) {
  for (const bool gated : {true, false}) {
    for (const Activation activation : {Activation::kSilu, Activation::kRelu}) {
      ModelConfig config = small_config(gated, true);
      config.activation = activation;
      config.qkv_bias = config.o_bias = config.mlp_bias = true;
      config.ffn = 83;
      const Model model = sparse_model(config, 4, 1.0f);
      const std::vector<int32_t> ids = random_ids(2 * 17, 1);
      const ReferenceResult expected = ReferenceModel(model).run(ids, {}, 17);
      for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kTileUnion}) {
        ForwardState state(config, policy);
        const std::vector<ForwardSequence> sequences(2, {.tokens = 17});
        const Outcome out(ctx_, model, state, ids, sequences);
        EXPECT_LE(relative_error(out.all(), std::span(expected.logits)), float_tolerance(config));
        EXPECT_EQ(out.row_nnz, expected.row_nnz);
        EXPECT_EQ(state.ffn_plans[0].execution, FfnExecution::kDense);
      }
    }
  }
}

TEST_F(ForwardTest, FfnOfAnyWidthAgreesWithTheReference) {
  for (const int64_t ffn : {1, 83, 257}) {
    ModelConfig config = small_config(ffn != 83, true);
    config.ffn = ffn;
    const Model model = sparse_model(config, 4, 1.0f);
    const std::vector<int32_t> ids = random_ids(2 * 17, 1);
    const ReferenceResult expected = ReferenceModel(model).run(ids, {}, 17);
    for (const FfnPolicy policy :
         {FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
      ForwardState state(config, policy);
      const std::vector<ForwardSequence> sequences(2, {.tokens = 17});
      const Outcome out(ctx_, model, state, ids, sequences);
      EXPECT_LE(relative_error(out.all(), std::span(expected.logits)), float_tolerance(config));
      EXPECT_EQ(out.row_nnz, expected.row_nnz);
    }
  }
}

TEST_F(ForwardTest, SlidingWindowOfSomeLayers) {
  ModelConfig config = config_;
  config.sliding_window = 5;
  for (const bool first_is_full : {false, true}) {
    if (first_is_full) {
      config.full_attention.assign(static_cast<size_t>(config.layers), false);
      config.full_attention[0] = true;
    }
    const Model model = sparse_model(config, 1, 1.0f);
    ForwardState state(config, FfnPolicy::kDense);
    const std::vector<int32_t> ids = random_ids(2 * 17, 2);
    const std::vector<ForwardSequence> sequences(2, {.tokens = 17});
    const ReferenceResult expected = ReferenceModel(model).run(ids, {}, 17);
    const Outcome out(ctx_, model, state, ids, sequences);
    EXPECT_LE(relative_error(out.all(), std::span(expected.logits)), float_tolerance(config));
  }
}

TEST_F(ForwardTest, RaggedSequencesDoNotSeeEachOther) {
  ForwardState state(config_, FfnPolicy::kDense);
  const std::vector<int32_t> ids = random_ids(1 + 24 + 7, 2);
  const ForwardSequence lengths[] = {{.tokens = 1}, {.tokens = 24}, {.tokens = 7}};
  const Outcome together(ctx_, model_, state, ids, lengths);
  int64_t begin = 0;
  for (const ForwardSequence& sequence : lengths) {
    const auto own_ids =
        std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(sequence.tokens));
    const Outcome alone(ctx_, model_, state, own_ids, {&sequence, 1});
    EXPECT_LE(relative_error(together.rows(begin, sequence.tokens), alone.all()), tolerance_);
    begin += sequence.tokens;
  }
}

TEST_F(ForwardTest, PrefillAndDecodeEqualOneShot) {
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
    ForwardState state(config_, policy);
    const std::vector<int32_t> ids = random_ids(20, 3);
    const ForwardSequence whole = {.tokens = 20};
    const Outcome expected(ctx_, model_, state, ids, {&whole, 1});
    KvCache cache(config_, 2, 20, {.block_tokens = 16});
    int64_t done = 0;
    for (const int64_t tokens : {9, 1, 1, 6, 1, 2}) {
      const ForwardSequence next = {.tokens = tokens, .slot = 1};
      const auto new_ids =
          std::span(ids).subspan(static_cast<size_t>(done), static_cast<size_t>(tokens));
      const Outcome out(ctx_, model_, state, new_ids, {&next, 1}, &cache);
      EXPECT_LE(relative_error(out.all(), expected.rows(done, tokens)), tolerance_) << done;
      done += tokens;
      EXPECT_EQ(cache.length(1), done);
      EXPECT_EQ(cache.length(0), 0);
    }
  }
}

TEST_F(ForwardTest, SlotsOfDifferentLengthsDecodeTogether) {
  ForwardState state(config_, FfnPolicy::kRowFused);
  const std::vector<int32_t> a = random_ids(12, 4), b = random_ids(6, 5);
  const ForwardSequence whole_a = {.tokens = 12}, whole_b = {.tokens = 6};
  const Outcome expected_a(ctx_, model_, state, a, {&whole_a, 1});
  const Outcome expected_b(ctx_, model_, state, b, {&whole_b, 1});

  KvCache cache(config_, 3, 16);
  const ForwardSequence prefill = {.tokens = 10, .slot = 2};
  const Outcome first(ctx_, model_, state, std::span(a).first(10), {&prefill, 1}, &cache);
  std::vector<int32_t> ids = b;
  ids.insert(ids.end(), a.begin() + 10, a.end());
  const ForwardSequence both[] = {{.tokens = 6, .slot = 0}, {.tokens = 2, .slot = 2}};
  const Outcome out(ctx_, model_, state, ids, both, &cache);
  EXPECT_LE(relative_error(out.rows(0, 6), expected_b.all()), tolerance_);
  EXPECT_LE(relative_error(out.rows(6, 2), expected_a.rows(10, 2)), tolerance_);
}

TEST_F(ForwardTest, RepeatsBitForBit) {
  ForwardState state(config_, FfnPolicy::kAuto);
  const std::vector<int32_t> ids = random_ids(20, 6);
  const ForwardSequence whole = {.tokens = 20};
  const Outcome first(ctx_, model_, state, ids, {&whole, 1});
  const Outcome second(ctx_, model_, state, ids, {&whole, 1});
  EXPECT_EQ(std::memcmp(first.all().data(), second.all().data(), first.all().size_bytes()), 0);
}

TEST_F(ForwardTest, RefusesWhatDoesNotFitAndLeavesTheCache) {
  ForwardState state(config_, FfnPolicy::kAuto);
  const std::vector<int32_t> ids = random_ids(25, 7);
  const auto run = [&](int64_t tokens, KvCache* cache) {
    const ForwardSequence sequence = {.tokens = tokens};
    Outcome(ctx_, model_, state, std::span(ids).first(static_cast<size_t>(tokens)), {&sequence, 1},
            cache);
  };
  EXPECT_THROW(run(25, nullptr), InputError);
  KvCache cache(config_, 1, 10);
  run(8, &cache);
  EXPECT_THROW(run(3, &cache), InputError);
  EXPECT_EQ(cache.length(0), 8);
  const ForwardSequence twice[] = {{.tokens = 1}, {.tokens = 1}};
  EXPECT_THROW(Outcome(ctx_, model_, state, std::span(ids).first(2), twice, &cache), Error);
}

// Published configurations have contexts of up to 67,108,864 tokens; a table for that takes 17 GB.
TEST_F(ForwardTest, TablesFollowTheTokensAndNotTheContext) {
  ModelConfig config = config_;
  config.context = int64_t{1} << 26;
  ForwardState state(config, FfnPolicy::kDense);
  const Model model = sparse_model(config, 1, 1.0f);
  const std::vector<int32_t> ids = random_ids(20, 3);
  const ForwardSequence whole = {.tokens = 20}, first = {.tokens = 9}, rest = {.tokens = 11};
  KvCache cache(config, 1, 40);
  const Outcome past(ctx_, model, state, std::span(ids).first(9), {&first, 1}, &cache);
  EXPECT_EQ(state.rope.max_positions, 40);
  const Outcome out(ctx_, model, state, std::span(ids).subspan(9), {&rest, 1}, &cache);
  ForwardState uncached(config, FfnPolicy::kDense);
  const Outcome expected(ctx_, model, uncached, ids, {&whole, 1});
  EXPECT_EQ(uncached.rope.max_positions, 20);
  EXPECT_LE(relative_error(out.all(), expected.rows(9, 11)), tolerance_);
}

TEST_F(ForwardTest, NoTokensAreNoWork) {
  ForwardState state(config_, FfnPolicy::kAuto);
  forward(ctx_, model_, state, {.hidden = MatrixF(nullptr, 0, config_.width)});
}

}  // namespace
}  // namespace twell
