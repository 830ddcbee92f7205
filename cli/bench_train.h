// SPDX-License-Identifier: Apache-2.0
// Benchmark of training steps: `twell bench train`, on the GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace twell::cli {

struct BenchTrain {
  std::string preset;
  int64_t micro_batch = 8;                        // 0: the largest that fits into GPU memory
  int64_t length = 0;                             // 0: the model's context
  int64_t steps = 10;                             // timed steps
  std::filesystem::path patterns;                 // captured patterns to replay, or empty
  std::vector<std::string> recompute = {"auto"};  // each level runs dense and sparse
  std::vector<std::string> sparse_recompute;      // more sparse runs, against the first dense run
  std::string moment_dtype = "f32";
  std::string gradient_dtype = "f32";
  int64_t gpus = 0;             // processes to start, one per GPU; 0: this one
  std::string policy = "auto";  // of the sparse runs
  bool document_mask = false;
  bool tune = false;
  uint64_t seed = 0;
  std::filesystem::path jsonl;
};
int run_bench_train_cuda(const BenchTrain& arguments);

}  // namespace twell::cli
