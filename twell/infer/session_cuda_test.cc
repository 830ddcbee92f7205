// SPDX-License-Identifier: Apache-2.0
// Tests the session's contract on the GPU against the CPU session with the same bf16 weights.
#include "twell/infer/session_cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cmath>
#include <functional>
#include <thread>

#include "twell/base/cuda_gtest.h"
#include "twell/base/error.h"
#include "twell/infer/generate.h"
#include "twell/infer/session_cpu.h"
#include "twell/infer/test_filter.h"
#include "twell/infer/test_model.h"
#include "twell/infer/test_ties.h"
#include "twell/ops/attention/attention_cuda.h"

namespace twell {
namespace {

class SessionCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    model_ = test_model(cpu_, kVocab);
    for (float& value : model_->flat.span()) value = to_float(to_bf16(value));
    device_model_ = std::make_unique<ModelCuda>(*ctx_, *model_);
  }

  // bf16 rounding errors of a two-layer model: see forward_cuda_test. Single rows of such a narrow
  // model vary up to three times as much as a batch.
  static void expect_close(std::span<const float> got, std::span<const float> want) {
    ASSERT_EQ(got.size(), want.size());
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = static_cast<double>(got[i]) - want[i];
      error += difference * difference;
      size += static_cast<double>(want[i]) * want[i];
    }
    EXPECT_LE(std::sqrt(error / size), 0.06);
  }

  // Log-probabilities of tokens, one by one. bf16 puts logits of this fixture's model, which are of
  // size 2, off by some hundredths.
  static void expect_tokens_close(std::span<const float> got, std::span<const float> want,
                                  double tolerance = 0.5) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_LE(want[i], 0.0f) << i;
      EXPECT_NEAR(got[i], want[i], tolerance) << "token " << i;
    }
  }

  Context cpu_{2};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ModelCuda> device_model_;
};

TEST_F(SessionCudaTest, AppendAndDecodeEqualCpu) {
  SessionCpu want(cpu_, *model_, {.slots = 3});
  SessionCuda got(*ctx_, *device_model_, {.slots = 3});
  const auto a = random_ids(20, kVocab, 1), b = random_ids(7, kVocab, 2);
  expect_close(got.append(2, a), want.append(2, a));
  expect_close(got.append(0, b), want.append(0, b));
  expect_close(got.append(2, b), want.append(2, b));
  // The first step runs without a graph, the second is captured, the others replay it; the order of
  // the slots changes.
  for (int32_t step = 0; step < 5; ++step) {
    const std::vector<int64_t> slots =
        step % 2 == 0 ? std::vector<int64_t>{0, 2} : std::vector<int64_t>{2, 0};
    const std::vector<int32_t> ids = {step + 3, step + 50};
    const ConstMatrixF x = got.decode(slots, ids), y = want.decode(slots, ids);
    ASSERT_EQ(x.rows, y.rows);
    for (int64_t row = 0; row < x.rows; ++row) {
      expect_close({x.row(row), static_cast<size_t>(kVocab)},
                   {y.row(row), static_cast<size_t>(kVocab)});
    }
    EXPECT_EQ(got.length(0), want.length(0));
    EXPECT_EQ(got.length(2), want.length(2));
  }
  got.clear(2);
  EXPECT_EQ(got.length(2), 0);
  want.clear(2);
  expect_close(got.append(2, a), want.append(2, a));
}

// A graph contains the executions of its capture, which nnz_per_token() may change.
TEST_F(SessionCudaTest, UpdatedExecutionsAreCapturedAgain) {
  SessionCuda session(*ctx_, *device_model_, {.slots = 1});
  session.append(0, random_ids(20, kVocab, 1));  // so many that no step below updates by itself
  const std::vector<int64_t> slots = {0};
  const std::vector<int32_t> ids = {3};
  const auto step = [&] { session.decode(slots, ids); };
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(session.graphs_captured(), 1);
  session.nnz_per_token();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(session.graphs_captured(), 2);
}

