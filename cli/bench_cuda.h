// SPDX-License-Identifier: Apache-2.0
// GPU benchmarks of whole models: `twell bench forward` and `twell bench decode`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/bench_decode.h"
#include "twell/ops/ffn/ffn.h"

namespace twell::cli {

struct BenchForwardCuda {
  BenchSubject subject;
  std::vector<int32_t> ids;             // [B * T]; empty with a preset: random ids are drawn
  int64_t sequences = 0;                // B
  int64_t length = 0;                   // T; 0: the model's context
  FfnPolicy policy = FfnPolicy::kAuto;  // of the sparse run
  double seconds = 3.0;                 // window of one measurement
  std::filesystem::path patterns;       // captured patterns to replay, or empty
  std::filesystem::path jsonl;
};
int run_bench_forward_cuda(const BenchForwardCuda& arguments);

int run_bench_decode_cuda(const BenchDecode& arguments);

}  // namespace twell::cli
