// SPDX-License-Identifier: Apache-2.0
// Converts generated tokens to text incrementally, without incomplete UTF-8 characters or parts of
// stop strings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace twell {

// Length of the longest suffix of text that is a proper prefix of stop.
size_t partial_match(std::string_view text, std::string_view stop);

class GeneratedText {
 public:
  explicit GeneratedText(std::vector<std::string> stop_strings);

  // Adds a token's bytes; returns the text that is final now.
  std::string push(std::string_view bytes);
  // Call at the end of generation: returns the text held back; empty after a stop.
  std::string finish();
  // Whether a stop string has appeared; it and all text after it are omitted.
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stop_strings_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace twell
