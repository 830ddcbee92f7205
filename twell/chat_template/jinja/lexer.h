// SPDX-License-Identifier: Apache-2.0
// Cuts a template into text and the tokens of its {{ }} and {% %}, with the white space control of
// jinja2 and with trim_blocks and lstrip_blocks on, as transformers sets them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

enum class TokenKind {
  kText,
  kBeginOutput,
  kEndOutput,
  kBeginBlock,
  kEndBlock,
  kName,
  kString,
  kInteger,
  kReal,
  kSign,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kText;
  std::string text;  // of a string: unquoted and unescaped
  int line = 1;
  Value number;  // of kInteger and kReal
};

// The last token is kEnd. InputError names the source, the line and the fault.
std::vector<Token> tokenize(std::string_view text, const std::string& source);

}  // namespace twell::jinja