TEST_F(SessionCudaTest, DrawsOnTheDeviceEqualDrawsFromItsLogits) {
  const std::vector<SamplerOptions> samplers = {{.temperature = 0.9f, .top_k = 30, .seed = 5},
                                                {.temperature = 0.7f,
                                                 .top_p = 0.9f,
                                                 .repetition_penalty = 1.2f,
                                                 .frequency_penalty = 0.3f,
                                                 .presence_penalty = 0.1f,
                                                 .seed = 6}};
  const std::vector<SeenToken> seen = {{3, 0}, {70, 2}, {200, 1}, {256, 4}};
  const auto draws = [&](uint64_t index) {
    std::vector<Draw> out;
    for (const SamplerOptions& sampler : samplers) {
      out.push_back({sampler, kVocab - 1, 0, index, seen, 5});
    }
    return out;
  };
  const auto drawn = [](std::span<const float> logits, const Draw& draw) {
    return sample(logits.first(static_cast<size_t>(draw.vocab)), draw.sampler, draw.stream,
                  draw.index, draw.seen);
  };
  const auto expect_log_probs = [](const TokenLogProbs& got, std::span<const float> logits,
                                   int32_t id) {
    const TokenLogProbs want = token_log_probs(logits, id, 5, kVocab - 1);
    EXPECT_EQ(got.token.id, id);
    EXPECT_NEAR(got.token.log_prob, want.token.log_prob, 1e-5);
    ASSERT_EQ(got.top.size(), want.top.size());
    for (size_t i = 0; i < want.top.size(); ++i) {
      EXPECT_EQ(got.top[i].id, want.top[i].id);
      EXPECT_NEAR(got.top[i].log_prob, want.top[i].log_prob, 1e-5);
    }
  };
  SessionCuda logits_read(*ctx_, *device_model_, {.slots = 2});
  SessionCuda on_device(*ctx_, *device_model_, {.slots = 2});
  const auto a = random_ids(9, kVocab, 3), b = random_ids(4, kVocab, 4);
  const std::vector<NewTokens> prompts = {{0, a}, {1, b}};
  std::vector<int32_t> next(2), other(2);
  // append() takes one prompt at a time and uses other kernels, so rounding can change a draw that
  // is close to a boundary.
  const std::vector<Draw> first = draws(0);
  for (size_t i = 0; i < 2; ++i) {
    on_device.drawn(on_device.append_and_draw({&prompts[i], 1}, {&first[i], 1}), {&next[i], 1});
    const std::span<const float> logits = logits_read.append(prompts[i].slot, prompts[i].ids);
    other[i] = drawn(logits, first[i]);
    expect_log_probs(on_device.drawn_log_probs(0), logits, next[i]);
  }
  EXPECT_EQ(next, other);
  const std::vector<int64_t> slots = {0, 1};
  for (uint64_t step = 1; step < 10; ++step) {
    const std::vector<int32_t> ids = next;
    const std::vector<NewTokens> last = {{0, {&ids[0], 1}}, {1, {&ids[1], 1}}};
    on_device.drawn(on_device.append_and_draw(last, draws(step)), next);
    const ConstMatrixF logits = logits_read.decode(slots, ids);
    for (size_t i = 0; i < 2; ++i) {
      const std::span<const float> own(logits.row(static_cast<int64_t>(i)), size_t{kVocab});
      other[i] = drawn(own, draws(step)[i]);
      expect_log_probs(on_device.drawn_log_probs(static_cast<int64_t>(i)), own, next[i]);
    }
    ASSERT_EQ(next, other) << step;
  }
}

