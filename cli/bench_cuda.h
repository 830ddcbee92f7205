// SPDX-License-Identifier: Apache-2.0
// GPU benchmarks of whole models: `twell bench forward` and `twell bench decode`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace twell::cli {

// The model to run: a checkpoint, or a preset with synthetic weights.
struct BenchSubject {
  std::filesystem::path checkpoint;  // empty: use the preset
  std::string preset;
  int64_t kv_heads = 0;  // of the preset; 0: as many as it has
  int64_t context = 0;   // longest sequence, if longer than the preset's
  uint64_t seed = 0;
  bool allow_non_finite = false;  // accept NaN and infinity in the checkpoint
};

struct BenchForwardCuda {
  BenchSubject subject;
  std::vector<int32_t> ids;        // [B * T]; empty with a preset: random ids are drawn
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
  int64_t prompt = 128;          // P: tokens in the cache when timing starts
  int64_t tokens = 128;          // tokens decoded per sequence
  std::vector<int32_t> prompts;  // [largest batch, P]; empty: random ids are drawn
  double temperature = 0.0;
  std::filesystem::path jsonl;
};
int run_bench_decode_cuda(const BenchDecode& arguments);

}  // namespace twell::cli
