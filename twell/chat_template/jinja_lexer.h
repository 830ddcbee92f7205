// SPDX-License-Identifier: Apache-2.0
// A template cut into text, and the tokens of its {{ }} and {% %}. Whitespace control is done here,
// as transformers sets Jinja up: trim_blocks and lstrip_blocks. Internal to data.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace twell::jinja {

enum class TokenKind { kText, kBeginOutput, kBeginBlock, kEnd, kName, kString, kNumber, kSign };

struct Token {
  TokenKind kind = TokenKind::kText;
  std::string text;  // of a string without its quotes and escapes
  int line = 1;
};

// InputError names the source and the line.
std::vector<Token> tokenize(std::string_view source_text, const std::string& source);

}  // namespace twell::jinja
