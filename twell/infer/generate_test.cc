// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/infer/session_cpu.h"
#include "twell/infer/test_model.h"

namespace twell {
namespace {

class GenerateTest : public testing::Test {
 protected:
  static std::string prompt(size_t i) {
    return std::string(1 + i * 5 % 17, static_cast<char>('a' + i));
  }
  static GenerateOptions options(size_t i) {
    return {.max_tokens = static_cast<int64_t>(1 + i * 7 % 23),
            .sampler = {.temperature = i % 3 == 0 ? 0.0f : 0.9f, .top_k = 40, .seed = i}};
  }

  int64_t submit(Scheduler& scheduler, const OnDone& on_done, const std::string& prompt,
                 const GenerateOptions& options) {
    return scheduler.submit(text_request(model_->config, tokenizer_, prompt, options, on_done))
        .value();
  }

  Context ctx_{2};
  std::unique_ptr<Model> model_ = test_model(ctx_, kVocab);
  Tokenizer tokenizer_ = byte_tokenizer();
};

TEST_F(GenerateTest, GoesOnPastASlidingWindow) {
  ModelConfig config = model_->config;
  config.sliding_window = 4;
  Model model(config);
  std::copy_n(model_->flat.data(), model.flat.size(), model.flat.data());
  SessionCpu session(ctx_, model, {});
  const Generation got =
      generate(session, tokenizer_, "abc", {.max_tokens = 20, .sampler = {.temperature = 0.0f}});
  EXPECT_GT(got.ids.size(), 8u);  // it may draw its end token before 20
  EXPECT_NE(got.reason, StopReason::kContextFull);
}

TEST_F(GenerateTest, EndTokensOfEveryFileOfACheckpointCount) {
  const TempFolder folder;
  ModelConfig config = model_->config;
  config.eos_token = 3;
  config.more_eos_tokens = {5};
  const auto tokens = [&] { return stop_tokens(folder.path(), config, tokenizer_); };
  using Tokens = std::vector<int32_t>;
  EXPECT_EQ(tokens(), (Tokens{3, 5}));
  folder.write("generation_config.json", R"({"eos_token_id": [0, 7, 3]})");
  EXPECT_EQ(tokens(), (Tokens{0, 3, 5, 7}));
  folder.write("generation_config.json", R"({"eos_token_id": 9, "temperature": 0.7})");
  EXPECT_EQ(tokens(), (Tokens{3, 5, 9}));
  for (const char* none :
       {R"({"eos_token_id": null})", "{}", R"({"eos_token_id": [-1, 99999999]})"}) {
    folder.write("generation_config.json", none);
    EXPECT_EQ(tokens(), (Tokens{3, 5})) << none;
  }
  folder.write("tokenizer_config.json", R"({"eos_token": "a", "added_tokens_decoder": {}})");
  const int32_t a = tokenizer_.find("a");
  EXPECT_EQ(std::ranges::count(tokens(), a), 1);
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "a", "lstrip": false}})");
  EXPECT_EQ(std::ranges::count(tokens(), a), 1);
  folder.write("tokenizer_config.json", R"({"eos_token": "no such token"})");
  EXPECT_EQ(tokens(), (Tokens{3, 5}));
  const auto with = [&](const std::vector<std::string>& names) {
    return stop_tokens(folder.path(), config, tokenizer_, names);
  };
  const std::vector<int32_t> found = with({"b", "a"});
  EXPECT_EQ(found.size(), 4);
  EXPECT_EQ(std::ranges::count(found, a), 1);
  EXPECT_THROW(with({"a", "no such token"}), InputError);
  folder.write("generation_config.json", R"({"eos_token_id": "seven"})");
  EXPECT_THROW(tokens(), InputError);
  folder.write("generation_config.json", "{");
  EXPECT_THROW(tokens(), InputError);
}

TEST_F(GenerateTest, EachRequestGivesWhatItGivesAlone) {
  SessionCpu alone(ctx_, *model_, {});
  SessionCpu session(ctx_, *model_, {.slots = 3});
  std::map<int64_t, Generation> done;
  const OnDone on_done = [&](int64_t request, Generation generation) {
    EXPECT_TRUE(done.emplace(request, std::move(generation)).second);
  };
  Scheduler scheduler(session, tokenizer_);
  constexpr size_t kRequests = 11;
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_EQ(submit(scheduler, on_done, prompt(i), options(i)), static_cast<int64_t>(i));
  }
  while (scheduler.step()) {
  }
  EXPECT_FALSE(scheduler.step());
  ASSERT_EQ(done.size(), kRequests);
  for (size_t i = 0; i < kRequests; ++i) {
    const Generation expected = generate(alone, tokenizer_, prompt(i), options(i));
    const Generation& got = done.at(static_cast<int64_t>(i));
    EXPECT_EQ(got.ids, expected.ids) << i;
    EXPECT_EQ(got.text, expected.text);
    EXPECT_EQ(got.reason, expected.reason);
    EXPECT_EQ(got.prompt_tokens, expected.prompt_tokens);
  }
}

