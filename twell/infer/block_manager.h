// SPDX-License-Identifier: Apache-2.0
// Which blocks of a paged cache hold the tokens of which sequence. Plain bookkeeping: the cache
// itself (model/kv_cache.h) holds the keys and values.
//
// A block holds block_tokens() consecutive tokens of a sequence. Full blocks are shared: a sequence
// that starts with the same tokens refers to the blocks of an earlier one, because keys and values
// depend only on a token and those before it. A block that no sequence refers to any more stays
// until its memory is needed; the least recently used is evicted first, the end of a text before
// its beginning. Blocks are found by a hash of their tokens and of what precedes them, and compared
// token by token, so that no two texts are ever confused.
//
// The scheme of blocks and tables is that of PagedAttention (Kwon et al. 2023, section 4).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace twell {

class BlockManager {
 public:
  // For sequences 0..sequences-1, all empty.
  BlockManager(int64_t blocks, int64_t block_tokens, int64_t sequences);

  // The empty sequence takes over the cached blocks that hold the beginning of ids; returns their
  // number of tokens, always fewer than ids has.
  int64_t start(int64_t sequence, std::span<const int32_t> ids);
  // Gives the sequence blocks for so many more tokens. False when there are too few, evictable ones
  // included; nothing has changed then.
  bool reserve(int64_t sequence, int64_t tokens);
  // Adds tokens, for which reserve() made room and whose keys and values are in the cache now.
  void append(int64_t sequence, std::span<const int32_t> ids);
  // Gives back the blocks behind the sequence's tokens.
  void trim(int64_t sequence);
  void release(int64_t sequence);  // the sequence is empty afterwards
  // The same, and no later sequence takes over a block of it. Sequences that share one keep theirs.
  void discard(int64_t sequence);

  int64_t length(int64_t sequence) const { return at(sequence).length; }
  std::span<const int32_t> table(int64_t sequence) const { return at(sequence).table; }
  int64_t block_tokens() const { return block_tokens_; }
  int64_t blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t used() const { return blocks() - available(); }  // referred to by sequences
  int64_t cached() const { return cached_; }               // kept, evictable
  int64_t available() const { return static_cast<int64_t>(free_.size()) + cached_; }

 private:
  // A text is known by a number: that of its last full block. 0: the empty text.
  using Text = uint64_t;
  struct Block {
    int64_t references = 0;
    Text text = 0;                   // with which this block ends; 0: cannot be found
    Text before = 0;                 // in front of this block
    int32_t older = -1, newer = -1;  // neighbours in the order of eviction, while cached
  };
  struct Sequence {
    std::vector<int32_t> table;
    int64_t length = 0;
    Text text = 0;  // of its full blocks
  };

  const Sequence& at(int64_t sequence) const;
  Sequence& at(int64_t sequence);
  std::span<int32_t> tokens_of(int32_t block);
  int32_t find(Text before, std::span<const int32_t> tokens);  // -1: none
  int32_t take();
  void refer(int32_t block);
  void drop(int32_t block);
  void evict(int32_t block);
  void unlink(int32_t block);
  void hide(int32_t block);
  void filled(Sequence& sequence, int32_t block);

  int64_t block_tokens_;
  std::vector<Block> blocks_;
  std::vector<int32_t> tokens_;  // [blocks, block_tokens]
  std::vector<Sequence> sequences_;
  std::vector<int32_t> free_;                           // without content; the last is taken next
  std::unordered_multimap<uint64_t, int32_t> by_hash_;  // blocks that can be found
  int32_t oldest_ = -1, newest_ = -1;
  int64_t cached_ = 0;
  Text texts_ = 0;  // numbers given so far
};

}  // namespace twell
