// SPDX-License-Identifier: Apache-2.0
// A tokenizer of any size for models without one: end of text, the bytes, punctuation as JSON has
// it, and letters in all combinations, with and without a blank in front.
#pragma once

#include <cstdint>

#include "twell/tokenizer/tokenizer.h"

namespace twell {

// vocab: 400 to 300,000 tokens.
Tokenizer synthetic_tokenizer(int64_t vocab);

}  // namespace twell
