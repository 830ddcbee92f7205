// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/linear_cuda.h"

#include <map>
#include <tuple>

#include "twell/ops/matmul/few_rows.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

struct LinearPlans {
  std::map<std::tuple<int64_t, int64_t, int64_t, bool>, MatmulPlanCuda> plans;
  bool tuning = false;
};

}  // namespace

void linear_cuda(CudaContext& ctx, const LinearCuda& problem) {
  const auto [rows, cols, inner, x, w, y, f32_out] = problem;
  TWELL_CHECK(inner % 8 == 0, "linear layer [{}, {}]: the input size is a multiple of 8", cols,
              inner);
  if (rows == 0) return;
  if (rows <= kFewRows) {
    TWELL_CUDA_CHECK(launch_few_rows({rows, cols, inner, x, w, y, f32_out}, ctx.stream()));
    return;
  }
  LinearPlans& cache = ctx.service<LinearPlans>();
  const auto key = std::make_tuple(rows, cols, inner, f32_out);
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) {
    const MatmulShapeCuda shape{rows, cols, inner, true, false, f32_out};
    found = cache.plans.try_emplace(key, ctx, shape).first;
    if (cache.tuning) found->second.tune(ctx, x, w, y);
  }
  found->second.run(ctx, x, w, y);
}

void set_linear_tuning(CudaContext& ctx, bool on) { ctx.service<LinearPlans>().tuning = on; }

}  // namespace twell
