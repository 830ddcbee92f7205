// SPDX-License-Identifier: Apache-2.0
// The regular expressions of tokenizer.json, which are written for Oniguruma, run by PCRE2 (JIT).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace twell {

// The same pattern for PCRE2. InputError, naming the construct, for whatever the two libraries read
// differently (nested classes, \w, \h, {n,m}+ and so on): a pattern either means the same or is
// refused. \s becomes Unicode's White_Space, spelled out.
std::string translate_regex(std::string_view pattern);

class PreTokenizerRegex {
 public:
  struct Match {
    size_t begin = 0, end = 0;
  };
  // What one thread needs to run any of these expressions.
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

  // Finds the first match at or after `from`. text must be valid UTF-8. InputError when PCRE2 gives
  // up on a pattern that backtracks without end.
  bool find(std::string_view text, size_t from, Scratch& scratch, Match& match) const;

 private:
  std::shared_ptr<const void> code_;  // pcre2_code, read-only and shared between threads
};

}  // namespace twell