// A call that begins before the last one was asked for its tokens takes them on the device. Also
// when sequences end, change places, are joined by a prompt, ask for log-probabilities, or have a
// filter.
TEST_F(SessionCudaTest, DrawsAheadEqualDrawsThatWait) {
  struct Step {
    std::vector<int64_t> slots;
    int64_t prompt = -1;  // slot of a prompt that joins them
  };
  const std::vector<Step> steps = {{{0, 1, 2}}, {{0, 1, 2}},    {{0, 1, 2}}, {{2, 1}},
                                   {{2, 1}, 3}, {{1, 3, 2}},    {{3}},       {{3, 0}, 4},
                                   {{3, 4, 0}}, {{0, 4, 3, 2}}, {{2, 3}},    {{2, 3}}};
  constexpr size_t kSlots = 5;
  const auto draw_of = [](int64_t slot, int64_t index) {
    return Draw{.sampler = {.temperature = slot % 2 == 0 ? 0.0f : 0.8f,
                            .seed = static_cast<uint64_t>(slot)},
                .vocab = kVocab - 1,
                .index = static_cast<uint64_t>(index),
                .log_probs = slot == 3 ? std::optional<int64_t>(2) : std::nullopt};
  };
  const auto texts = [&](bool ahead) {
    // A measured execution would come into effect at another step.
    SessionCuda session(*ctx_, *device_model_, {.slots = kSlots, .ffn = FfnPolicy::kDense});
    struct Call {
      int64_t number = 0;
      std::vector<int64_t> slots;
    };
    std::vector<Call> under_way;
    std::vector<std::vector<int32_t>> text(kSlots);     // known tokens
    std::vector<int64_t> drawn(kSlots), entry(kSlots);  // entry: in the call under way
    std::vector<std::unique_ptr<TokenFilter>> filters(kSlots);
    for (const size_t slot : {1, 2, 3}) {
      filters[slot] = std::make_unique<HashFilter>(kVocab - 1, slot);
    }
    std::vector<float> log_probs;
    const auto ask = [&] {
      const Call call = under_way.front();
      under_way.erase(under_way.begin());
      std::vector<int32_t> next(call.slots.size());
      session.drawn(call.number, next);
      for (size_t i = 0; i < next.size(); ++i) {
        const auto slot = static_cast<size_t>(call.slots[i]);
        if (filters[slot]) filters[slot]->accept(text[slot].size(), next[i]);
        text[slot].push_back(next[i]);
        if (call.slots[i] != 3) continue;
        const TokenLogProbs got = session.drawn_log_probs(static_cast<int64_t>(i));
        EXPECT_EQ(got.token.id, next[i]);
        log_probs.push_back(got.token.log_prob);
      }
    };
    const auto began = [&](int64_t number, const std::vector<int64_t>& slots) {
      under_way.push_back({number, slots});
      for (size_t i = 0; i < slots.size(); ++i) {
        const auto slot = static_cast<size_t>(slots[i]);
        ++drawn[slot];
        entry[slot] = static_cast<int64_t>(i);
      }
      while (std::ssize(under_way) > (ahead ? session.draws_ahead() : 0)) ask();
    };
    const auto step = [&](std::vector<int64_t> slots, int64_t new_slot) {
      if (new_slot >= 0) slots.push_back(new_slot);
      std::vector<std::vector<int32_t>> ids(slots.size());
      std::vector<NewTokens> tokens;
      std::vector<Draw> draws;
      for (size_t i = 0; i < slots.size(); ++i) {
        const auto at = static_cast<size_t>(slots[i]);
        const bool known = std::ssize(text[at]) == drawn[at];
        if (slots[i] == new_slot) {
          ids[i] = random_ids(5 + new_slot, kVocab, at);
        } else {
          ids[i] = {known ? text[at].back() : Session::the_drawn(entry[at])};
        }
        tokens.push_back({.slot = slots[i], .ids = ids[i]});
        draws.push_back(draw_of(slots[i], drawn[at]));
        draws.back().filter = filters[at].get();
      }
      began(session.append_and_draw(tokens, draws), slots);
    };
    for (const int64_t slot : {0, 1, 2}) step({}, slot);
    for (const auto& [slots, new_slot] : steps) step(slots, new_slot);
    while (!under_way.empty()) ask();
    for (size_t slot = 0; slot < kSlots; ++slot) {
      EXPECT_EQ(session.length(static_cast<int64_t>(slot)),
                static_cast<int64_t>(5 + slot) + std::ssize(text[slot]) - 1);
    }
    return std::pair(text, log_probs);
  };
  EXPECT_EQ(texts(true), texts(false));
}

