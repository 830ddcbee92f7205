// SPDX-License-Identifier: Apache-2.0
// Grammars as llama.cpp's server takes them (GBNF), written as XGrammar's EBNF, from which they
// differ in a few places:
//
//   - alternatives may be empty: ws ::= | " "
//   - "." is any character
//   - a repetition may be repeated: "a"?*
//   - names of rules may begin with a digit, or be "true" or "false"
//
// In: a grammar's text, which may come from strangers. Out: a text of the same language, its lines
// where they were, so that the library's messages name them. XGrammar's own EBNF comes out as it
// is, and so does what neither of them knows, for the library to refuse.
// Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
#pragma once

#include <string>
#include <string_view>

namespace twell {

// InputError for brackets that are nested too deeply for a parser that calls itself. Time is linear
// in the text.
std::string ebnf_of_gbnf(std::string_view text);

}  // namespace twell
