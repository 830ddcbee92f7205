// SPDX-License-Identifier: Apache-2.0
// Owned memory: Buffer<T>, 64-byte aligned and zero-filled; Arena, scratch memory of one op call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "twell/base/matrix.h"

namespace twell {

inline constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 register

// Zero-filled, aligned; throws Error with the size when memory is short. A large block is fresh
// pages of the system, zeroed on first touch: the first thread to write a page pays for it. Free
// with aligned_release, which takes the same size.
void* aligned_zeroed(size_t bytes);
void aligned_release(void* data, size_t bytes);

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(aligned_zeroed(static_cast<size_t>(size) * sizeof(T))),
              Release{static_cast<size_t>(size) * sizeof(T)}),
        size_(size) {}

  T* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_.get()[i]; }
  std::span<T> span() const { return {data_.get(), static_cast<size_t>(size_)}; }
  Matrix<T> matrix(int64_t rows, int64_t cols) const { return {data_.get(), rows, cols}; }

 private:
  struct Release {
    size_t bytes = 0;
    void operator()(T* data) const { aligned_release(data, bytes); }
  };
  std::unique_ptr<T[], Release> data_;
  int64_t size_ = 0;
};

// Bump allocator for scratch. Memory is kept between uses, so a steady state allocates nothing and
// holds no more than the peak, in one block; a use that outgrows the block adds further ones.
class Arena {
 public:
  // Allocates that many bytes at once; Error while anything is in use.
  void reserve(size_t bytes);
  void* allocate(size_t bytes);
  size_t peak_bytes() const { return peak_; }
  size_t reserved_bytes() const;

  // Frees on destruction, in stack order, everything allocated since construction.
  class Scope {
   public:
    explicit Scope(Arena& arena);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    // Uninitialised storage for n values.
    template <typename T>
    T* alloc(int64_t n) {
      return static_cast<T*>(arena_.allocate(static_cast<size_t>(n) * sizeof(T)));
    }
    template <typename T>
    Matrix<T> matrix(int64_t rows, int64_t cols) {
      return {alloc<T>(rows * cols), rows, cols};
    }

   private:
    Arena& arena_;
    size_t block_;
    size_t offset_;
  };

 private:
  struct Block {
    Buffer<std::byte> bytes;
    size_t before;  // bytes in use in earlier blocks when this one was entered
  };
  std::vector<Block> blocks_;
  size_t block_ = 0;   // index of the block in use
  size_t offset_ = 0;  // bytes used in it
  size_t peak_ = 0;
};

}  // namespace twell
