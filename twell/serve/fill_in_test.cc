// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/fill_in.h"

#include <gtest/gtest.h>

#include <utility>

#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

Tokenizer tokenizer_with(std::vector<std::string> special) {
  special.insert(special.begin(), "<|endoftext|>");
  bool given = false;
  return train_bpe(
      {.vocab_size = 256 + std::ssize(special), .special_tokens = special, .threads = 1},
      [&](std::string& text) {
        text.assign(1, 'a');
        for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
        return !std::exchange(given, true);
      });
}

TEST(FillIn, NoTokensNoFillIn) {
  EXPECT_FALSE(find_fill_in_tokens(byte_tokenizer()));
  EXPECT_FALSE(find_fill_in_tokens(tokenizer_with({"<|fim_prefix|>", "<|fim_suffix|>"})));
}

TEST(FillIn, PrefixThenSuffix) {
  const Tokenizer tokenizer =
      tokenizer_with({"<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|file_sep|>"});
  const auto found = find_fill_in_tokens(tokenizer);
  ASSERT_TRUE(found);
  EXPECT_EQ(fill_in_prompt(*found, -1, std::vector<int32_t>{10, 11}, std::vector<int32_t>{12}),
            (std::vector<int32_t>{2, 10, 11, 3, 12, 1}));
  EXPECT_EQ(fill_in_prompt(*found, 10, std::vector<int32_t>{10, 11}, {}),
            (std::vector<int32_t>{10, 2, 11, 3, 1}));
  EXPECT_EQ(found->stops, (std::vector<int32_t>{2, 3, 1, 0, 4}));
}

TEST(FillIn, SuffixThenPrefix) {
  const auto found = find_fill_in_tokens(tokenizer_with({"[PREFIX]", "[MIDDLE]", "[SUFFIX]"}));
  ASSERT_TRUE(found);
  EXPECT_EQ(fill_in_prompt(*found, 10, std::vector<int32_t>{10, 11}, std::vector<int32_t>{12}),
            (std::vector<int32_t>{10, 3, 12, 1, 11}));
}

}  // namespace
}  // namespace twell
