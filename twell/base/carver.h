// SPDX-License-Identifier: Apache-2.0
// Allocates arrays one after the other from one block of memory. Without a block it only counts, so
// that the same code computes the block's size and then hands it out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twell {

class Carver {
 public:
  // block: null, or aligned to `alignment`, as is every array; in bytes, a power of two.
  Carver(void* block, int64_t alignment)
      : block_(static_cast<std::byte*>(block)), alignment_(alignment) {}

  // n values of T, not initialised; null without a block.
  template <typename T>
  T* take(int64_t n) {
    std::byte* const at = block_ == nullptr ? nullptr : block_ + bytes_;
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    bytes_ += (bytes + alignment_ - 1) / alignment_ * alignment_;
    return reinterpret_cast<T*>(at);
  }
  int64_t bytes() const { return bytes_; }  // taken so far, a multiple of the alignment

 private:
  std::byte* block_;
  int64_t alignment_;
  int64_t bytes_ = 0;
};

}  // namespace twell
