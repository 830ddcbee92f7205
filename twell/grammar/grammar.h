// SPDX-License-Identifier: Apache-2.0
// Grammars that a text is drawn by: JSON schemas, EBNF, and the forms of tool calls.
//
// In: a tokenizer's vocabulary, each token as its raw bytes, and texts of grammars, which may come
// from strangers. Out: masks of the tokens that may come next, exact to the byte: a token is
// allowed if and only if the text so far and its bytes begin a text of the grammar; tokens that end
// a text are allowed if and only if the text so far is one.
//
// Grammars are compiled by XGrammar on a thread of their own, one at a time, and cached by their
// text. A build without it refuses all of them (scripts/setup.sh fetches its sources).
// Source: XGrammar, https://github.com/mlc-ai/xgrammar
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"
#include "twell/grammar/token_filter.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct GrammarText {
  enum class Kind {
    kJson,        // any JSON object; the text is empty
    kJsonSchema,  // see json_schema.h
    kEbnf,  // rules "name ::= ..." with character classes, (...), |, ?, *, +, {n,m}; "root" is
            // the text; see gbnf.h
    kTags,  // XGrammar's structural tags, which the server makes for calls of tools
  };
  Kind kind = Kind::kJson;
  std::string text;

  auto operator<=>(const GrammarText&) const = default;
};

// The compiler is at work on other grammars: try again later.
class GrammarBusy : public Error {
 public:
  using Error::Error;
};

// A grammar for one vocabulary. Copies share it.
class Grammar {
 public:
  struct Impl;
  explicit Grammar(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  // A sequence at its beginning. end_tokens: those that may end it, any of which the compiler was
  // told of; with none the text ends as soon as it is complete.
  std::unique_ptr<TokenFilter> filter(std::span<const int32_t> end_tokens) const;
  int64_t bytes() const;

 private:
  std::shared_ptr<const Impl> impl_;
};

// A grammar that was asked for and is being compiled, or is there. Used by one thread at a time.
class GrammarOrder {
 public:
  struct Impl;
  explicit GrammarOrder(std::unique_ptr<Impl> impl);
  ~GrammarOrder();  // from here on `ready` is not called
  GrammarOrder(GrammarOrder&&) noexcept;

  bool is_ready() const;
  // Calls `ready` on any thread when the result is there, at once if it is. Called once.
  void notify(std::function<void()> ready);
  // Waits for the result. InputError with the reason for a grammar that is refused, also one that
  // takes too long. GrammarBusy when others are being compiled for too long.
  Grammar get();

 private:
  std::unique_ptr<Impl> impl_;
};

struct GrammarOptions {
  // Tokens that end a text. They are never part of one, even if their bytes would fit.
  std::vector<int32_t> end_tokens;
  // Special tokens that may be part of a text, such as "<tool_call>"; all other special tokens
  // are not.
  std::vector<std::string> marks;
  size_t most_text_bytes = 256 << 10;
  std::chrono::milliseconds most_time{10000};  // from an order to its result
  int64_t most_cached_bytes = int64_t{256} << 20;
  size_t most_cached = 64;
};

// May be used by several threads at once.
class GrammarCompiler {
 public:
  GrammarCompiler(const Tokenizer& tokenizer, GrammarOptions options);
  ~GrammarCompiler();  // waits for grammars being compiled, for 5 s at most
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // Returns at once. InputError for a text that is too long, GrammarBusy when too many wait.
  GrammarOrder order(const GrammarText& text);
  Grammar compile(const GrammarText& text) { return order(text).get(); }

  static bool available();  // false: every grammar is refused

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