TEST_F(GenerateTest, SlotsAreTakenAsTheyBecomeFree) {
  SessionCpu session(ctx_, *model_, {.slots = 2});
  std::vector<int64_t> order;
  const OnDone on_done = [&](int64_t request, const Generation&) { order.push_back(request); };
  Scheduler scheduler(session, tokenizer_);
  // With these prompts, greedy generation of this model does not stop within 20 tokens.
  const auto ask = [&](int64_t tokens) {
    return submit(scheduler, on_done, "abc",
                  {.max_tokens = tokens, .sampler = {.temperature = 0.0f}});
  };
  ASSERT_EQ(
      generate(session, tokenizer_, "abc", {.max_tokens = 20, .sampler = {.temperature = 0.0f}})
          .ids.size(),
      20u);
  ask(20);
  ask(3);
  ask(4);
  ask(1);
  int64_t steps = 0;
  while (scheduler.step()) ++steps;
  // The second request ends first; its slot goes to the third, then to the fourth, while the first
  // runs.
  EXPECT_EQ(order, (std::vector<int64_t>{1, 2, 3, 0}));
  EXPECT_EQ(steps, 19);  // a token in each; the last one returns false
}

TEST_F(GenerateTest, LongPromptsAreFedInPiecesWithTheTokensOfOthers) {
  SessionCpu alone(ctx_, *model_, {});
  SessionCpu session(ctx_, *model_, {.slots = 3, .prefill_tokens = 4});
  std::map<int64_t, Generation> done;
  const OnDone on_done = [&](int64_t request, Generation generation) {
    EXPECT_TRUE(done.emplace(request, std::move(generation)).second);
  };
  Scheduler scheduler(session, tokenizer_);
  const GenerateOptions greedy{.max_tokens = 12, .sampler = {.temperature = 0.0f}};
  const std::string long_prompt(22, 'q');
  submit(scheduler, on_done, "abc", greedy);
  scheduler.step();  // draws its first token
  submit(scheduler, on_done, long_prompt, greedy);
  submit(scheduler, on_done, "xyz", greedy);
  for (int64_t piece = 1; piece <= 7; ++piece) {
    scheduler.step();
    EXPECT_EQ(session.length(0), 3 + piece);  // one new token each
    EXPECT_EQ(session.length(1), 3 * piece);
    EXPECT_EQ(session.length(2), 0);
  }
  scheduler.step();  // the last token of the one, the first 2 of the other
  EXPECT_EQ(session.length(1), 22);
  EXPECT_EQ(session.length(2), 2);
  scheduler.cancel(2);
  scheduler.step();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done.at(2).reason, StopReason::kCancelled);
  EXPECT_TRUE(done.at(2).ids.empty());
  while (scheduler.step()) {
  }
  EXPECT_EQ(done.at(0).ids, generate(alone, tokenizer_, "abc", greedy).ids);
  EXPECT_EQ(done.at(1).ids, generate(alone, tokenizer_, long_prompt, greedy).ids);
}

TEST_F(GenerateTest, RequestsAreCancelledWhereverTheyAre) {
  SessionCpu session(ctx_, *model_, {.slots = 1});
  std::map<int64_t, Generation> done;
  const OnDone on_done = [&](int64_t request, Generation generation) {
    done.emplace(request, std::move(generation));
  };
  Scheduler scheduler(session, tokenizer_);
  std::atomic<bool> flag{false};
  const GenerateOptions greedy{.max_tokens = 20, .sampler = {.temperature = 0.0f}};
  GenerateOptions flagged = greedy;
  flagged.cancel = &flag;
  submit(scheduler, on_done, "abc", greedy);
  submit(scheduler, on_done, "abc", greedy);
  submit(scheduler, on_done, "abc", flagged);
  submit(scheduler, on_done, "abc", greedy);
  scheduler.step();
  scheduler.cancel(0);  // running
  scheduler.cancel(1);  // waiting
  flag = true;
  scheduler.step();
  ASSERT_EQ(done.size(), 3u);
  for (const auto& [request, generation] : done) {
    EXPECT_EQ(generation.reason, StopReason::kCancelled);
    EXPECT_EQ(generation.ids.size(), request == 0 ? 1u : 0u);
  }
  scheduler.cancel(0);  // no effect: it has finished
  while (scheduler.step()) {
  }
  EXPECT_EQ(done.at(3).ids, generate(session, tokenizer_, "abc", greedy).ids);
}

TEST(PromptIds, FollowTheTemplateOfTheTokenizer) {
  std::string json = byte_tokenizer().to_json();
  const std::string none = "\"post_processor\": null";
  json.replace(json.find(none), none.size(), R"("post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                 {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}})");
  const Tokenizer tokenizer = Tokenizer::parse(json, "with a template");
  const ModelConfig config{.vocab_size = 257};
  const std::vector<int32_t> plain = tokenizer.encode("ab");
  std::vector<int32_t> begun = {tokenizer.bos_token()};
  begun.insert(begun.end(), plain.begin(), plain.end());
  EXPECT_EQ(prompt_ids(config, tokenizer, "ab"), begun);
  EXPECT_EQ(prompt_ids(config, tokenizer, "ab", /*begin_token=*/false), plain);
  EXPECT_EQ(prompt_ids(config, tokenizer, ""), (std::vector<int32_t>{tokenizer.bos_token()}));
  EXPECT_EQ(prompt_ids(config, byte_tokenizer(), "ab"), byte_tokenizer().encode("ab"));
}

TEST_F(GenerateTest, RefusesAtOnce) {
  SessionCpu session(ctx_, *model_, {.slots = 2, .capacity = 10});
  const OnDone on_done;
  Scheduler scheduler(session, tokenizer_);
  EXPECT_THROW(submit(scheduler, on_done, std::string(10, 'x'), {}), InputError);
  EXPECT_THROW(submit(scheduler, on_done, "x", {.max_tokens = 0}), InputError);
  EXPECT_THROW(submit(scheduler, on_done, "x", {.sampler = {.top_p = 0.0f}}), InputError);
  EXPECT_FALSE(scheduler.step());
}

}  // namespace
}  // namespace twell
