// SPDX-License-Identifier: Apache-2.0
// Turns generated tokens into text as they come: never half a UTF-8 character, never a part of a
// stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace twell {

class TextStream {
 public:
  explicit TextStream(std::vector<std::string> stop_strings);

  // Adds a token's bytes; returns the text that can be shown now.
  std::string push(std::string_view bytes);
  // What was held back, at the end of the generation (nothing after a stop).
  std::string finish();
  // A stop string has appeared; it and all after it are left out.
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stop_strings_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace twell
