// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/decode/gate_screen_cuda.h"

namespace twell {

GateScreensCuda::GateScreensCuda(int64_t layers, int64_t ffn, int64_t width)
    : ffn_(ffn),
      width_(width),
      rows_(layers * ffn * screen_row_bytes(width)),
      errors_(layers * ffn) {
  TWELL_CHECK(screens_width(width), "there are no screens for a width of {}", width);
}

int64_t GateScreensCuda::bytes_needed(int64_t layers, int64_t ffn, int64_t width) {
  return layers * ffn * (screen_row_bytes(width) + static_cast<int64_t>(sizeof(float)));
}

void GateScreensCuda::make(const CudaContext& ctx, int64_t layer, const __nv_bfloat16* weight,
                           const __nv_bfloat16* norm) {
  TWELL_CUDA_CHECK(
      launch_make_gate_screen({.neurons = ffn_,
                               .width = width_,
                               .weight = weight,
                               .norm = norm,
                               .rows = rows_.data() + layer * ffn_ * screen_row_bytes(width_),
                               .errors = errors_.data() + layer * ffn_},
                              ctx.stream()));
}

GateScreen GateScreensCuda::operator[](int64_t layer) const {
  if (rows_.size() == 0) return {};
  return {.rows = rows_.data() + layer * ffn_ * screen_row_bytes(width_),
          .errors = errors_.data() + layer * ffn_};
}

}  // namespace twell
