// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/prompt_draft.h"

#include <algorithm>

namespace twell {
namespace {

uint64_t hash_of(std::span<const int32_t> gram) {
  uint64_t hash = 0;
  for (const int32_t id : gram) hash = (hash ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

// The gram that ends in front of position `end`.
std::span<const int32_t> gram_before(std::span<const int32_t> context, int64_t end) {
  return context.subspan(static_cast<size_t>(end - PromptLookup::kGram),
                         size_t{PromptLookup::kGram});
}

}  // namespace

int64_t PromptLookup::find(std::span<const int32_t> context) {
  const int64_t end = std::ssize(context);
  const auto repeats = [&](int64_t place) {
    return place >= kGram && place < end &&
           std::ranges::equal(gram_before(context, place), gram_before(context, end));
  };
  if (end < kGram) return -1;
  for (; known_ < end; ++known_) behind_[hash_of(gram_before(context, known_))] = known_;
  if (const int64_t next = source_ + end - length_; source_ >= 0 && repeats(next)) return next;
  const auto found = behind_.find(hash_of(gram_before(context, end)));
  return found != behind_.end() && repeats(found->second) ? found->second : -1;
}

std::vector<int32_t> PromptLookup::guess(std::span<const int32_t> context, int64_t most) {
  source_ = find(context);
  length_ = std::ssize(context);
  std::vector<int32_t> out;
  if (source_ < 0) return out;
  for (int64_t i = 0; i < most; ++i) {
    const int64_t from = source_ + i;
    out.push_back(from < length_ ? context[static_cast<size_t>(from)]
                                 : out[static_cast<size_t>(from - length_)]);
  }
  return out;
}

int64_t DraftLength::next(const std::function<double(int64_t count)>& cost) const {
  int64_t count = std::min(length_, most_);
  while (count > 0 && cost(count) > balance_) --count;
  return count;
}

void DraftLength::took(int64_t count, int64_t right, double cost) {
  const auto tokens = static_cast<double>(1 + right);
  balance_ = std::min(balance_ + static_cast<double>(right) - cost + kShare * tokens, kMostKept);
  if (count == 0) return;
  length_ = right == count ? std::min(2 * std::max(count, length_ / 2), most_)
                           : std::max<int64_t>(right, 1);
}

}  // namespace twell
