// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/text_sampler.h"

#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/infer/generate.h"
#include "twell/infer/session_cpu.h"
#include "twell/infer/test_model.h"

namespace twell {
namespace {

class TextSamplerTest : public testing::Test {
 protected:
  std::vector<std::string> texts(const std::vector<std::string>& prompts, uint64_t seed = 3) {
    const TextSampler sampler(model_->config, tokenizer_, stop_,
                              {.prompts = prompts, .tokens = 20, .seed = seed});
    return sampler.texts(ctx_, *model_);
  }

  Context ctx_{2};
  std::unique_ptr<Model> model_ = test_model(ctx_, kVocab);
  Tokenizer tokenizer_ = byte_tokenizer();
  std::atomic<bool> stop_ = false;
};

TEST_F(TextSamplerTest, WritesWhatGenerateWritesAndRepeatsIt) {
  const std::vector<std::string> prompts = {"abc", "", "one of more tokens than the others"};
  const std::vector<std::string> got = texts(prompts);
  ASSERT_EQ(got.size(), prompts.size());
  EXPECT_EQ(texts(prompts), got);
  EXPECT_NE(texts(prompts, 4), got);
  SessionCpu session(ctx_, *model_, {});
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Generation same =
        generate(session, tokenizer_, prompts[i],
                 {.max_tokens = 20, .sampler = {.temperature = 0.8f, .seed = 3}});
    EXPECT_EQ(find_invalid_utf8(got[i]), got[i].size());  // this model writes any bytes
    if (find_invalid_utf8(same.text) == same.text.size()) {
      EXPECT_EQ(got[i], same.text);
    } else {
      EXPECT_NE(got[i].find("\uFFFD"), std::string::npos);
    }
  }
}

TEST_F(TextSamplerTest, EndsWhereTheRunIsStopped) {
  stop_ = true;
  EXPECT_EQ(texts({"abc"}), std::vector<std::string>{""});
}

TEST_F(TextSamplerTest, RefusesPromptsThatCannotBeContinued) {
  EXPECT_THROW(texts({"abc", std::string(48, 'a')}), InputError);
  EXPECT_NO_THROW(texts({std::string(47, 'a')}));
  EXPECT_THROW(texts({"\xff"}), InputError);
  model_ = model_with_nan(ctx_, kVocab, tokenizer_.encode("a").front());
  EXPECT_THROW(texts({"a"}), InputError);
}

}  // namespace
}  // namespace twell
