// SPDX-License-Identifier: Apache-2.0
// Dense matrix product on the GPU through cuBLASLt, bf16 in, bf16 or f32 out, f32 accumulation:
//   c [M, N] = epilogue(op(a) op(b)),  a [M, K] or stored [K, M],
//   b [N, K] (a weight of a linear layer) or [K, N].
// A plan fixes the shape and the algorithm; it may be run on any operands of that shape.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>

#include <compare>
#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

struct MatmulShapeCuda {
  int64_t rows = 0;      // M
  int64_t cols = 0;      // N
  int64_t inner = 0;     // K
  bool trans_b = false;  // b is [N, K]
  bool relu = false;     // applied in the epilogue
  bool f32_out = false;  // c is float, not __nv_bfloat16
  bool trans_a = false;  // a is [K, M]
  bool add = false;      // c += op(a) op(b), which may be rounded to c's type before

  auto operator<=>(const MatmulShapeCuda&) const = default;
};

class MatmulPlanCuda {
 public:
  // Takes the first algorithm that cuBLASLt proposes. Throws Error where it has none.
  MatmulPlanCuda(CudaContext& ctx, const MatmulShapeCuda& shape);
  ~MatmulPlanCuda();
  MatmulPlanCuda(const MatmulPlanCuda&) = delete;
  MatmulPlanCuda& operator=(const MatmulPlanCuda&) = delete;

  // Times every proposed algorithm on these operands and keeps the fastest. Synchronises, and
  // leaves c with some of its results, or as it was if the plan adds to it.
  void tune(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b, void* c);

  // Enqueues; never synchronises. c [M, N] is of the shape's output type. Plans of one context
  // share a workspace, which the context's stream keeps apart.
  void run(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b, void* c) const;

 private:
  static constexpr int kProposals = 16;
  void run_with(CudaContext& ctx, const cublasLtMatmulAlgo_t& algorithm, const __nv_bfloat16* a,
                const __nv_bfloat16* b, void* c) const;

  MatmulShapeCuda shape_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t layout_a_ = nullptr;
  cublasLtMatrixLayout_t layout_b_ = nullptr;
  cublasLtMatrixLayout_t layout_c_ = nullptr;
  cublasLtMatmulHeuristicResult_t proposals_[kProposals];
  int proposal_count_ = 0;
  int chosen_ = 0;
};

// The same with the plan that the context keeps of each shape. The first call of a shape makes the
// plan, which allocates; later ones can be captured into a graph.
void matmul_cuda(CudaContext& ctx, const MatmulShapeCuda& shape, const __nv_bfloat16* a,
                 const __nv_bfloat16* b, void* c);

// While on, matmul_cuda times every algorithm that cuBLASLt proposes for a shape that it sees for
// the first time, and synchronises then. A stopwatch chooses, so that another process may round
// differently: for benchmarks. Off at first.
void set_matmul_tuning(CudaContext& ctx, bool on);

}  // namespace twell
