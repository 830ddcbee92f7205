// SPDX-License-Identifier: Apache-2.0
#include "twell/format/twell.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {

std::string twell_unsupported(const TwellShape& shape) {
  const auto power_of_two = [](int32_t n) { return n > 0 && (n & (n - 1)) == 0; };
  if (shape.rows < 0 || shape.cols < 1) {
    return fmt::format("TwELL needs rows >= 0 and columns >= 1, got {} x {}", shape.rows,
                       shape.cols);
  }
  if (!power_of_two(shape.tile) || shape.tile > 65536) {
    return fmt::format("the TwELL tile must be a power of two up to 65536, got {}", shape.tile);
  }
  if (!power_of_two(shape.compression) || shape.slots() < 2) {
    return fmt::format(
        "the TwELL compression must be a power of two of at most half the tile of {}, got {}",
        shape.tile, shape.compression);
  }
  constexpr int64_t kMaxIndex = int64_t{1} << 32;  // columns and spill slots are 32-bit
  if (shape.cols > kMaxIndex || shape.max_spill_slots() > kMaxIndex) {
    return fmt::format("TwELL holds up to 2^32 columns and (row, tile) pairs, got {} and {}",
                       shape.cols, shape.max_spill_slots());
  }
  return {};
}

template <typename Word>
int64_t twell_pack_reference(ConstMatrixF dense, const Twell<Word>& out) {
  using W = TwellWord<Word>;
  const TwellShape& shape = out.shape;
  const std::string reason = twell_unsupported(shape);
  TWELL_CHECK(reason.empty(), "{}", reason);
  TWELL_CHECK(dense.rows == shape.rows && dense.cols == shape.cols,
              "packing {} x {} into a TwELL of {} x {}", dense.rows, dense.cols, shape.rows,
              shape.cols);
  int64_t spilled = 0;
  for (int64_t row = 0; row < shape.rows; ++row) {
    int64_t row_nnz = 0;
    for (int64_t t = 0; t < shape.tiles(); ++t) {
      const int64_t begin = t * shape.tile;
      const int64_t end = std::min(begin + shape.tile, shape.cols);
      Word* words = out.tile_words(row, t);
      int64_t count = 0;
      for (int64_t column = begin; column < end; ++column) {
        const float value = dense(row, column);
        if (value == 0.0f) continue;
        if (++count <= shape.capacity()) words[count] = W::pack(column, value);
      }
      words[0] = static_cast<Word>(count);
      row_nnz += count;
      if (count <= shape.capacity()) continue;
      TWELL_CHECK(spilled < out.spill_slots,
                  "a TwELL tile overflows and all {} spill slots are used", out.spill_slots);
      words[1] = static_cast<Word>(spilled);
      typename W::Value* values = out.spill + spilled * shape.tile;
      for (int64_t i = 0; i < shape.tile; ++i) {
        values[i] = W::store(begin + i < end ? dense(row, begin + i) : 0.0f);
      }
      ++spilled;
    }
    if (out.row_nnz != nullptr) out.row_nnz[row] = static_cast<int32_t>(row_nnz);
  }
  return spilled;
}

template <typename Word>
void twell_unpack_reference(const Twell<Word>& in, MatrixF dense) {
  TWELL_CHECK(dense.rows == in.shape.rows && dense.cols == in.shape.cols,
              "unpacking a TwELL of {} x {} into {} x {}", in.shape.rows, in.shape.cols, dense.rows,
              dense.cols);
  for (int64_t row = 0; row < dense.rows; ++row) {
    std::fill_n(dense.row(row), dense.cols, 0.0f);
    twell_for_each(in, row, [&](int64_t column, float value) { dense(row, column) = value; });
  }
}

template int64_t twell_pack_reference<uint32_t>(ConstMatrixF, const Twell<uint32_t>&);
template int64_t twell_pack_reference<uint64_t>(ConstMatrixF, const Twell<uint64_t>&);
template void twell_unpack_reference<uint32_t>(const Twell<uint32_t>&, MatrixF);
template void twell_unpack_reference<uint64_t>(const Twell<uint64_t>&, MatrixF);

}  // namespace twell
