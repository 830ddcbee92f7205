// SPDX-License-Identifier: Apache-2.0
// Dense matrix product on the GPU through cuBLASLt, bf16 in, bf16 or f32 out, f32 accumulation:
//   c [M, N] = epilogue(op(a) op(b)),  a [M, K] or stored [K, M],
//   b [N, K] (a weight of a linear layer) or [K, N].
// A plan is of one shape and may be run on any operands of that shape.
#pragma once

#include <cuda_bf16.h>

#include <compare>
#include <cstdint>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/ops/matmul/cublas_lt.h"

namespace twell {

struct MatmulShapeCuda {
  int64_t rows = 0;      // M
  int64_t cols = 0;      // N
  int64_t inner = 0;     // K
  bool trans_b = false;  // b is [N, K]
  bool relu = false;     // applied in the epilogue
  bool f32_out = false;  // c is float, not __nv_bfloat16
  bool trans_a = false;  // a is [K, M]
  bool add = false;      // c += op(a) op(b), with the product possibly rounded to c's type first
  int64_t a_stride = 0;  // values from a row of a, as it is stored, to the next; 0: contiguous
  int64_t c_stride = 0;  // of c

  auto operator<=>(const MatmulShapeCuda&) const = default;
};

class MatmulPlanCuda {
 public:
  // Takes the first algorithm that cuBLASLt proposes, or another of its proposals where that is
  // known to be faster. A plan that is run often then times those of its proposals that give the
  // same bits, in their turn, and keeps the fastest. Throws Error if cuBLASLt proposes none.
  MatmulPlanCuda(CudaContext& ctx, const MatmulShapeCuda& shape);

  // Times every proposed algorithm on these operands and keeps the fastest. Synchronises, and
  // leaves c with one of the results, or unchanged if the plan adds to it.
  void tune(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b, void* c);

  // Enqueues; never synchronises. c [M, N] has the shape's output type. Plans of one context share
  // a workspace, which is safe because they run on one stream.
  void run(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b, void* c);

  // Whether the choice is final. It is after kRunsToSettle runs outside of graphs, if the GPU had
  // finished all but the last of them when that was enqueued. Times for which the GPU waited for
  // the host do not count; where most are such, the choice stays as it was.
  static const int64_t kRunsToSettle;
  bool settled() const { return candidates_.size() <= 1; }

 private:
  static constexpr int kProposals = 8;
  void propose_ampere_kernels(CudaContext& ctx);
  void settle(bool timed);
  int fastest_proposal() const;
  cublasStatus_t try_with(CudaContext& ctx, const cublasLtMatmulAlgo_t& algorithm,
                          const __nv_bfloat16* a, const __nv_bfloat16* b, void* c) const;
  void run_with(CudaContext& ctx, const cublasLtMatmulAlgo_t& algorithm, const __nv_bfloat16* a,
                const __nv_bfloat16* b, void* c) const;

  MatmulShapeCuda shape_;
  LtOwned<cublasLtMatmulDesc_t> operation_;
  LtOwned<cublasLtMatrixLayout_t> layout_a_, layout_b_, layout_c_;
  std::vector<cublasLtMatmulHeuristicResult_t> proposals_;
  int chosen_ = 0;
  bool tunes_first_ = false;  // with the operands of its first run
  // Proposals that are known to give the bits of the chosen one; none where nothing is known.
  std::vector<int> candidates_;
  int64_t runs_ = 0;               // of which the first are not timed
  std::vector<CudaEvent> events_;  // begin and end of each timed run
};

// The same with the context's plan for the shape. The first call of a shape makes the plan, which
// allocates; later ones can be captured into a graph.
void matmul_cuda(CudaContext& ctx, const MatmulShapeCuda& shape, const __nv_bfloat16* a,
                 const __nv_bfloat16* b, void* c);

// While on, the first matmul_cuda of a shape times every algorithm that cuBLASLt proposes, and
// synchronises. For benchmarks: the choice depends on timing, so another process may round
// differently. Off at first. In a portable build, which takes every GPU for one of compute
// capability 8.0, plans that are made while it is on have cuBLASLt's kernels for these alone, and
// time them in their first run.
void set_matmul_tuning(CudaContext& ctx, bool on);
bool matmul_tuning(CudaContext& ctx);

}  // namespace twell
