// SPDX-License-Identifier: Apache-2.0
#include "twell/base/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

size_t round_up(size_t bytes, size_t unit = kAlignment) { return (bytes + unit - 1) / unit * unit; }

// Weights and activations span thousands of 4 KiB pages, more than the TLB holds, and sparse
// executions jump between them. So large blocks request 2 MiB pages; little is lost at their end.
constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kHugeFrom = 8 * kHugePage;

constexpr size_t kMinBlock = size_t{1} << 20;  // 1 MiB, so that small ops share one block

// Bytes to pass to munmap for a large block, which must be whole pages of the smallest size.
size_t mapped_bytes(size_t bytes) {
  return round_up(bytes, static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
}

// Returns null if memory is short.
void* map_large(size_t bytes) {
  const size_t size = mapped_bytes(bytes), room = size + kHugePage;
  if (size < bytes || room < size) return nullptr;
  void* mapped = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // Unmaps what lies before the first huge page and behind the data.
  const size_t before = kHugePage - reinterpret_cast<uintptr_t>(mapped) % kHugePage;
  std::byte* data = static_cast<std::byte*>(mapped) + before;
  ::munmap(mapped, before);
  if (before < kHugePage) ::munmap(data + size, kHugePage - before);
#ifdef MADV_HUGEPAGE
  // Only a hint: the memory works the same if it is refused.
  ::madvise(data, size, MADV_HUGEPAGE);
#endif
  return data;
}

void* allocate_small(size_t bytes) {
  const size_t size = std::max(round_up(bytes), kAlignment);
  // aligned_alloc does not serve, because its size must be a multiple of the alignment.
  void* data = nullptr;
  if (::posix_memalign(&data, kAlignment, size) != 0) return nullptr;
  return std::memset(data, 0, size);
}

}  // namespace

void* aligned_zeroed(size_t bytes) {
  void* data = bytes >= kHugeFrom ? map_large(bytes) : allocate_small(bytes);
  TWELL_CHECK(data != nullptr, "cannot allocate {} bytes of memory", bytes);
  return data;
}

void aligned_release(void* data, size_t bytes) {
  if (bytes >= kHugeFrom) {
    ::munmap(data, mapped_bytes(bytes));
  } else {
    std::free(data);
  }
}

void* Arena::allocate(size_t bytes) {
  bytes = std::max(round_up(bytes), kAlignment);
  size_t before = block_ < blocks_.size() ? blocks_[block_].before : 0;
  while (block_ < blocks_.size() &&
         offset_ + bytes > static_cast<size_t>(blocks_[block_].bytes.size())) {
    before += offset_;
    ++block_;
    offset_ = 0;
    if (block_ < blocks_.size()) blocks_[block_].before = before;
  }
  if (block_ == blocks_.size()) {
    const size_t size = std::max({bytes, kMinBlock, blocks_.empty() ? peak_ : 0});
    blocks_.push_back({Buffer<std::byte>(static_cast<int64_t>(size)), before});
  }
  std::byte* data = blocks_[block_].bytes.data() + offset_;
  offset_ += bytes;
  peak_ = std::max(peak_, blocks_[block_].before + offset_);
  return data;
}

void Arena::reserve(size_t bytes) {
  TWELL_CHECK(block_ == 0 && offset_ == 0, "{} bytes of scratch reserved while some is in use",
              bytes);
  if (blocks_.size() == 1 && static_cast<size_t>(blocks_[0].bytes.size()) >= bytes) return;
  blocks_.clear();
  blocks_.push_back({Buffer<std::byte>(static_cast<int64_t>(std::max(bytes, kMinBlock))), 0});
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
  // Free a chain of blocks, so that the next use reserves one of the peak's size.
  if (block_ == 0 && offset_ == 0 && arena_.blocks_.size() > 1) arena_.blocks_.clear();
}

}  // namespace twell