// Tokens of sequences that grow, and a prompt behind them that takes several passes, in one call.
TEST_F(SessionCudaTest, TokensThatPassWithAPromptEqualTheCpus) {
  for (const bool eight_bits : {false, true}) {
    SCOPED_TRACE(eight_bits);
    const KvFormat format{.eight_bits = eight_bits};
    SessionCuda cuda(*ctx_, *device_model_, {.slots = 3, .prefill_tokens = 17, .cache = format});
    SessionCpu cpu(cpu_, *model_, {.slots = 3, .cache = format});
    const auto values = [&](Session& session) {
      const Draw greedy{.sampler = {.temperature = 0.0f}, .vocab = kVocab, .log_probs = 0};
      const std::vector<Draw> draws(3, greedy);
      std::vector<TokenLogProbs> scores;
      std::vector<float> out;
      for (int64_t step = 0; step < 3; ++step) {
        // Slot 2 begins behind two tokens, and then grows itself.
        std::vector<std::vector<int32_t>> ids;
        std::vector<NewTokens> tokens;
        for (int64_t slot = 0; slot < (step == 0 ? 2 : 3); ++slot) {
          const bool begins = step == (slot < 2 ? 0 : 1);
          ids.push_back(random_ids(begins ? 10 + 15 * slot : 1, kVocab,
                                   static_cast<uint64_t>(3 * step + slot)));
        }
        for (size_t i = 0; i < ids.size(); ++i) {
          tokens.push_back({.slot = static_cast<int64_t>(i), .ids = ids[i]});
        }
        if (step == 1) {
          tokens[2].targets = tokens[2].ids.subspan(1);
          tokens[2].scores = &scores;
        }
        std::vector<int32_t> next(tokens.size());
        session.drawn(session.append_and_draw(tokens, std::span(draws).first(tokens.size())), next);
        for (size_t i = 0; i < tokens.size(); ++i) {
          out.push_back(session.drawn_log_probs(static_cast<int64_t>(i)).token.log_prob);
        }
      }
      EXPECT_EQ(session.length(0), 12);
      EXPECT_EQ(session.length(1), 27);
      EXPECT_EQ(session.length(2), 41);
      EXPECT_EQ(scores.size(), 39u);
      for (const TokenLogProbs& score : scores) out.push_back(score.token.log_prob);
      return out;
    };
    expect_tokens_close(values(cuda), values(cpu));
  }
}

TEST_F(SessionCudaTest, ScoresEqualTheCpus) {
  SessionCuda cuda(*ctx_, *device_model_, {.slots = 2, .prefill_tokens = 17});
  SessionCpu cpu(cpu_, *model_, {.slots = 2});
  const std::vector<int32_t> ids = random_ids(40, kVocab, 9);
  const std::span<const int32_t> all(ids);
  const Draw draw{.sampler = {.temperature = 0.0f}, .vocab = kVocab - 1, .log_probs = 3};
  const auto values = [&](Session& session) {
    std::vector<TokenLogProbs> scores;
    int32_t next = kNoToken;
    const NewTokens first{.slot = 1,
                          .ids = all.first(25),
                          .targets = all.subspan(1, 25),
                          .top = 2,
                          .scores = &scores};
    session.drawn(session.append_and_draw({&first, 1}, {&draw, 1}), {&next, 1});
    const NewTokens rest{
        .slot = 1, .ids = all.subspan(25), .targets = all.subspan(26), .top = 2, .scores = &scores};
    session.drawn(session.append_and_draw({&rest, 1}, {&draw, 1}), {&next, 1});
    EXPECT_EQ(session.length(1), 40);
    EXPECT_EQ(scores.size(), 39u);
    scores.push_back(session.drawn_log_probs(0));
    EXPECT_EQ(scores.back().token.id, next);
    EXPECT_EQ(scores.back().top.size(), 3u);
    EXPECT_EQ(scores.back().top[0].id, next);
    std::vector<float> out;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (i < 39) {
        EXPECT_EQ(scores[i].token.id, ids[i + 1]);
        EXPECT_EQ(scores[i].top.size(), 2u);
      }
      out.push_back(scores[i].token.log_prob);
    }
    return out;
  };
  expect_tokens_close(values(cuda), values(cpu));
}

