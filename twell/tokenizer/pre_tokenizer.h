// SPDX-License-Identifier: Apache-2.0
// Cuts text into pre-tokens, the pieces that BPE merges within.
//
// The steps apply in order, each to the pieces of the one before. Regular expressions need valid
// UTF-8, so a text is first cut into maximal valid and invalid stretches: an invalid stretch is one
// pre-token of raw bytes, and the text on either side of it is handled as a separate text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "twell/tokenizer/pre_tokenizer_regex.h"

namespace twell {

// The expressions of the "ByteLevel" pre-tokenizer (GPT-2) and of Llama-3's and Qwen2's files.
extern const std::string_view kGpt2Pattern;
extern const std::string_view kLlama3Pattern;
extern const std::string_view kQwen2Pattern;

struct PreTokenizerStep {
  enum class Kind {
    kGpt2,       // ByteLevel with use_regex: kGpt2Pattern
    kDigits,     // every numeral (general category N) is a piece
    kDigitRuns,  // every run of numerals is a piece
    kSplit,      // Split with behaviour "Isolated": matches, and the text between them
  };
  Kind kind = Kind::kGpt2;
  std::string pattern = {};  // for kSplit, as in tokenizer.json
};

// The stretch at the start of text that is all valid UTF-8 or all invalid bytes.
struct Utf8Stretch {
  size_t size = 0;
  bool valid = true;
};
Utf8Stretch next_utf8_stretch(std::string_view text);

class PreTokenizer {
 public:
  using Scratch = PreTokenizerRegex::Scratch;

  // InputError, naming the construct, for an unsupported pattern.
  explicit PreTokenizer(const std::vector<PreTokenizerStep>& steps);

  // Calls sink(std::string_view piece) for the pieces in order; their concatenation is text.
  template <typename Sink>
  void split(std::string_view text, Scratch& scratch, const Sink& sink) const {
    while (!text.empty()) {
      const Utf8Stretch stretch = next_utf8_stretch(text);
      const std::string_view part = text.substr(0, stretch.size);
      if (stretch.valid) {
        split_from(0, part, scratch, sink);
      } else {
        sink(part);
      }
      text.remove_prefix(stretch.size);
    }
  }

 private:
  template <typename Sink>
  void split_from(size_t step, std::string_view text, Scratch& scratch, const Sink& sink) const {
    if (step == steps_.size()) return sink(text);
    PreTokenizerRegex::Match match;
    size_t done = 0;
    while (done < text.size() && steps_[step].find(text, done, scratch, match)) {
      if (match.begin > done) {
        split_from(step + 1, text.substr(done, match.begin - done), scratch, sink);
      }
      split_from(step + 1, text.substr(match.begin, match.end - match.begin), scratch, sink);
      done = match.end;
    }
    if (done < text.size()) split_from(step + 1, text.substr(done), scratch, sink);
  }

  std::vector<PreTokenizerRegex> steps_;
};

}  // namespace twell
