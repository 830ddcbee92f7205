// SPDX-License-Identifier: Apache-2.0
// Byte pair encoding of one pre-token: starts from its symbols (the ids of its bytes or characters)
// and applies the merge of lowest rank, leftmost first, until none applies.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "twell/tokenizer/bpe_pair_map.h"

namespace twell {

// Finds a word among strings without a copy of it.
struct WordHash {
  using is_transparent = void;
  size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};

// A merge replaces two adjacent ids by one. Its rank is its index in the list of merges.
struct BpeMerge {
  int32_t left = 0, right = 0, result = 0;
};

class Bpe {
 public:
  // byte_ids: id of each single byte; bytes with a negative id are dropped.
  Bpe(const std::array<int32_t, 256>& byte_ids, std::vector<BpeMerge> merges);

  const std::vector<BpeMerge>& merges() const { return merges_; }

  // Working memory, reused from call to call.
  struct Scratch {
    struct Symbol {
      int32_t id;    // -1 once merged into an earlier symbol
      int32_t rank;  // of merging with the next symbol, or kNoMerge
      uint32_t previous, next;
    };
    std::vector<int32_t> ids;  // ids of a word's bytes
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;  // rank << 32 | position of each mergeable pair
  };

  // Appends the ids of one pre-token, given as bytes or as symbols (none negative).
  // O(n log n) in its length.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  void merge(std::span<const int32_t> symbols, Scratch& scratch, std::vector<int32_t>& out) const;

 private:
  static constexpr size_t kShortWord = 32;  // in symbols; a linear scan beats a heap up to here
  void merge_short(std::span<const int32_t> symbols, std::vector<int32_t>& out) const;
  void merge_long(std::span<const int32_t> symbols, Scratch& scratch,
                  std::vector<int32_t>& out) const;
  int32_t rank_of(int32_t left, int32_t right) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<BpeMerge> merges_;
  BpePairMap ranks_;
};

}  // namespace twell