// Prompts of one call pass the layers together, in passes of 64 tokens here, some with scores.
TEST_F(SessionCudaTest, PackedPromptsScoreWhatEachScoresAlone) {
  constexpr int64_t kPrompts = 7;
  const Draw draw{.sampler = {.temperature = 0.0f}, .vocab = kVocab, .log_probs = 1};
  std::vector<std::vector<int32_t>> ids;
  for (const int64_t length : {40, 1, 33, 48, 2, 47, 12}) {
    ids.push_back(random_ids(length, kVocab, static_cast<uint64_t>(length)));
  }
  SessionCuda together(*ctx_, *device_model_, {.slots = kPrompts, .prefill_tokens = 64});
  SessionCuda alone(*ctx_, *device_model_, {.slots = kPrompts});
  std::vector<std::vector<TokenLogProbs>> got(kPrompts), want(kPrompts);
  const auto prompt_of = [&](size_t i, std::vector<std::vector<TokenLogProbs>>& scores) {
    const std::span<const int32_t> all(ids[i]);
    return NewTokens{.slot = static_cast<int64_t>(i),
                     .ids = all,
                     .targets = i == 2 ? all.first(0) : all.subspan(1),
                     .top = static_cast<int64_t>(i % 3),
                     .scores = &scores[i]};
  };
  std::vector<NewTokens> prompts;
  for (size_t i = 0; i < ids.size(); ++i) prompts.push_back(prompt_of(i, got));
  const std::vector<Draw> draws(ids.size(), draw);
  std::vector<int32_t> next(ids.size());
  together.drawn(together.append_and_draw(prompts, draws), next);
  std::vector<float> packed, each;
  for (size_t i = 0; i < ids.size(); ++i) {
    SCOPED_TRACE(i);
    const NewTokens own = prompt_of(i, want);
    int32_t drawn = kNoToken;
    alone.drawn(alone.append_and_draw({&own, 1}, {&draw, 1}), {&drawn, 1});
    ASSERT_EQ(got[i].size(), i == 2 ? 0 : ids[i].size() - 1);
    ASSERT_EQ(got[i].size(), want[i].size());
    for (size_t at = 0; at < got[i].size(); ++at) {
      EXPECT_EQ(got[i][at].token.id, ids[i][at + 1]);
      EXPECT_EQ(got[i][at].top.size(), i % 3);
      packed.push_back(got[i][at].token.log_prob);
      each.push_back(want[i][at].token.log_prob);
    }
    packed.push_back(together.drawn_log_probs(static_cast<int64_t>(i)).token.log_prob);
    each.push_back(alone.drawn_log_probs(0).token.log_prob);
  }
  expect_tokens_close(packed, each);
}

// Heads, prompts and contexts of real models: cuDNN attends for the prompts, and decoding divides
// the keys of long sequences.
TEST_F(SessionCudaTest, RealShapesEqualTheCpusTokenByToken) {
  for (const int64_t head_dim : {64, 128}) {
    ModelConfig config = model_->config;
    config.width = 256;
    config.ffn = 512;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = head_dim;
    config.context = 1300;
    config.init_std = 0.05;
    Model model(config);
    init_weights(cpu_, model, 1);
    for (float& value : model.flat.span()) value = to_float(to_bf16(value));
    const ModelCuda device_model(*ctx_, model);
    for (const bool eight_bits : {false, true}) {
      SCOPED_TRACE(testing::Message() << "heads of " << head_dim << ", 8 bits: " << eight_bits);
      const SessionOptions options{.slots = 3, .cache = {.eight_bits = eight_bits}};
      SessionCuda cuda(*ctx_, device_model, options);
      SessionCpu cpu(cpu_, model, options);
      const auto values = [&](Session& session) {
        const Draw greedy{.sampler = {.temperature = 0.0f}, .vocab = kVocab, .log_probs = 0};
        std::vector<float> out;
        std::vector<std::vector<int32_t>> ids;
        std::vector<NewTokens> prompts;
        std::vector<TokenLogProbs> scores;
        for (const int64_t length : {1234, 300, 131}) {
          ids.push_back(random_ids(length, kVocab, static_cast<uint64_t>(length)));
        }
        for (size_t i = 0; i < ids.size(); ++i) {
          const std::span<const int32_t> all(ids[i]);
          prompts.push_back({.slot = static_cast<int64_t>(i),
                             .ids = all,
                             .targets = all.subspan(1),
                             .scores = &scores});
        }
        const std::vector<Draw> draws(3, greedy);
        std::vector<int32_t> next(3);
        session.drawn(session.append_and_draw(prompts, draws), next);
        for (const TokenLogProbs& score : scores) out.push_back(score.token.log_prob);
        // Steps of one, two and three sequences, with the same tokens on both devices.
        for (int32_t step = 0; step < 9; ++step) {
          const size_t count = static_cast<size_t>(step) % 3 + 1;
          std::vector<int32_t> token(3, step + 11);
          std::vector<NewTokens> tokens;
          for (size_t i = 0; i < count; ++i) {
            tokens.push_back({.slot = static_cast<int64_t>(i), .ids = {&token[i], 1}});
          }
          session.drawn(session.append_and_draw(tokens, std::span(draws).first(count)),
                        std::span(next).first(count));
          for (size_t i = 0; i < count; ++i) {
            const auto row = static_cast<int64_t>(i);
            out.push_back(session.drawn_log_probs(row).token.log_prob);
          }
        }
        return out;
      };
      expect_tokens_close(values(cuda), values(cpu), 0.15);  // logits of size 0.8
      if (cudnn_found() && ctx_->compute_capability() >= 90) {
        EXPECT_TRUE(attention_report(*ctx_).starts_with("cuDNN 9")) << attention_report(*ctx_);
      }
    }
  }
}

