// SPDX-License-Identifier: Apache-2.0
#include "python/csrc/totals.h"

namespace twell::python {
namespace {

__global__ void report_call_kernel(ReportCall report) {
  FfnTrainCountsCuda& call = *report.call;
  FfnTrainCountsCuda& totals = *report.totals;
  report.counts[0] = static_cast<int64_t>(call.tokens);
  report.counts[1] = static_cast<int64_t>(call.nnz);
  report.counts[2] = static_cast<int64_t>(call.union_neurons);
  report.counts[3] = call.max_row_nnz;
  *report.l1 = static_cast<float>(call.l1_sum);
  totals.nnz += call.nnz;
  totals.tokens += call.tokens;
  totals.union_neurons += call.union_neurons;
  totals.l1_sum += call.l1_sum;
  if (call.max_row_nnz > totals.max_row_nnz) totals.max_row_nnz = call.max_row_nnz;
  totals.recomputed += call.recomputed;
  call = {};
}

}  // namespace

void launch_report_call(const ReportCall& report, cudaStream_t stream) {
  report_call_kernel<<<1, 1, 0, stream>>>(report);
  TWELL_CUDA_CHECK_LAUNCH("report_call_kernel");
}

}  // namespace twell::python
