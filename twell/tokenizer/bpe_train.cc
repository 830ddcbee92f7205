// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/bpe_train.h"

#include <algorithm>
#include <array>
#include <queue>
#include <span>
#include <utility>

#include "twell/tokenizer/bpe_pair_map.h"

namespace twell {
namespace {

class MergeLearner {
 public:
  MergeLearner(const WordCounts& counts, size_t first_byte, std::vector<std::string>& tokens)
      : tokens_(tokens), first_byte_(first_byte) {
    for (size_t id = 0; id < tokens.size(); ++id) {
      ids_.emplace(tokens[id], static_cast<int32_t>(id));
    }
    read_words(counts);
    for (uint32_t pair = 0; pair < pairs_.size(); ++pair) push(pair);
  }

  std::vector<BpeMerge> run(size_t vocab_size) {
    std::vector<BpeMerge> merges;
    while (tokens_.size() < vocab_size && !queue_.empty()) {
      const Candidate best = queue_.top();
      queue_.pop();
      Pair& pair = pairs_[best.pair];
      if (pair.count != best.count) {
        push(best.pair);  // its count has changed since it was queued
        continue;
      }
      const int32_t result = result_of(pair);
      if (result < 0) continue;
      merges.push_back({pair.left, pair.right, result});
      apply(best.pair, merges.back());
    }
    return merges;
  }

 private:
  struct Word {
    size_t begin;   // index of its first id in symbols_
    uint32_t size;  // number of ids, which merges reduce
    int64_t count;
  };
  struct Pair {
    int32_t left, right;
    int64_t count;
    std::vector<uint32_t> words;  // words that contain, or contained, the pair
  };
  struct Candidate {
    int64_t count;
    uint64_t key;  // the pair's ids, for ties
    uint32_t pair;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : key > other.key;
    }
  };

  void read_words(const WordCounts& counts) {
    std::array<int32_t, 256> byte_ids;
    for (size_t id = first_byte_; id < first_byte_ + byte_ids.size(); ++id) {
      byte_ids[static_cast<uint8_t>(tokens_[id][0])] = static_cast<int32_t>(id);
    }
    for (const auto& [word, count] : counts) {
      const uint32_t index = static_cast<uint32_t>(words_.size());
      const size_t begin = symbols_.size();
      words_.push_back({begin, static_cast<uint32_t>(word.size()), count});
      for (const char byte : word) symbols_.push_back(byte_ids[static_cast<uint8_t>(byte)]);
      for (size_t i = begin; i + 1 < symbols_.size(); ++i) {
        change(symbols_[i], symbols_[i + 1], count, index);
      }
    }
  }

  // Adds `by` to a pair's count; if positive, adds `word` to its words. Returns the pair's index.
  uint32_t change(int32_t left, int32_t right, int64_t by, uint32_t word) {
    const int32_t next = static_cast<int32_t>(pairs_.size());
    const uint32_t index = static_cast<uint32_t>(index_.find_or_insert(left, right, next));
    if (index == pairs_.size()) pairs_.push_back({left, right, 0, {}});
    Pair& pair = pairs_[index];
    pair.count += by;
    if (by > 0 && (pair.words.empty() || pair.words.back() != word)) pair.words.push_back(word);
    return index;
  }

  void push(uint32_t index) {
    const Pair& pair = pairs_[index];
    if (pair.count > 0) {
      queue_.push({pair.count, BpePairMap::key(pair.left, pair.right), index});
    }
  }

  // Returns the token that the pair becomes, or -1 when it must not be merged.
  int32_t result_of(const Pair& pair) {
    std::string bytes =
        tokens_[static_cast<size_t>(pair.left)] + tokens_[static_cast<size_t>(pair.right)];
    const int32_t next = static_cast<int32_t>(tokens_.size());
    const auto [entry, is_new] = ids_.emplace(bytes, next);
    if (is_new) tokens_.push_back(std::move(bytes));
    return entry->second < static_cast<int32_t>(first_byte_) ? -1 : entry->second;
  }

  void apply(uint32_t index, const BpeMerge& merge) {
    const std::vector<uint32_t> words = std::exchange(pairs_[index].words, {});
    gained_.clear();
    for (const uint32_t word : words) merge_in(word, merge);
    std::sort(gained_.begin(), gained_.end());
    gained_.erase(std::unique(gained_.begin(), gained_.end()), gained_.end());
    for (const uint32_t pair : gained_) push(pair);
  }

  void merge_in(uint32_t index, const BpeMerge& merge) {
    Word& word = words_[index];
    const std::span<int32_t> ids(symbols_.data() + word.begin, word.size);
    size_t size = 0;  // number of ids written
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i + 1 == ids.size() || ids[i] != merge.left || ids[i + 1] != merge.right) {
        ids[size++] = ids[i];
        continue;
      }
      change(merge.left, merge.right, -word.count, index);
      if (size > 0) {
        change(ids[size - 1], merge.left, -word.count, index);
        gained_.push_back(change(ids[size - 1], merge.result, word.count, index));
      }
      if (i + 2 < ids.size()) {
        change(merge.right, ids[i + 2], -word.count, index);
        gained_.push_back(change(merge.result, ids[i + 2], word.count, index));
      }
      ids[size++] = merge.result;
      ++i;
    }
    word.size = static_cast<uint32_t>(size);
  }

  std::vector<std::string>& tokens_;
  size_t first_byte_;
  std::unordered_map<std::string, int32_t> ids_;  // ids of tokens_ by their bytes
  std::vector<Word> words_;
  std::vector<int32_t> symbols_;  // the ids of all words
  std::vector<Pair> pairs_;
  BpePairMap index_;  // index in pairs_ of each pair
  std::priority_queue<Candidate> queue_;
  std::vector<uint32_t> gained_;  // pairs that the current merge made more frequent
};

}  // namespace

std::vector<BpeMerge> learn_merges(const WordCounts& counts, size_t first_byte, size_t vocab_size,
                                   std::vector<std::string>& tokens) {
  return MergeLearner(counts, first_byte, tokens).run(vocab_size);
}

}  // namespace twell
