// SPDX-License-Identifier: Apache-2.0
// The benchmarks of whole models on the GPU, behind `twell bench forward` and `twell bench decode`.
// In builds without CUDA they throw InputError.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace twell::cli {

// What is run: a checkpoint, or a preset with synthetic weights.
struct BenchSubject {
  std::filesystem::path checkpoint;  // empty: the preset
  std::string preset;
  uint64_t seed = 0;
  bool allow_non_finite = false;  // of the checkpoint's weights
};

struct BenchForwardCuda {
  BenchSubject subject;
  std::vector<int32_t> ids;        // [B * T]; of a preset: empty, random ones are made
  int64_t sequences = 0;           // B
  int64_t length = 0;              // T; 0: the model's context
  double seconds = 3.0;            // window of one measurement
  std::filesystem::path patterns;  // captured patterns to replay, or empty
  std::filesystem::path jsonl;
};
int run_bench_forward_cuda(const BenchForwardCuda& arguments);

struct BenchDecode {
  BenchSubject subject;
  std::vector<int64_t> batches = {1, 8, 64};
  int64_t prompt = 128;  // tokens in the cache when the clock starts
  int64_t tokens = 128;  // decoded per sequence
  std::filesystem::path jsonl;
};
int run_bench_decode_cuda(const BenchDecode& arguments);

}  // namespace twell::cli
