// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/linear_cuda.h"

#include "twell/ops/matmul/matmul_cuda.h"
#include "twell/ops/route/route.h"
#include "twell/ops/skinny/batch_ops.h"
#include "twell/ops/skinny/layer_ops.h"

namespace twell {

static_assert(route::kSkinnyRows == layer_ops::kMaxTokens);
static_assert(route::kBatchRows == batch_ops::kMaxTokens);

void linear_cuda(CudaContext& ctx, const LinearCuda& problem) {
  const auto [rows, cols, inner, x, w, y, f32_out, add, constant_weights] = problem;
  TWELL_CHECK(!(add && f32_out), "a linear layer [{}, {}] adds to bf16 alone", cols, inner);
  TWELL_CHECK(inner % 8 == 0, "linear layer [{}, {}]: the input size is a multiple of 8", cols,
              inner);
  if (rows == 0) return;
  const layer_ops::Linear few{
      .input = {.tokens = rows, .width = inner, .x = x, .constant_weights = constant_weights},
      .cols = cols,
      .w = w,
      .residual = add ? static_cast<const __nv_bfloat16*>(y) : nullptr,
      .y = y,
      .f32_out = f32_out};
  const route::Device device{.hopper = ctx.compute_capability() == 90,
                             .multiprocessors = ctx.multiprocessors()};
  const int64_t row_tokens = rows <= route::kSkinnyRows ? layer_ops::max_tokens(inner) : 0;
  switch (route::linear_kernel(device, rows, cols, row_tokens)) {
    case route::LinearKernel::kSkinny:
      TWELL_CUDA_CHECK(layer_ops::launch_linear(few, ctx.stream()));
      return;
    case route::LinearKernel::kBatch:
      TWELL_CUDA_CHECK(batch_ops::launch_linear(few, ctx.stream()));
      return;
    case route::LinearKernel::kGemm:
      matmul_cuda(ctx,
                  {.rows = rows,
                   .cols = cols,
                   .inner = inner,
                   .trans_b = true,
                   .f32_out = f32_out,
                   .add = add},
                  x, w, y);
  }
}

void linear_backward_cuda(CudaContext& ctx, const LinearBackwardCuda& problem) {
  const auto [rows, cols, inner, x, w, d_y, d_x, d_x_add, d_w, d_w_add, d_y_stride] = problem;
  TWELL_CHECK(
      inner % 8 == 0 && rows > 0,
      "backward of a linear layer [{}, {}] on {} tokens: the input size is a multiple of 8, "
      "and there are tokens",
      cols, inner, rows);
  if (d_x != nullptr) {
    matmul_cuda(
        ctx, {.rows = rows, .cols = inner, .inner = cols, .add = d_x_add, .a_stride = d_y_stride},
        d_y, w, d_x);
  }
  if (d_w != nullptr) {
    matmul_cuda(ctx,
                {.rows = cols,
                 .cols = inner,
                 .inner = rows,
                 .f32_out = true,
                 .trans_a = true,
                 .add = d_w_add,
                 .a_stride = d_y_stride},
                d_y, x, d_w);
  }
}

}  // namespace twell