TEST_F(SessionCudaTest, GreedyGenerationEqualsCpuUpToTies) {
  const Tokenizer tokenizer = byte_tokenizer();
  SessionCpu cpu(cpu_, *model_, {});
  SessionCuda cuda(*ctx_, *device_model_, {});
  const GenerateOptions options{.max_tokens = 30, .sampler = {.temperature = 0.0f}};
  const Generation want = generate(cpu, tokenizer, "abc", options);
  const Generation got = generate(cuda, tokenizer, "abc", options);
  expect_same_but_for_ties(cpu, tokenizer.encode("abc"), got.ids, want.ids);
}

// Prompts and steps, of which the third and later replay graphs, over a cache in 8 bits.
TEST_F(SessionCudaTest, EightBitCacheIsCloseToTheCpusAndToBf16) {
  const SessionOptions options{.slots = 2, .cache = {.eight_bits = true}};
  SessionCuda eight(*ctx_, *device_model_, options);
  SessionCuda wide(*ctx_, *device_model_, {.slots = 2});
  SessionCpu cpu(cpu_, *model_, options);
  std::vector<float> got, from_wide, want;
  const auto add = [](std::vector<float>& to, std::span<const float> logits) {
    to.insert(to.end(), logits.begin(), logits.end());
  };
  for (const int64_t slot : {0, 1}) {
    const auto ids = random_ids(20 + slot, kVocab, static_cast<uint64_t>(slot));
    add(got, eight.append(slot, ids));
    add(from_wide, wide.append(slot, ids));
    add(want, cpu.append(slot, ids));
  }
  const std::vector<int64_t> slots = {0, 1};
  for (int32_t step = 0; step < 6; ++step) {
    const std::vector<int32_t> ids = {step + 3, step + 50};
    const auto both = [](ConstMatrixF logits) {
      return std::span(logits.data, static_cast<size_t>(2 * kVocab));
    };
    add(got, both(eight.decode(slots, ids)));
    add(from_wide, both(wide.decode(slots, ids)));
    add(want, both(cpu.decode(slots, ids)));
  }
  EXPECT_EQ(eight.graphs_captured(), 1);
  EXPECT_NE(got, from_wide);
  // 8 bits change this model's logits by less than 0.02 of their size (session_test.cc), and bf16
  // by less than expect_close allows.
  expect_close(got, from_wide);
  expect_close(got, want);
}

TEST_F(SessionCudaTest, GreedyGenerationOverAnEightBitCacheRepeats) {
  const Tokenizer tokenizer = byte_tokenizer();
  const SessionOptions options{.cache = {.eight_bits = true}};
  SessionCpu cpu(cpu_, *model_, options);
  const GenerateOptions greedy{.max_tokens = 30, .sampler = {.temperature = 0.0f}};
  const auto generated = [&] {
    SessionCuda session(*ctx_, *device_model_, options);
    return generate(session, tokenizer, "abc", greedy).ids;
  };
  const std::vector<int32_t> got = generated();
  EXPECT_EQ(generated(), got);
  expect_same_but_for_ties(cpu, tokenizer.encode("abc"), got,
                           generate(cpu, tokenizer, "abc", greedy).ids);
}

// With heads of 64, 136 bytes in place of 256 for a token's key and value of a head.
TEST_F(SessionCudaTest, EightBitsHoldMoreBlocksInTheSameMemory) {
  ModelConfig config = model_->config;
  config.head_dim = 64;
  config.context = 4096;
  Model model(config);
  init_weights(cpu_, model, 1);
  const ModelCuda device_model(*ctx_, model);
  const int64_t memory = 100 * KvCacheCuda::block_bytes(config);
  const auto blocks = [&](bool eight_bits) {
    const SessionOptions options{
        .slots = 8, .cache_bytes = memory, .cache = {.eight_bits = eight_bits}};
    return SessionCuda(*ctx_, device_model, options).cache_use().blocks;
  };
  EXPECT_EQ(blocks(false), 100);
  EXPECT_EQ(blocks(true), 100 * 256 / 136);
  // What a session needs at least has room for a layer's copies in bf16 of more than one sequence.
  const auto needed = [&](bool eight_bits) {
    return SessionCuda::bytes_needed(
        *ctx_, config, {.ffn = FfnPolicy::kDense, .cache = {.eight_bits = eight_bits}});
  };
  const int64_t cache = KvCacheCuda::bytes(config, 1, config.context);
  EXPECT_GE(needed(true), KvCacheCuda::bytes(config, 1, config.context, true) + cache / 2);
}

