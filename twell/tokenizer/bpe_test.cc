// SPDX-License-Identifier: Apache-2.0
// Compares BPE with a merge-by-merge reference, on words below and above the short-word limit.
#include "twell/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "twell/base/rng.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/bpe_train.h"

namespace twell {
namespace {

// Applies merges naively: find the best pair, merge its leftmost occurrence, repeat.
std::vector<int32_t> reference(const std::array<int32_t, 256>& byte_ids,
                               const std::vector<BpeMerge>& merges, const std::string& word) {
  std::vector<int32_t> ids;
  for (const char byte : word) {
    const int32_t id = byte_ids[static_cast<uint8_t>(byte)];
    if (id >= 0) ids.push_back(id);
  }
  const auto is_pair = [&](size_t i, const BpeMerge& merge) {
    return ids[i] == merge.left && ids[i + 1] == merge.right;
  };
  for (size_t rank = 0; rank < merges.size();) {
    size_t i = 0;
    while (i + 1 < ids.size() && !is_pair(i, merges[rank])) ++i;
    if (i + 1 >= ids.size()) {
      ++rank;
      continue;
    }
    ids[i] = merges[rank].result;
    ids.erase(ids.begin() + static_cast<int64_t>(i) + 1);
    rank = 0;
  }
  return ids;
}

// A word of few distinct letters, so that pairs repeat and overlap.
std::string random_word(uint64_t stream, size_t size, uint64_t letters) {
  std::string word(size, 'a');
  for (size_t i = 0; i < size; ++i) {
    word[i] = static_cast<char>('a' + uniform_below(7, stream, i, letters));
  }
  return word;
}

struct Model {
  std::array<int32_t, 256> byte_ids;
  std::vector<std::string> tokens;
  std::vector<BpeMerge> merges;
};

Model random_model(uint64_t stream, size_t merges) {
  Model model;
  model.byte_ids.fill(-1);
  for (int32_t id = 0; id < 6; ++id) {
    model.byte_ids[static_cast<size_t>('a' + id)] = id;
    model.tokens.emplace_back(1, static_cast<char>('a' + id));
  }
  BpePairMap seen;
  for (uint64_t i = 0; model.merges.size() < merges; ++i) {
    const auto draw = [&](uint64_t k) {
      return static_cast<int32_t>(uniform_below(3, stream, 2 * i + k, model.tokens.size()));
    };
    const int32_t rank = static_cast<int32_t>(model.merges.size());
    const BpeMerge merge{draw(0), draw(1), static_cast<int32_t>(model.tokens.size())};
    if (seen.find_or_insert(merge.left, merge.right, rank) != rank) continue;
    const auto bytes = [&](int32_t id) { return model.tokens[static_cast<size_t>(id)]; };
    model.tokens.push_back(bytes(merge.left) + bytes(merge.right));
    model.merges.push_back(merge);
  }
  return model;
}

TEST(Bpe, AgreesWithTheReferenceOnRandomModels) {
  for (uint64_t stream = 0; stream < 20; ++stream) {
    const Model model = random_model(stream, 5 * stream);
    const Bpe bpe(model.byte_ids, model.merges);
    Bpe::Scratch scratch;
    for (size_t size = 0; size < 100; ++size) {
      // "g" has no token, so it is dropped and its neighbours become adjacent.
      const std::string word = random_word(stream * 100 + size, size, 2 + size % 6);
      std::vector<int32_t> ids;
      bpe.encode(word, scratch, ids);
      EXPECT_EQ(ids, reference(model.byte_ids, model.merges, word)) << word;
    }
  }
}

TEST(Bpe, EqualRanksGoLeftToRight) {
  const Model model{{}, {}, {}};
  std::array<int32_t, 256> byte_ids = model.byte_ids;
  byte_ids['a'] = 0;
  const Bpe bpe(byte_ids, {{0, 0, 1}, {1, 1, 2}});
  for (const size_t size : {7, 71}) {
    std::vector<int32_t> ids;
    Bpe::Scratch scratch;
    bpe.encode(std::string(size, 'a'), scratch, ids);
    std::vector<int32_t> expected(size / 4, 2);
    expected.insert(expected.end(), {1, 0});
    EXPECT_EQ(ids, expected);
  }
}

TEST(BpeAlphabet, MapsEveryByteToOneCharacterAndBack) {
  std::string bytes;
  for (const uint8_t byte : byte_alphabet_order()) bytes += static_cast<char>(byte);
  ASSERT_EQ(bytes.size(), 256);
  EXPECT_EQ(bytes.substr(0, 3), "!\"#");
  std::string back;
  ASSERT_TRUE(alphabet_to_bytes(bytes_to_alphabet(bytes), back));
  EXPECT_EQ(back, bytes);
  EXPECT_EQ(bytes_to_alphabet("\n the"), "\u010a\u0120the");
  for (const std::string outside : {" ", "\n", "\u0144", "\u4e2d", "\u00ad", "a\xc4"}) {
    EXPECT_FALSE(alphabet_to_bytes(outside, back)) << outside;
  }
}

// Trains naively: recounts every pair for each merge.
std::vector<std::string> reference_training(const WordCounts& counts, size_t merges) {
  std::vector<std::string> tokens;
  std::array<int32_t, 256> rank;  // ties are won by the lower ids
  for (const uint8_t byte : byte_alphabet_order()) {
    rank[byte] = static_cast<int32_t>(tokens.size());
    tokens.emplace_back(1, static_cast<char>(byte));
  }
  std::vector<std::pair<std::vector<int32_t>, int64_t>> words;
  for (const auto& [word, count] : counts) {
    std::vector<int32_t> ids;
    for (const char byte : word) ids.push_back(rank[static_cast<uint8_t>(byte)]);
    words.emplace_back(ids, count);
  }
  while (merges-- > 0) {
    std::map<std::pair<int32_t, int32_t>, int64_t> pairs;
    for (const auto& [ids, count] : words) {
      for (size_t i = 0; i + 1 < ids.size(); ++i) pairs[{ids[i], ids[i + 1]}] += count;
    }
    auto best = pairs.begin();
    for (auto it = pairs.begin(); it != pairs.end(); ++it) {
      if (it->second > best->second) best = it;
    }
    if (best == pairs.end()) break;
    const auto [left, right] = best->first;
    const std::string bytes =
        tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    const auto known = std::find(tokens.begin(), tokens.end(), bytes);
    const int32_t result = static_cast<int32_t>(known - tokens.begin());
    if (known == tokens.end()) tokens.push_back(bytes);
    for (auto& [ids, count] : words) {
      for (size_t i = 0; i + 1 < ids.size(); ++i) {
        if (ids[i] != left || ids[i + 1] != right) continue;
        ids[i] = result;
        ids.erase(ids.begin() + static_cast<int64_t>(i) + 1);
      }
    }
  }
  return tokens;
}

TEST(LearnMerges, AgreesWithCountingAnew) {
  for (uint64_t stream = 0; stream < 30; ++stream) {
    WordCounts counts;
    for (uint64_t w = 0; w < 40; ++w) {
      const uint64_t size = 1 + uniform_below(4, stream, w, 12);
      // Few letters and small counts give many ties and runs of one letter.
      counts[random_word(stream * 1000 + w, size, 1 + w % 4)] +=
          1 + static_cast<int64_t>(uniform_below(5, stream, w, 3));
    }
    std::vector<std::string> tokens = reference_training({}, 0);
    const std::vector<BpeMerge> merges = learn_merges(counts, 0, 256 + 50, tokens);
    EXPECT_EQ(tokens, reference_training(counts, merges.size()));
  }
}

TEST(LearnMerges, NeverMakesASpecialToken) {
  std::vector<std::string> tokens = reference_training({}, 0);
  tokens.insert(tokens.begin(), "ab");
  learn_merges({{"abab", 5}}, 1, 300, tokens);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), "ab"), 1);
  EXPECT_EQ(tokens.back(), "abab");
}

}  // namespace
}  // namespace twell
