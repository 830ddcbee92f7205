// SPDX-License-Identifier: Apache-2.0
// Prompts for the text between a beginning and an end ("suffix"), for tokenizers with the tokens
// that models are trained to do so with ("fill in the middle", Bavarian et al. 2022).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct FillInTokens {
  // The prompt is `begin` prefix `between` suffix `end`, or with suffix_first `begin` suffix
  // `between` prefix.
  int32_t begin = -1, between = -1, end = -1;
  bool suffix_first = false;
  std::vector<int32_t> stops;  // that end the text in the middle besides the end of text
};

// Those of StarCoder, Granite, Qwen, CodeGemma, Code Llama, DeepSeek and Codestral, by their names;
// nothing where the tokenizer has none of them.
std::optional<FillInTokens> find_fill_in_tokens(const Tokenizer& tokenizer);

// prefix: with the begin token of texts, if it is wanted, first; it stays first.
std::vector<int32_t> fill_in_prompt(const FillInTokens& tokens, int32_t begin_token,
                                    std::span<const int32_t> prefix,
                                    std::span<const int32_t> suffix);

}  // namespace twell
