// SPDX-License-Identifier: Apache-2.0
#include "twell/base/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

constexpr size_t kMinBlock = size_t{1} << 20;  // 1 MiB, so that small ops share one block

}  // namespace

void* aligned_zeroed(size_t bytes) {
  const size_t size = std::max(round_up(bytes), kAlignment);
  void* data = size >= bytes ? std::aligned_alloc(kAlignment, size) : nullptr;
  TWELL_CHECK(data != nullptr, "cannot allocate {} bytes of memory", bytes);
  std::memset(data, 0, size);
  return data;
}

void aligned_release(void* data) { std::free(data); }

void* Arena::allocate(size_t bytes) {
  bytes = std::max(round_up(bytes), kAlignment);
  while (block_ < blocks_.size() &&
         offset_ + bytes > static_cast<size_t>(blocks_[block_].bytes.size())) {
    const size_t used = blocks_[block_].before + offset_;
    ++block_;
    offset_ = 0;
    if (block_ < blocks_.size()) blocks_[block_].before = used;
  }
  if (block_ == blocks_.size()) {
    const size_t before = blocks_.empty() ? 0 : blocks_.back().before + blocks_.back().bytes.size();
    blocks_.push_back(
        {Buffer<std::byte>(static_cast<int64_t>(std::max(bytes, kMinBlock))), before});
  }
  std::byte* data = blocks_[block_].bytes.data() + offset_;
  offset_ += bytes;
  peak_ = std::max(peak_, blocks_[block_].before + offset_);
  return data;
}

size_t Arena::reserved_bytes() const {
  size_t total = 0;
  for (const Block& block : blocks_) total += static_cast<size_t>(block.bytes.size());
  return total;
}

Arena::Scope::Scope(Arena& arena) : arena_(arena), block_(arena.block_), offset_(arena.offset_) {}

Arena::Scope::~Scope() {
  arena_.block_ = block_;
  arena_.offset_ = offset_;
}

}  // namespace twell
