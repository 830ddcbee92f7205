// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/rows_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn_train/rows_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Full = hn::ScalableTag<float>;
using FullU32 = hn::RebindToUnsigned<Full>;
using V = hn::Vec<Full>;
using Single = hn::CappedTag<float, 1>;

int64_t lanes() { return static_cast<int64_t>(hn::Lanes(Full())); }

int64_t count_of_active(const float* gate, float threshold, int64_t n) {
  const Full d;
  size_t count = 0;
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    count += hn::CountTrue(d, hn::Not(hn::Le(hn::LoadU(d, gate + i), hn::Set(d, threshold))));
  }
  for (; i < n; ++i) count += gate[i] <= threshold ? 0 : 1;
  return static_cast<int64_t>(count);
}

void compress(const float* gate, float threshold, int64_t n, uint32_t* index, float* value) {
  const Full d;
  const FullU32 di;
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    const auto g = hn::LoadU(d, gate + i);
    const auto active = hn::Not(hn::Le(g, hn::Set(d, threshold)));
    // Most vectors of a sparse row have no active lane.
    if (hn::AllFalse(d, active)) continue;
    const auto column = hn::Iota(di, static_cast<uint32_t>(i));
    // A blended store writes nothing past the last active lane, where the next row begins.
    hn::CompressBlendedStore(column, hn::RebindMask(di, active), di, index);
    const size_t stored = hn::CompressBlendedStore(g, active, d, value);
    index += stored;
    value += stored;
  }
  for (; i < n; ++i) {
    if (gate[i] <= threshold) continue;
    *index++ = static_cast<uint32_t>(i);
    *value++ = gate[i];
  }
}

// Four rows share the loads of x. Two accumulators per row hide the latency of the multiply-add. In
// loops that GCC unrolls late, it would pass the sums through memory.
void dots_of_four(const float* x, const float* const row[4], int64_t width, float* out) {
  const Full d;
  V even[4], odd[4];
  HWY_UNROLL(4)
  for (int r = 0; r < 4; ++r) even[r] = odd[r] = hn::Zero(d);
  const int64_t step = lanes();
  int64_t k = 0;
  for (; k + 2 * step <= width; k += 2 * step) {
    const V x0 = hn::LoadU(d, x + k);
    const V x1 = hn::LoadU(d, x + k + step);
    for (int r = 0; r < 4; ++r) {
      even[r] = hn::MulAdd(x0, hn::LoadU(d, row[r] + k), even[r]);
      odd[r] = hn::MulAdd(x1, hn::LoadU(d, row[r] + k + step), odd[r]);
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < 4; ++r) out[r] = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[r], odd[r])));
  for (; k < width; ++k) {
    for (int r = 0; r < 4; ++r) out[r] += x[k] * row[r][k];
  }
}

void dots(const float* x, const ConstMatrixF& table, const uint32_t* rows, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 4) {
    // A short last group repeats its last row.
    const float* row[4];
    for (int64_t r = 0; r < 4; ++r) row[r] = table.row(rows[HWY_MIN(i + r, n - 1)]);
    float sums[4];
    dots_of_four(x, row, table.cols, sums);
    for (int64_t r = 0; r < HWY_MIN(n - i, int64_t{4}); ++r) out[i + r] += sums[r];
  }
}

// An output of a sum of rows: its factor for each row, and where it is added to.
struct Weighted {
  const float* factor;
  float* out;
};

// kVectors vectors of columns from column k on, as so many independent chains of additions, to each
// of kOutputs outputs. A row is loaded once for all of them.
template <int kOutputs, int kVectors, class Tag>
void sum_columns(Tag d, const Weighted (&outputs)[kOutputs], const ConstMatrixF& table,
                 const uint32_t* rows, int64_t n, int64_t k) {
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<Tag> sums[kOutputs][kVectors];
  HWY_UNROLL(2)
  for (int o = 0; o < kOutputs; ++o) {
    for (int v = 0; v < kVectors; ++v) sums[o][v] = hn::LoadU(d, outputs[o].out + k + v * step);
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = table.row(rows[i]) + k;
    for (int v = 0; v < kVectors; ++v) {
      const auto values = hn::LoadU(d, row + v * step);
      for (int o = 0; o < kOutputs; ++o) {
        sums[o][v] = hn::MulAdd(hn::Set(d, outputs[o].factor[i]), values, sums[o][v]);
      }
    }
  }
  HWY_UNROLL(2)
  for (int o = 0; o < kOutputs; ++o) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[o][v], d, outputs[o].out + k + v * step);
  }
}

template <int kOutputs>
void sums(const Weighted (&outputs)[kOutputs], const ConstMatrixF& table, const uint32_t* rows,
          int64_t n) {
  const Full full;
  int64_t k = 0;
  for (; k + 4 * lanes() <= table.cols; k += 4 * lanes()) {
    sum_columns<kOutputs, 4>(full, outputs, table, rows, n, k);
  }
  for (; k + lanes() <= table.cols; k += lanes()) {
    sum_columns<kOutputs, 1>(full, outputs, table, rows, n, k);
  }
  for (; k < table.cols; ++k) sum_columns<kOutputs, 1>(Single(), outputs, table, rows, n, k);
}

void sum(const float* factor, const ConstMatrixF& table, const uint32_t* rows, int64_t n,
         float* out) {
  sums<1>({{factor, out}}, table, rows, n);
}

void sum2(const float* factor_a, const float* factor_b, const ConstMatrixF& table,
          const uint32_t* rows, int64_t n, float* out_a, float* out_b) {
  sums<2>({{factor_a, out_a}, {factor_b, out_b}}, table, rows, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
namespace {
HWY_EXPORT(count_of_active);
HWY_EXPORT(compress);
HWY_EXPORT(dots);
HWY_EXPORT(sum);
HWY_EXPORT(sum2);
}  // namespace

int64_t count_active(const float* gate, float threshold, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(count_of_active)(gate, threshold, n);
}

void compress_active(const float* gate, float threshold, int64_t n, uint32_t* index, float* value) {
  HWY_DYNAMIC_DISPATCH(compress)(gate, threshold, n, index, value);
}

void gathered_dots(const float* x, ConstMatrixF table, const uint32_t* rows, int64_t n,
                   float* out) {
  HWY_DYNAMIC_DISPATCH(dots)(x, table, rows, n, out);
}

void gathered_sum(const float* factor, ConstMatrixF table, const uint32_t* rows, int64_t n,
                  float* out) {
  HWY_DYNAMIC_DISPATCH(sum)(factor, table, rows, n, out);
}

void gathered_sum2(const float* factor_a, const float* factor_b, ConstMatrixF table,
                   const uint32_t* rows, int64_t n, float* out_a, float* out_b) {
  HWY_DYNAMIC_DISPATCH(sum2)(factor_a, factor_b, table, rows, n, out_a, out_b);
}

}  // namespace twell
#endif  // HWY_ONCE
