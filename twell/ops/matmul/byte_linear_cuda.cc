// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/byte_linear_cuda.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "twell/ops/matmul/cublas_lt.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

// cuBLAS is column-major: it computes y^T [N, M] = w x^T from w^T [K, N] and x^T [K, M].
class Plan {
 public:
  Plan(CudaContext& ctx, const ByteLinearCuda& shape) {
    cublasLtMatmulDesc_t operation = nullptr;
    TWELL_CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    operation_.reset(operation);
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
#if CUBLAS_VERSION >= 120900
    const int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
#else
    throw_error(__FILE__, __LINE__, "products with scales of rows need cuBLASLt 12.9 or later");
#endif
    set_scales(shape);  // the heuristic looks at whether there are scales, not at their values
    w_ = make_layout(CUDA_R_8F_E4M3, shape.inner, shape.cols);
    x_ = make_layout(CUDA_R_8F_E4M3, shape.inner, shape.rows, shape.x_stride);
    y_ = make_layout(CUDA_R_16BF, shape.cols, shape.rows);
    cublasLtMatmulPreference_t preference = nullptr;
    TWELL_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const LtOwned<cublasLtMatmulPreference_t> owned(preference);
    const auto bytes = static_cast<size_t>(kCublasWorkspaceBytes);
    TWELL_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)));
    cublasLtMatmulHeuristicResult_t results[kProposals];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        ctx.service<LtHandle>().handle, operation_.get(), w_.get(), x_.get(), y_.get(), y_.get(),
        preference, kProposals, results, &count);
    for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms_.push_back(results[i].algo);
    }
    TWELL_CHECK(!algorithms_.empty(), "cuBLASLt has no e4m3 algorithm for [{}, {}] x [{}, {}]",
                shape.rows, shape.inner, shape.inner, shape.cols);
  }

  // Times every proposal and keeps the fastest. Synchronises, and leaves y as it was if it is added
  // to.
  void tune(CudaContext& ctx, ByteLinearCuda problem) {
    const DeviceBuffer<__nv_bfloat16> spare(problem.add ? problem.rows * problem.cols : 0);
    if (problem.add) problem.y = spare.data();
    const CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
    size_t best = 0;
    double least = 0.0;
    for (chosen_ = 0; chosen_ < algorithms_.size(); ++chosen_) {
      std::vector<double> times;
      for (int repeat = 0; repeat < 7; ++repeat) {
        begin.record(ctx.stream());
        run(ctx, problem);
        end.record(ctx.stream());
        end.synchronize();
        times.push_back(end.milliseconds_since(begin));
      }
      times.erase(times.begin());  // the first one warms up
      std::ranges::nth_element(times, times.begin() + 3);
      if (chosen_ == 0 || times[3] < least) {
        least = times[3];
        best = chosen_;
      }
    }
    chosen_ = best;
  }

  void run(CudaContext& ctx, const ByteLinearCuda& problem) const {
    const LtHandle& lt = ctx.service<LtHandle>();
    const float one = 1.0f, beta = problem.add ? 1.0f : 0.0f;
    set_scales(problem);
    TWELL_CUBLAS_CHECK(cublasLtMatmul(
        lt.handle, operation_.get(), &one, problem.w.values, w_.get(), problem.x.values, x_.get(),
        &beta, problem.y, y_.get(), problem.y, y_.get(), &algorithms_[chosen_], lt.workspace.data(),
        static_cast<size_t>(lt.workspace.bytes()), ctx.stream()));
  }

 private:
  static constexpr int kProposals = 8;  // as for bf16

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) const {
    TWELL_CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof(value)));
  }
  void set_scales(const ByteLinearCuda& problem) const {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(problem.w.scales));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(problem.x.scales));
  }

  LtOwned<cublasLtMatmulDesc_t> operation_;
  LtOwned<cublasLtMatrixLayout_t> w_, x_, y_;
  std::vector<cublasLtMatmulAlgo_t> algorithms_;
  size_t chosen_ = 0;
};

struct BytePlans {
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, bool>, Plan> plans;
};

}  // namespace

void byte_linear_cuda(CudaContext& ctx, const ByteLinearCuda& problem) {
  TWELL_CHECK(problem.rows > 0 && problem.cols % 16 == 0 && problem.inner % 16 == 0,
              "a product [{}, {}] x [{}, {}] of e4m3 needs multiples of 16", problem.rows,
              problem.inner, problem.inner, problem.cols);
  BytePlans& cache = ctx.service<BytePlans>();
  const std::tuple key{problem.rows, problem.cols, problem.inner, problem.x_stride, problem.add};
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(key, ctx, problem).first;
    if (matmul_tuning(ctx)) found->second.tune(ctx, problem);
  }
  found->second.run(ctx, problem);
}

}  // namespace twell
