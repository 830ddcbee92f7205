// SPDX-License-Identifier: Apache-2.0
#include "twell/base/cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell {

void check_ffn_call(const CudaContext& ctx, int64_t width, int64_t ffn, bool portable) {
  const int capability = ctx.compute_capability();
  TWELL_CHECK(portable ? capability >= 80 : capability == 90,
              "needs a GPU of compute capability {}, {} is {}.{}",
              portable ? "8.0 or later" : "9.0", ctx.device_name(), capability / 10,
              capability % 10);
  TWELL_CHECK(width > 0 && width % 8 == 0 && ffn > 0 && ffn % 8 == 0,
              "width {} and FFN size {} must be positive multiples of 8", width, ffn);
}

void check_packed_ffn(const CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn,
                      const TwellPacked& gate, bool portable) {
  check_ffn_call(ctx, width, ffn, portable);
  TWELL_CHECK(gate.shape.tile == 256 && gate.shape.rows == tokens && gate.shape.cols == ffn,
              "TwELL of [{}, {}] in tiles of {}, expected [{}, {}] in tiles of 256",
              gate.shape.rows, gate.shape.cols, gate.shape.tile, tokens, ffn);
}

}  // namespace twell