TEST_F(SessionCudaTest, RefusesWhatDoesNotFit) {
  EXPECT_THROW(SessionCuda(*ctx_, *device_model_, {.slots = 0}), InputError);
  EXPECT_THROW(SessionCuda(*ctx_, *device_model_, {.capacity = 49}), InputError);
  SessionCuda session(*ctx_, *device_model_, {.capacity = 10});
  EXPECT_THROW(session.append(0, random_ids(11, kVocab, 4)), InputError);
  session.append(0, random_ids(10, kVocab, 4));
  EXPECT_THROW(session.append(0, random_ids(1, kVocab, 4)), InputError);
  EXPECT_EQ(session.length(0), 10);
  // The cache would take terabytes.
  EXPECT_THROW(SessionCuda(*ctx_, *device_model_, {.slots = int64_t{1} << 32}), InputError);
}

// A cache of all slots at the full context takes only what is free.
TEST_F(SessionCudaTest, CacheTakesWhatIsFree) {
  ModelConfig config = model_->config;
  config.context = int64_t{1} << 17;
  config.kv_heads = config.heads;
  config.head_dim = 64;
  Model model(config);
  init_weights(cpu_, model, 1);
  const ModelCuda device_model(*ctx_, model);
  SessionCuda session(*ctx_, device_model, {.slots = 8192});
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  EXPECT_LT(free, total / 10);
  EXPECT_EQ(session.capacity(), config.context);
  EXPECT_GE(session.cache_use().blocks, config.context / kKvBlock);
  EXPECT_LT(session.cache_use().blocks, 8192 * config.context / kKvBlock);
  expect_close(session.append(0, random_ids(200, kVocab, 4)),
               SessionCpu(cpu_, model, {.capacity = 256}).append(0, random_ids(200, kVocab, 4)));
}

// Kernels belong to the process, also what they may use: two models of different widths decode on a
// host thread each, steps and graphs in turn and at the same time, with the bits of each alone.
TEST_F(SessionCudaTest, ModelsOfDifferentWidthsOnTwoThreads) {
  constexpr int32_t kSteps = 24;
  const auto texts = [](int64_t width, const std::function<void()>& before_step) {
    ModelConfig config = preset_config("tiny");
    config.vocab_size = kVocab;
    config.width = width;
    config.ffn = 4 * width;
    config.heads = config.kv_heads = width / 64;
    config.layers = 2;
    Context cpu(1);
    Model model(config);
    init_weights(cpu, model, static_cast<uint64_t>(width));
    const CudaStream stream;
    CudaContext ctx(stream.get());
    const ModelCuda device_model(ctx, model);
    SessionCuda session(ctx, device_model, {.slots = 2});
    for (const int64_t slot : {0, 1}) {
      session.append(slot, random_ids(5 + slot, kVocab, static_cast<uint64_t>(width + slot)));
    }
    std::vector<float> logits;
    for (int32_t step = 0; step < kSteps; ++step) {
      before_step();
      // One or two sequences: other kernels, and graphs of their own.
      const std::vector<int64_t> slots =
          step % 3 == 0 ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 1};
      const std::vector<int32_t> ids(slots.size(), step + 7);
      const ConstMatrixF out = session.decode(slots, ids);
      for (int64_t row = 0; row < out.rows; ++row) {
        logits.insert(logits.end(), out.row(row), out.row(row) + out.cols);
      }
    }
    return logits;
  };
  const std::array<int64_t, 2> widths = {128, 2048};
  std::array<std::vector<float>, 2> alone, together;
  for (size_t i = 0; i < 2; ++i) alone[i] = texts(widths[i], [] {});
  std::barrier turn(2);
  std::array<std::thread, 2> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads[i] =
        std::thread([&, i] { together[i] = texts(widths[i], [&] { turn.arrive_and_wait(); }); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(together[i], alone[i]) << "width " << widths[i];
}

}  // namespace
}  // namespace twell
