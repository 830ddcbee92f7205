// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/qkv/qkv_cuda.h"

#include "twell/base/cuda.h"
#include "twell/sm90/tensor_map.h"

namespace twell {
namespace {

using namespace paired_gemm;

// With fewer tokens, tiles of 256 x 256 leave much of the device idle.
constexpr int64_t kFewest = 1024;

bool supported(const CudaContext& ctx, const QkvCuda& problem) {
  const RopeCuda& rope = problem.rope;
  return ctx.compute_capability() == 90 && (rope.head_dim == 64 || rope.head_dim == 128) &&
         rope.bias == nullptr && !rope.inverse && problem.width > 0 && problem.width % 8 == 0 &&
         rope.tokens < int64_t{1} << 30;
}

}  // namespace

bool qkv_is_fused(const CudaContext& ctx, const QkvCuda& problem) {
  return problem.rope.tokens >= kFewest && supported(ctx, problem);
}

void qkv_cuda(CudaContext& ctx, const QkvCuda& problem) {
  const RopeCuda& rope = problem.rope;
  TWELL_CHECK(supported(ctx, problem), "fused projection of {} heads of {} from width {} on {}",
              rope.heads, rope.head_dim, problem.width, ctx.device_name());
  if (rope.tokens == 0) return;
  const int64_t columns = (rope.heads + 2 * rope.kv_heads) * rope.head_dim;
  const qkv::Target target{
      .qkv_map = sm90::matrix_tensor_map(rope.qkv, rope.tokens, columns, qkv::kStoredRows),
      .cos = reinterpret_cast<const float2*>(rope.cos),
      .sin = reinterpret_cast<const float2*>(rope.sin),
      .positions = rope.positions,
      .cache_rows = rope.cache_rows,
      .qkv = rope.qkv,
      .keys = rope.keys,
      .values = rope.values,
      .tokens = static_cast<int>(rope.tokens),
      .q_columns = static_cast<int>(rope.heads * rope.head_dim),
      .kv_columns = static_cast<int>(rope.kv_heads * rope.head_dim)};
  const Operands operands =
      make_operands(problem.x, problem.w, rope.tokens, target.columns(), problem.width);
  TWELL_CUDA_CHECK(qkv::launch_qkv_sm90(operands, target, static_cast<int>(rope.head_dim),
                                        ctas(operands, ctx.multiprocessors()), ctx.stream()));
}

}  // namespace twell
