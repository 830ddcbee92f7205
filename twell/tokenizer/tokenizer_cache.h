// SPDX-License-Identifier: Apache-2.0
// Caches the ids of recent pre-tokens, because text repeats its words, ruled lines and indents.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace twell {

// Caches short words in a direct-mapped table of cache lines: no allocation per word, and a
// colliding word replaces the older one.
class WordCache {
 public:
  static constexpr size_t kLongestWord = 30;
  static constexpr size_t kMostIds = 8;

  WordCache() : slots_(kSlots) {}

  struct Slot {
    uint8_t length = 0;  // bytes of the word; 0 for an empty slot
    uint8_t count = 0;   // number of its ids
    std::array<char, kLongestWord> word;
    std::array<int32_t, kMostIds> ids;

    bool holds(std::string_view text) const {
      return length == text.size() && std::memcmp(word.data(), text.data(), text.size()) == 0;
    }
    void set(std::string_view text, std::span<const int32_t> values) {
      length = static_cast<uint8_t>(text.size());
      count = static_cast<uint8_t>(values.size());
      std::copy(text.begin(), text.end(), word.begin());
      std::copy(values.begin(), values.end(), ids.begin());
    }
  };
  static_assert(sizeof(Slot) == 64);

  // The slot for this word of 1 to kLongestWord bytes, which may hold another word.
  Slot& slot_of(std::string_view word) { return slots_[hash(word) % kSlots]; }

 private:
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB, to stay in a core's private cache

  template <typename T>
  static uint64_t load(const char* data) {
    T value;
    std::memcpy(&value, data, sizeof(value));
    return value;
  }
  static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
    return hash ^ hash >> 32;
  }
  static uint64_t hash(std::string_view word) {
    const char* data = word.data();
    const size_t size = word.size();
    const uint64_t seed = size;
    if (size >= 8) {
      uint64_t h = mix(seed, load<uint64_t>(data));
      for (size_t i = 8; i + 8 < size; i += 8) h = mix(h, load<uint64_t>(data + i));
      return mix(h, load<uint64_t>(data + size - 8));
    }
    if (size >= 4) {
      return mix(seed, load<uint32_t>(data) << 32 | load<uint32_t>(data + size - 4));
    }
    const auto byte = [&](size_t i) {
      return static_cast<uint64_t>(static_cast<uint8_t>(data[i]));
    };
    return mix(seed, byte(0) << 16 | byte(size / 2) << 8 | byte(size - 1));
  }

  std::vector<Slot> slots_;
};

// Caches long words: runs of spaces, dashes and the like, of which a text has few distinct ones.
class LongWordCache {
 public:
  static constexpr size_t kLongestWord = 512;

  // Returns nullptr when the word is not cached.
  const std::vector<int32_t>* find(std::string_view word) const {
    const auto entry = ids_.find(word);
    return entry == ids_.end() ? nullptr : &entry->second;
  }
  void set(std::string_view word, std::span<const int32_t> ids) {
    if (ids_.size() == kMostWords) ids_.clear();
    ids_.emplace(word, std::vector<int32_t>(ids.begin(), ids.end()));
  }

 private:
  static constexpr size_t kMostWords = 4096;  // at most 10 MiB of ids
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
  };
  std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>> ids_;
};

}  // namespace twell
