// SPDX-License-Identifier: Apache-2.0
// Runs the regular expressions of tokenizer.json, written for Oniguruma, with PCRE2 (JIT).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace twell {

// Translates a pattern for PCRE2. InputError, naming the construct, for anything that the libraries
// interpret differently (nested classes, \w, \h, {n,m}+ and so on), so a translated pattern has the
// same meaning. \s becomes the list of Unicode's White_Space.
std::string translate_regex(std::string_view pattern);

class PreTokenizerRegex {
 public:
  struct Match {
    size_t begin = 0, end = 0;
  };
  // Working memory of one thread for running any of these expressions.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class PreTokenizerRegex;
    struct State;
    std::unique_ptr<State> state_;
  };

  // InputError when the pattern does not compile or can match nothing at all.
  explicit PreTokenizerRegex(std::string_view pattern);

  // Finds the first match that starts at or after `from`. text must be valid UTF-8. InputError when
  // PCRE2 gives up on a pattern that backtracks without end.
  bool find(std::string_view text, size_t from, Scratch& scratch, Match& match) const;

 private:
  std::shared_ptr<const void> code_;  // pcre2_code, read-only and shared between threads
};

}  // namespace twell
