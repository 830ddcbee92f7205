// SPDX-License-Identifier: Apache-2.0
// The memory of saved activations: the dense plan, and the hybrid plan laid into the same bytes.
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn_train/ffn_train.h"
#include "twell/ops/ffn_train/hybrid_work.h"

namespace twell {
namespace {

constexpr int64_t kAlignFloats = static_cast<int64_t>(kAlignment / sizeof(float));

// Every array of the hybrid plan is a multiple of 4 bytes; each starts on a cache line.
int64_t aligned(int64_t words) { return (words + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

int64_t dense_words(int64_t max_tokens, int64_t ffn, bool gated) {
  return aligned(max_tokens * ffn) * (gated ? 2 : 1);
}

// A row of more than F / 4 non-zeros costs less through the GEMMs of the tail. At this width the
// compact part takes at most half of the dense plan, and the tail gets the rest: half of the rows
// or more.
int64_t ell_width(int64_t ffn) { return std::max<int64_t>(1, ffn / 4); }

class Carver {
 public:
  explicit Carver(float* next) : next_(next) {}
  template <typename T>
  Matrix<T> take(int64_t rows, int64_t cols) {
    static_assert(sizeof(T) == sizeof(float));
    T* const data = reinterpret_cast<T*>(next_);
    next_ += aligned(rows * cols);
    return {data, rows, cols};
  }

 private:
  float* next_;
};

}  // namespace

FfnSaved::FfnSaved(int64_t max_tokens, int64_t ffn, bool gated)
    : max_tokens_(max_tokens),
      ffn_(ffn),
      gated_(gated),
      storage_(dense_words(max_tokens, ffn, gated)) {
  TWELL_CHECK(max_tokens > 0 && ffn > 0, "saved activations of {} tokens and {} neurons",
              max_tokens, ffn);
}

int64_t FfnSaved::bytes(int64_t max_tokens, int64_t ffn, bool gated) {
  return dense_words(max_tokens, ffn, gated) * static_cast<int64_t>(sizeof(float));
}

MatrixF FfnSaved::dense_gate(int64_t m) const { return {storage_.data(), m, ffn_}; }

MatrixF FfnSaved::dense_up(int64_t m) const {
  return {storage_.data() + aligned(m * ffn_), m, ffn_};
}

bool FfnSaved::plan_hybrid(int64_t m) {
  const int64_t planes = gated_ ? 2 : 1;
  const int64_t width = ell_width(ffn_);
  // For m tokens of max_tokens the plan stays within the dense plan of m.
  const int64_t budget = dense_words(m, ffn_, gated_);
  const int64_t compact = 2 * aligned(m) + (1 + planes) * aligned(m * width);
  const int64_t padding = planes * kAlignFloats;
  if (budget < compact + padding) return false;
  int64_t capacity = std::min(m, (budget - compact - padding) / (planes * ffn_));
  if (capacity > 0) capacity -= capacity % tail_granularity(capacity);

  Carver carver(storage_.data());
  hybrid = {.shape = {m, ffn_, width, capacity},
            .row_nnz = carver.take<int32_t>(1, m).data,
            .tail_slot = carver.take<int32_t>(1, m).data,
            .index = carver.take<uint32_t>(m, width),
            .value = carver.take<float>(m, width),
            .tail = carver.take<float>(capacity, ffn_)};
  up = gated_ ? carver.take<float>(m, width) : MatrixF();
  up_tail = gated_ ? carver.take<float>(capacity, ffn_) : MatrixF();
  return true;
}

}  // namespace twell
