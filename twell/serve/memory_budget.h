// SPDX-License-Identifier: Apache-2.0
// Bounds the memory that all requests of a server take together for their bodies, prompts and
// answers. Sizes are estimates of the most that something takes. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

namespace twell {

class MemoryBudget {
 public:
  explicit MemoryBudget(int64_t bytes) : bytes_(bytes) {}

  // What one owner takes; its end gives it back.
  class Share {
   public:
    explicit Share(MemoryBudget& budget) : budget_(budget) {}
    ~Share() { clear(); }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // False when the budget has less left; nothing has changed then.
    bool grow(int64_t bytes) {
      if (budget_.used_.fetch_add(bytes) + bytes > budget_.bytes_) {
        budget_.used_ -= bytes;
        return false;
      }
      bytes_ += bytes;
      return true;
    }
    void shrink(int64_t bytes) {
      bytes_ -= bytes;
      budget_.used_ -= bytes;
    }
    void clear() { shrink(bytes_); }
    // Adds what another share of the budget holds, which is then empty.
    void take(Share& other) {
      bytes_ += other.bytes_;
      other.bytes_ = 0;
    }

   private:
    MemoryBudget& budget_;
    int64_t bytes_ = 0;  // used by one thread at a time
  };

  int64_t used() const { return used_; }

 private:
  const int64_t bytes_;
  std::atomic<int64_t> used_{0};
};

}  // namespace twell
