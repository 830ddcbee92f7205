// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/block_manager.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace {

// The finalizer of splitmix64.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t hash_of(uint64_t before, std::span<const int32_t> tokens) {
  uint64_t hash = mixed(before + 0x9E3779B97F4A7C15u);
  for (const int32_t token : tokens) hash = mixed(hash ^ static_cast<uint32_t>(token));
  return hash;
}

}  // namespace

BlockManager::BlockManager(int64_t blocks, int64_t block_tokens, int64_t sequences)
    : block_tokens_(block_tokens) {
  TWELL_REQUIRE(blocks >= 1 && blocks <= std::numeric_limits<int32_t>::max(),
                "a cache of {} blocks: at least one and at most {} are possible", blocks,
                std::numeric_limits<int32_t>::max());
  TWELL_REQUIRE(block_tokens >= 1, "a block of {} tokens", block_tokens);
  TWELL_REQUIRE(sequences >= 1, "a cache needs at least one sequence, got {}", sequences);
  blocks_.resize(static_cast<size_t>(blocks));
  tokens_.resize(static_cast<size_t>(blocks * block_tokens));
  sequences_.resize(static_cast<size_t>(sequences));
  for (int64_t block = blocks; block > 0; --block) {
    free_.push_back(static_cast<int32_t>(block - 1));
  }
}

const BlockManager::Sequence& BlockManager::at(int64_t sequence) const {
  TWELL_CHECK(sequence >= 0 && sequence < std::ssize(sequences_), "sequence {} of {}", sequence,
              sequences_.size());
  return sequences_[static_cast<size_t>(sequence)];
}

BlockManager::Sequence& BlockManager::at(int64_t sequence) {
  return const_cast<Sequence&>(std::as_const(*this).at(sequence));
}

std::span<int32_t> BlockManager::tokens_of(int32_t block) {
  return std::span(tokens_).subspan(static_cast<size_t>(block * block_tokens_),
                                    static_cast<size_t>(block_tokens_));
}

int32_t BlockManager::find(Text before, std::span<const int32_t> tokens) {
  const auto [begin, end] = by_hash_.equal_range(hash_of(before, tokens));
  for (auto it = begin; it != end; ++it) {
    if (blocks_[static_cast<size_t>(it->second)].before != before) continue;
    if (std::ranges::equal(tokens_of(it->second), tokens)) return it->second;
  }
  return -1;
}

int64_t BlockManager::start(int64_t number, std::span<const int32_t> ids) {
  Sequence& sequence = at(number);
  TWELL_CHECK(sequence.length == 0 && sequence.table.empty(), "sequence {} is not empty", number);
  while (sequence.length + block_tokens_ < std::ssize(ids)) {
    const int32_t block = find(sequence.text, ids.subspan(static_cast<size_t>(sequence.length),
                                                          static_cast<size_t>(block_tokens_)));
    if (block < 0) break;
    refer(block);
    sequence.table.push_back(block);
    sequence.text = blocks_[static_cast<size_t>(block)].text;
    sequence.length += block_tokens_;
  }
  return sequence.length;
}

bool BlockManager::reserve(int64_t number, int64_t tokens) {
  Sequence& sequence = at(number);
  const int64_t needed = (sequence.length + tokens + block_tokens_ - 1) / block_tokens_;
  if (needed - std::ssize(sequence.table) > available()) return false;
  while (std::ssize(sequence.table) < needed) sequence.table.push_back(take());
  return true;
}

void BlockManager::append(int64_t number, std::span<const int32_t> ids) {
  Sequence& sequence = at(number);
  TWELL_CHECK(sequence.length + std::ssize(ids) <= std::ssize(sequence.table) * block_tokens_,
              "{} tokens behind {} in {} blocks of {}", ids.size(), sequence.length,
              sequence.table.size(), block_tokens_);
  for (const int32_t id : ids) {
    const int32_t block = sequence.table[static_cast<size_t>(sequence.length / block_tokens_)];
    tokens_of(block)[static_cast<size_t>(sequence.length % block_tokens_)] = id;
    if (++sequence.length % block_tokens_ == 0) filled(sequence, block);
  }
}

// The block can be found from now on, unless another one with the same text can.
void BlockManager::filled(Sequence& sequence, int32_t block) {
  const Text before = sequence.text;
  if (const int32_t same = find(before, tokens_of(block)); same >= 0) {
    sequence.text = blocks_[static_cast<size_t>(same)].text;
    return;
  }
  Block& own = blocks_[static_cast<size_t>(block)];
  own.before = before;
  own.text = sequence.text = ++texts_;
  by_hash_.emplace(hash_of(before, tokens_of(block)), block);
}

void BlockManager::trim(int64_t number) {
  Sequence& sequence = at(number);
  const int64_t needed = (sequence.length + block_tokens_ - 1) / block_tokens_;
  while (std::ssize(sequence.table) > needed) {
    drop(sequence.table.back());
    sequence.table.pop_back();
  }
}

void BlockManager::release(int64_t number) {
  Sequence& sequence = at(number);
  // The end first, so that it is evicted before the beginning, without which it is of no use.
  for (auto block = sequence.table.rbegin(); block != sequence.table.rend(); ++block) drop(*block);
  sequence = {};
}

void BlockManager::discard(int64_t number) {
  for (const int32_t block : at(number).table) hide(block);
  release(number);
}

int32_t BlockManager::take() {
  if (free_.empty()) evict(oldest_);
  const int32_t block = free_.back();
  free_.pop_back();
  refer(block);
  return block;
}

void BlockManager::refer(int32_t number) {
  Block& block = blocks_[static_cast<size_t>(number)];
  if (block.references++ == 0 && block.text != 0) unlink(number);
}

void BlockManager::drop(int32_t number) {
  Block& block = blocks_[static_cast<size_t>(number)];
  if (--block.references > 0) return;
  if (block.text == 0) {
    free_.push_back(number);
    return;
  }
  block.older = newest_;
  block.newer = -1;
  (newest_ < 0 ? oldest_ : blocks_[static_cast<size_t>(newest_)].newer) = number;
  newest_ = number;
  ++cached_;
}

void BlockManager::unlink(int32_t number) {
  const Block& block = blocks_[static_cast<size_t>(number)];
  (block.older < 0 ? oldest_ : blocks_[static_cast<size_t>(block.older)].newer) = block.newer;
  (block.newer < 0 ? newest_ : blocks_[static_cast<size_t>(block.newer)].older) = block.older;
  --cached_;
}

void BlockManager::evict(int32_t number) {
  unlink(number);
  hide(number);
  blocks_[static_cast<size_t>(number)] = {};
  free_.push_back(number);
}

// The block cannot be found any more.
void BlockManager::hide(int32_t number) {
  Block& block = blocks_[static_cast<size_t>(number)];
  if (block.text == 0) return;
  const auto [begin, end] = by_hash_.equal_range(hash_of(block.before, tokens_of(number)));
  by_hash_.erase(
      std::find_if(begin, end, [&](const auto& entry) { return entry.second == number; }));
  block.text = 0;
}

}  // namespace twell
