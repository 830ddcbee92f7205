// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int32_t kNoMerge = std::numeric_limits<int32_t>::max();
constexpr uint32_t kNoSymbol = std::numeric_limits<uint32_t>::max();

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, std::vector<BpeMerge> merges)
    : byte_ids_(byte_ids), merges_(std::move(merges)), ranks_(merges_.size()) {
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    ranks_.find_or_insert(merges_[rank].left, merges_[rank].right, static_cast<int32_t>(rank));
  }
}

int32_t Bpe::rank_of(int32_t left, int32_t right) const {
  const int32_t rank = ranks_.find(left, right);
  return rank == BpePairMap::kNone ? kNoMerge : rank;
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  scratch.ids.clear();
  for (const char byte : word) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(byte)];
    if (id >= 0) scratch.ids.push_back(id);
  }
  merge(scratch.ids, scratch, out);
}

void Bpe::merge(std::span<const int32_t> symbols, Scratch& scratch,
                std::vector<int32_t>& out) const {
  if (symbols.size() <= kShortWord) {
    merge_short(symbols, out);
  } else {
    merge_long(symbols, scratch, out);
  }
}

void Bpe::merge_short(std::span<const int32_t> symbols, std::vector<int32_t>& out) const {
  std::array<int32_t, kShortWord> ids;
  std::array<int32_t, kShortWord> ranks;  // rank of merging symbols i and i + 1
  size_t size = symbols.size();
  std::copy(symbols.begin(), symbols.end(), ids.begin());
  for (size_t i = 0; i + 1 < size; ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);

  while (size > 1) {
    const size_t pairs = size - 1;
    const size_t best =
        static_cast<size_t>(std::min_element(ranks.begin(), ranks.begin() + pairs) - ranks.begin());
    if (ranks[best] == kNoMerge) break;
    ids[best] = merges_[static_cast<size_t>(ranks[best])].result;
    std::copy(ids.begin() + best + 2, ids.begin() + size, ids.begin() + best + 1);
    std::copy(ranks.begin() + best + 1, ranks.begin() + pairs, ranks.begin() + best);
    --size;
    if (best > 0) ranks[best - 1] = rank_of(ids[best - 1], ids[best]);
    if (best + 1 < size) ranks[best] = rank_of(ids[best], ids[best + 1]);
  }
  out.insert(out.end(), ids.begin(), ids.begin() + size);
}

void Bpe::merge_long(std::span<const int32_t> word, Scratch& scratch,
                     std::vector<int32_t>& out) const {
  TWELL_REQUIRE(word.size() < kNoSymbol,
                "a text holds {} bytes without a break; at most {} can be tokenized", word.size(),
                kNoSymbol - 1);
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  std::vector<uint64_t>& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  for (const int32_t id : word) {
    const uint32_t position = static_cast<uint32_t>(symbols.size());
    symbols.push_back({id, kNoMerge, position == 0 ? kNoSymbol : position - 1, position + 1});
  }
  symbols.back().next = kNoSymbol;

  // Sets the rank of the pair that starts at `position`, which makes its older heap entries stale.
  const auto rank_pair = [&](uint32_t position) {
    Scratch::Symbol& symbol = symbols[position];
    symbol.rank = symbol.next == kNoSymbol ? kNoMerge : rank_of(symbol.id, symbols[symbol.next].id);
    if (symbol.rank == kNoMerge) return false;
    heap.push_back(static_cast<uint64_t>(symbol.rank) << 32 | position);
    return true;
  };
  // The smallest entry is on top: the lowest rank, and of equal ranks the leftmost pair.
  const std::greater<uint64_t> after;
  for (uint32_t i = 0; i < symbols.size(); ++i) rank_pair(i);
  std::make_heap(heap.begin(), heap.end(), after);

  while (!heap.empty()) {
    const uint32_t position = static_cast<uint32_t>(heap.front());
    const int32_t rank = static_cast<int32_t>(heap.front() >> 32);
    std::pop_heap(heap.begin(), heap.end(), after);
    heap.pop_back();
    Scratch::Symbol& symbol = symbols[position];
    if (symbol.id < 0 || symbol.rank != rank) continue;

    Scratch::Symbol& eaten = symbols[symbol.next];
    symbol.id = merges_[static_cast<size_t>(rank)].result;
    symbol.next = eaten.next;
    eaten.id = -1;
    if (symbol.next != kNoSymbol) symbols[symbol.next].previous = position;
    if (rank_pair(position)) std::push_heap(heap.begin(), heap.end(), after);
    if (symbol.previous != kNoSymbol && rank_pair(symbol.previous)) {
      std::push_heap(heap.begin(), heap.end(), after);
    }
  }
  for (uint32_t i = 0; i != kNoSymbol; i = symbols[i].next) out.push_back(symbols[i].id);
}

}  // namespace twell
