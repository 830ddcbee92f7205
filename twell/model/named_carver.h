// SPDX-License-Identifier: Apache-2.0
// Cuts arrays from one block, or only counts them (base/carver.h), and sums their bytes by name.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "twell/base/carver.h"
#include "twell/base/matrix.h"
#include "twell/model/training.h"

namespace twell {

class NamedCarver : public Carver {
 public:
  using Carver::Carver;

  // n values of T for `item`; null without a block.
  template <typename T>
  void array(const char* item, int64_t n, T*& out) {
    const int64_t before = bytes();
    out = take<T>(n);
    const auto found = std::find_if(items_.begin(), items_.end(),
                                    [&](const MemoryItem& known) { return known.name == item; });
    (found != items_.end() ? *found : items_.emplace_back(MemoryItem{item, 0})).bytes +=
        bytes() - before;
  }
  template <typename T>
  Matrix<T> matrix(const char* item, int64_t rows, int64_t cols) {
    T* data = nullptr;
    array(item, rows * cols, data);
    return {data, rows, cols};
  }
  std::vector<MemoryItem> take_items() { return std::move(items_); }

 private:
  std::vector<MemoryItem> items_;
};

}  // namespace twell
