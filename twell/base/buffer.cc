// SPDX-License-Identifier: Apache-2.0
#include "twell/base/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

size_t round_up(size_t bytes, size_t unit = kAlignment) { return (bytes + unit - 1) / unit * unit; }

// Weights and activations span thousands of 4 KiB pages, more than the TLB holds; sparse executions
// jump between them. Large blocks ask for 2 MiB pages, at a cost of at most 1/8 in size.
constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kHugeFrom = 8 * kHugePage;

constexpr size_t kMinBlock = size_t{1} << 20;  // 1 MiB, so that small ops share one block

}  // namespace

void* aligned_zeroed(size_t bytes) {
  const size_t alignment = bytes >= kHugeFrom ? kHugePage : kAlignment;
  const size_t size = std::max(round_up(bytes, alignment), kAlignment);
  void* data = size >= bytes ? std::aligned_alloc(alignment, size) : nullptr;
  TWELL_CHECK(data != nullptr, "cannot allocate {} bytes of memory", bytes);
#ifdef MADV_HUGEPAGE
  // A hint: without it, or refused, the memory is the same.
  if (alignment == kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
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
