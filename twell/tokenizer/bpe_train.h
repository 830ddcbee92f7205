// SPDX-License-Identifier: Apache-2.0
// Learns the merges of a BPE from counted words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "twell/tokenizer/bpe.h"

namespace twell {

// Number of occurrences of each pre-token.
using WordCounts = std::unordered_map<std::string, int64_t, WordHash, std::equal_to<>>;

// Merges the most frequent adjacent pair of ids, of equals the one of lower ids, until `tokens` has
// vocab_size entries or no pair is left. tokens holds the bytes of each id, with the 256 single
// bytes from first_byte on; tokens before first_byte are never merged. A pair whose bytes are
// already a token is merged into it without growing tokens, or not merged if it is before
// first_byte.
std::vector<BpeMerge> learn_merges(const WordCounts& counts, size_t first_byte, size_t vocab_size,
                                   std::vector<std::string>& tokens);

}  // namespace twell
