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

#include "twell/base/context.h"
#include "twell/tokenizer/bpe.h"
#include "twell/tokenizer/pre_tokenizer.h"

namespace twell {

struct WordHash {
  using is_transparent = void;
  size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
// Number of occurrences of each pre-token.
using WordCounts = std::unordered_map<std::string, int64_t, WordHash, std::equal_to<>>;

class WordCounter {
 public:
  // Longer pre-tokens are counted in pieces of this many bytes: they are seldom words (base64,
  // genomes), and every merge in one would scan all of it.
  static constexpr size_t kLongestWord = 1024;

  WordCounter(Context& ctx, const PreTokenizer& pre_tokenizer, bool nfc);
  // Counts the words of a batch of texts on all of the context's threads.
  void add(const std::vector<std::string>& texts);
  WordCounts take();

 private:
  struct Worker {
    WordCounts counts;
    PreTokenizer::Scratch scratch;
    std::string normalized;
  };
  void count(std::string_view text, Worker& worker) const;

  Context& ctx_;
  const PreTokenizer& pre_tokenizer_;
  bool nfc_;
  std::vector<Worker> workers_;
};

// Merges the most frequent adjacent pair of ids, of equals the one of lower ids, until `tokens` has
// vocab_size entries or no pair is left. tokens holds the bytes of each id, with the 256 single
// bytes from first_byte on; tokens before first_byte are never merged. A pair whose bytes are
// already a token is merged into it without growing tokens, or not merged if it is before
// first_byte.
std::vector<BpeMerge> learn_merges(const WordCounts& counts, size_t first_byte, size_t vocab_size,
                                   std::vector<std::string>& tokens);

}  // namespace twell
