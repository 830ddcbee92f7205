// SPDX-License-Identifier: Apache-2.0
// Screens of a model's layers, in device memory.
#pragma once

#include "twell/base/cuda.h"
#include "twell/ops/decode/gate_screen_kernel.h"

namespace twell {

class GateScreensCuda {
 public:
  GateScreensCuda() = default;  // of no layers
  // For matrices [F, D]; D is a width that there are screens for.
  GateScreensCuda(int64_t layers, int64_t ffn, int64_t width);
  static int64_t bytes_needed(int64_t layers, int64_t ffn, int64_t width);

  // Enqueues making a layer's screen of weight [F, D], for x behind a norm with weights [D].
  // Neither may change afterwards.
  void make(const CudaContext& ctx, int64_t layer, const __nv_bfloat16* weight,
            const __nv_bfloat16* norm);
  // No rows where there are no layers.
  GateScreen operator[](int64_t layer) const;

 private:
  int64_t ffn_ = 0, width_ = 0;
  DeviceBuffer<uint8_t> rows_;  // [L, F, screen_row_bytes(D)]
  DeviceBuffer<float> errors_;  // [L, F]
};

}  // namespace twell
