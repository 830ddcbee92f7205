// SPDX-License-Identifier: Apache-2.0
// Speculation from the prompt: guesses the next tokens of a sequence from its own text, and how
// many of them to have checked. Summaries with quotes, edits of code and lists repeat what they
// read; a step that checks some guessed tokens costs little more than one that draws a token.
// Source: prompt lookup decoding (Saxena 2023); Leviathan et al. 2023 for the check.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

namespace twell {

inline constexpr int64_t kMostDraft = 64;  // tokens guessed for a sequence in a step

// Where a sequence's last tokens stood before.
class PromptLookup {
 public:
  static constexpr int64_t kGram = 3;  // tokens that must be equal

  // Up to `most` tokens that followed the context's last kGram tokens where they stood before, the
  // last time; where that reaches the context's end, it goes on from what it guessed. A place that
  // the last guess came from and that was right goes on counting. None: there is no such place.
  // context: that of the last call, or it with more tokens behind.
  std::vector<int32_t> guess(std::span<const int32_t> context, int64_t most);

 private:
  int64_t find(std::span<const int32_t> context);

  std::unordered_map<uint64_t, int64_t> behind_;  // of a gram's hash: where its last place ends
  int64_t known_ = kGram;                         // grams that end before this one are in there
  int64_t source_ = -1;                           // the place of the last guess,
  int64_t length_ = 0;                            // and how long the context was
};

// How many tokens to guess: the more, the more of the last ones were right. What wrong guesses cost
// is bounded, whatever the text is: a balance in tokens holds the gains less the costs, and may
// fall by one token for every fifty.
class DraftLength {
 public:
  explicit DraftLength(int64_t most) : most_(most) {}

  // cost(count): tokens that a step with so many guessed ones delays.
  int64_t next(const std::function<double(int64_t count)>& cost) const;
  // A step has guessed `count` tokens, of which so many were right, or none.
  void took(int64_t count, int64_t right, double cost);

 private:
  static constexpr double kShare = 0.02;  // of the tokens may be lost
  static constexpr double kCredit = 1.0;  // at the beginning
  static constexpr double kMostKept = 4.0;

  int64_t most_;
  int64_t length_ = 4;
  double balance_ = kCredit;
};

}  // namespace twell
