// SPDX-License-Identifier: Apache-2.0
// What a forward whose projections are in e4m3 has of its own. Every input of a projection is
// quantised per token: by the norm in front of it, or, for the output projection, by a pass over
// what the heads attended to. Keys, values and the residual stream stay in bf16.
#include <algorithm>

#include "twell/model/forward_cuda.h"
#include "twell/ops/matmul/byte_linear_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/skinny/batch_ops.h"

namespace twell {

void ForwardCuda::norm_bytes(const BF16* weight, const int32_t* rows) const {
  TWELL_CUDA_CHECK(launch_rms_norm_bytes({.norm = {.tokens = staged_.tokens,
                                                   .width = config_.width,
                                                   .x = residual_.data(),
                                                   .weight = device_bf16(weight),
                                                   .eps = config_.stream_eps(),
                                                   .y_rows = rows},
                                          .values = bytes_.values.data(),
                                          .scales = bytes_.scales.data()},
                                         ctx_.stream()));
}

// Up to 64 tokens have kernels that read the weights at memory speed.
bool ForwardCuda::takes_few_bytes() const { return staged_.tokens <= batch_ops::kMaxTokens; }

void ForwardCuda::project_attended_bytes(int64_t layer) {
  const int64_t inner = config_.q_width();
  const ByteRowsCuda w = bytes_of(layer).o;
  TWELL_CUDA_CHECK(launch_quantise_rows({.rows = staged_.tokens,
                                         .cols = inner,
                                         .x = attended_.data(),
                                         .values = bytes_.values.data(),
                                         .scales = bytes_.scales.data()},
                                        ctx_.stream()));
  if (takes_few_bytes()) {
    TWELL_CUDA_CHECK(batch_ops::launch_linear({.input = {.tokens = staged_.tokens,
                                                         .width = inner,
                                                         .constant_weights = true,
                                                         .x_bytes = bytes()},
                                               .cols = config_.width,
                                               .residual = residual_.data(),
                                               .y = residual_.data(),
                                               .w_bytes = w},
                                              ctx_.stream()));
    return;
  }
  byte_linear_cuda(ctx_, {.rows = padded_tokens(),
                          .cols = config_.width,
                          .inner = inner,
                          .x = bytes(),
                          .w = w,
                          .y = residual_.data(),
                          .add = true});
}

void ForwardCuda::logits_of_bytes(const __nv_bfloat16* hidden, int64_t rows, float* out) const {
  const int64_t width = config_.width, vocab = config_.vocab_size;
  const int64_t most = std::min(batch_ops::kMaxTokens, bytes_.scales.size());
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = count,
                                           .cols = width,
                                           .x = hidden + row * width,
                                           .values = bytes_.values.data(),
                                           .scales = bytes_.scales.data()},
                                          ctx_.stream()));
    TWELL_CUDA_CHECK(batch_ops::launch_linear(
        {.input = {.tokens = count, .width = width, .constant_weights = true, .x_bytes = bytes()},
         .cols = vocab,
         .y = out + row * vocab,
         .f32_out = true,
         .w_bytes = model_.head_bytes()},
        ctx_.stream()));
  }
}

}  // namespace twell
