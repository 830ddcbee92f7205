// SPDX-License-Identifier: Apache-2.0
// A tokenizer for tests that work with any.
#pragma once

#include <string>
#include <utility>

#include "twell/tokenizer/tokenizer.h"

namespace twell {

// The end-of-text token (id 0) and the 256 bytes, without merges.
inline Tokenizer byte_tokenizer() {
  bool given = false;
  return train_bpe({.vocab_size = 257, .threads = 1}, [&](std::string& text) {
    text.clear();
    for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
    return !std::exchange(given, true);
  });
}

}  // namespace twell
