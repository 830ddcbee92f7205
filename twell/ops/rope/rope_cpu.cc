// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rope/rope.h"

#include <cmath>
#include <vector>

#include "twell/base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/rope/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rotates the `heads` heads of one row x [heads * 2 * half]; cos and sin [half]; sign -1 rotates
// back.
void rotate_row(float* x, int64_t heads, int64_t half, const float* cos, const float* sin,
                float sign) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto sign_v = hn::Set(d, sign);
  for (int64_t head = 0; head < heads; ++head) {
    float* first = x + head * 2 * half;
    float* second = first + half;
    int64_t i = 0;
    for (; i + lanes <= half; i += lanes) {
      const auto c = hn::LoadU(d, cos + i);
      const auto s = hn::Mul(hn::LoadU(d, sin + i), sign_v);
      const auto a = hn::LoadU(d, first + i);
      const auto b = hn::LoadU(d, second + i);
      hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, first + i);
      hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, second + i);
    }
    for (; i < half; ++i) {
      const float s = sin[i] * sign, a = first[i], b = second[i];
      first[i] = a * cos[i] - b * s;
      second[i] = b * cos[i] + a * s;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(rotate_row);

namespace {

std::vector<double> plain_frequencies(int64_t head_dim, double theta) {
  TWELL_CHECK(head_dim > 0 && head_dim % 2 == 0, "rope: head size {} is not even", head_dim);
  std::vector<double> out;
  for (int64_t i = 0; i < head_dim; i += 2) {
    out.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  return out;
}

}  // namespace

RopeTable::RopeTable(int64_t max_positions_in, int64_t head_dim_in, double theta)
    : RopeTable(max_positions_in, plain_frequencies(head_dim_in, theta), 1.0) {}

RopeTable::RopeTable(int64_t max_positions_in, std::span<const double> radians, double scale)
    : max_positions(max_positions_in),
      head_dim(2 * std::ssize(radians)),
      cos(max_positions * head_dim / 2),
      sin(max_positions * head_dim / 2) {
  const int64_t half = head_dim / 2;
  for (int64_t position = 0; position < max_positions; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * radians[static_cast<size_t>(i)];
      cos[position * half + i] = static_cast<float>(scale * std::cos(angle));
      sin[position * half + i] = static_cast<float>(scale * std::sin(angle));
    }
  }
}

void rope(Context& ctx, const RopeTable& table, std::span<const int32_t> positions, MatrixF x,
          bool inverse) {
  TWELL_CHECK(static_cast<int64_t>(positions.size()) == x.rows && x.cols % table.head_dim == 0,
              "rope: {} positions and head size {} for x [{}, {}]", positions.size(),
              table.head_dim, x.rows, x.cols);
  for (const int32_t position : positions) {
    TWELL_CHECK(position >= 0 && position < table.max_positions,
                "rope: position {} is outside the table of {}", position, table.max_positions);
  }
  const int64_t half = table.head_dim / 2;
  ctx.parallel_for(x.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = begin; m < end; ++m) {
      const int64_t at = positions[static_cast<size_t>(m)] * half;
      HWY_DYNAMIC_DISPATCH(rotate_row)
      (x.row(m), x.cols / table.head_dim, half, table.cos.data() + at, table.sin.data() + at,
       inverse ? -1.0f : 1.0f);
    }
  });
}

}  // namespace twell
#endif  // HWY_ONCE
