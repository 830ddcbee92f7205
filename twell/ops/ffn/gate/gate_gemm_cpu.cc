// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "twell/base/error.h"
#include "twell/ops/ffn/gate/gate_gemm.h"
#include "twell/ops/matmul/matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn/gate/gate_gemm_cpu.cc"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;

// words[i] = column[i] | value[i] << 32, for i < count.
void interleave(const uint32_t* column, const uint32_t* value, int64_t count, uint64_t* words) {
  static_assert(std::endian::native == std::endian::little);
  const DU du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(du));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreInterleaved2(hn::LoadU(du, column + i), hn::LoadU(du, value + i), du,
                          reinterpret_cast<uint32_t*>(words + i));
  }
  for (; i < count; ++i) words[i] = column[i] | static_cast<uint64_t>(value[i]) << 32;
}

// Lists the values of gate[0, width) that are not <= threshold (NaN is active) and returns their
// number.
// The gate starts at column `begin`. No more than `room` are listed; the arrays take one vector
// beyond that.
int64_t compress_active(const float* gate, float threshold, int64_t width, int64_t begin,
                        int64_t room, uint32_t* column, uint32_t* value) {
  const DF df;
  const DU du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    const auto v = hn::LoadU(df, gate + i);
    const auto fires = hn::Not(hn::Le(v, hn::Set(df, threshold)));
    if (count <= room) {
      const auto columns = hn::Iota(du, static_cast<uint32_t>(begin + i));
      hn::StoreU(hn::Compress(columns, hn::RebindMask(du, fires)), du, column + count);
      hn::StoreU(hn::BitCast(du, hn::Compress(v, fires)), du, value + count);
    }
    count += static_cast<int64_t>(hn::CountTrue(df, fires));
  }
  for (; i < width; ++i) {
    if (gate[i] <= threshold) continue;
    if (count <= room) {
      column[count] = static_cast<uint32_t>(begin + i);
      value[count] = std::bit_cast<uint32_t>(gate[i]);
    }
    ++count;
  }
  return count;
}

// Works in place; the columns past F of the row's last tile become 0.
void relu_tile(float* gate, float threshold, int64_t width, int64_t tile) {
  for (int64_t i = 0; i < width; ++i) gate[i] = gate[i] <= threshold ? 0.0f : gate[i];
  for (int64_t i = width; i < tile; ++i) gate[i] = 0.0f;
}

void pack_rows(const TwellWide& out, float threshold, int64_t begin, int64_t end, uint32_t* column,
               uint32_t* value) {
  const TwellShape& shape = out.shape;
  for (int64_t row = begin; row < end; ++row) {
    int64_t row_nnz = 0;
    for (int64_t t = 0; t < shape.tiles(); ++t) {
      const int64_t slot = row * shape.tiles() + t;
      const int64_t first = t * shape.tile;
      const int64_t width = std::min<int64_t>(shape.tile, shape.cols - first);
      float* gate = out.spill + slot * shape.tile;
      uint64_t* words = out.tile_words(row, t);
      const int64_t count =
          compress_active(gate, threshold, width, first, shape.capacity(), column, value);
      words[0] = static_cast<uint64_t>(count);
      if (count > shape.capacity()) {
        words[1] = static_cast<uint64_t>(slot);
        relu_tile(gate, threshold, width, shape.tile);
      } else {
        interleave(column, value, count, words + 1);
      }
      row_nnz += count;
    }
    out.row_nnz[row] = static_cast<int32_t>(row_nnz);
  }
}

int64_t lanes() { return static_cast<int64_t>(hn::Lanes(DF())); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {

HWY_EXPORT(pack_rows);
HWY_EXPORT(lanes);

int64_t gate_gemm(Context& ctx, const GateGemm& problem) {
  gate_product(ctx, problem);
  return gate_pack(ctx, problem.out, problem.threshold);
}

void gate_product(Context& ctx, const GateGemm& problem) {
  const ConstMatrixF& x = problem.x;
  const WeightMatrix& weight = problem.weight;
  const TwellWide& out = problem.out;
  const TwellShape& shape = out.shape;
  const std::string reason = twell_unsupported(shape);
  TWELL_CHECK(reason.empty(), "{}", reason);
  TWELL_CHECK(x.rows == shape.rows && weight.rows == shape.cols && x.cols == weight.cols,
              "gate shapes disagree: x [{}, {}], weight [{}, {}], TwELL {} x {}", x.rows, x.cols,
              weight.rows, weight.cols, shape.rows, shape.cols);
  TWELL_CHECK(out.row_nnz != nullptr && out.spill_slots >= shape.max_spill_slots(),
              "the gate needs row_nnz and {} spill slots, got {}", shape.max_spill_slots(),
              out.spill_slots);

  linear_forward(ctx, x, weight, gate_dense(out));
}

int64_t gate_pack(Context& ctx, const TwellWide& out, float threshold) {
  const auto size =
      static_cast<size_t>(out.shape.capacity() + 1 + 2 * HWY_DYNAMIC_DISPATCH(lanes)());
  // A row of 5,000 columns packs in about a microsecond; waking a thread pays for sixteen of them.
  ctx.parallel_for(out.shape.rows, 16, [&](int64_t begin, int64_t end, int) {
    std::vector<uint32_t> column(size), value(size);
    HWY_DYNAMIC_DISPATCH(pack_rows)(out, threshold, begin, end, column.data(), value.data());
  });
  return std::accumulate(out.row_nnz, out.row_nnz + out.shape.rows, int64_t{0});
}

TwellWide alloc_twell_wide(Arena::Scope& scope, const TwellShape& shape) {
  TwellWide out;
  out.shape = shape;
  out.words = scope.alloc<uint64_t>(shape.words());
  out.spill_slots = shape.max_spill_slots();
  out.spill = scope.alloc<float>(out.spill_slots * shape.tile);
  out.row_nnz = scope.alloc<int32_t>(shape.rows);
  return out;
}

}  // namespace twell
#endif  // HWY_ONCE
