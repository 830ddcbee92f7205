// SPDX-License-Identifier: Apache-2.0
// Time, energy and memory of forward passes of whole models on the GPU, dense and sparse, in one
// process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/pattern_replay_cuda.h"
#include "twell/model/forward_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {

struct ForwardRunCuda {
  Timing body, full;              // seconds: the layers alone; with logits for every token
  double joules_per_token = 0.0;  // of the body over the window; 0 without a counter
  double watts = 0.0;             // mean over the window
  std::map<std::string, double> stage_seconds;  // of one forward, summed over the layers
  std::vector<double> nnz_per_token;            // [L]; empty where not counted
  std::vector<std::string> executions;          // [L]
  int64_t checked_pairs = 0, missed_pairs = 0;  // FfnPlan's, of all layers
  int64_t rotated_bytes = 0;                    // ForwardCuda::rotated_memory
};

class ForwardBenchmarkCuda {
 public:
  // ids [B * T]. The model must outlive this object. Turns on matmul tuning (set_matmul_tuning).
  // policy: of sparse(); one with screens reads the weights of the gates here.
  ForwardBenchmarkCuda(CudaContext& ctx, const ModelCuda& model, std::span<const int32_t> ids,
                       int64_t length, FfnPolicy policy = FfnPolicy::kAuto);

  // Runs the dense layers through tuned cuBLASLt.
  ForwardRunCuda dense(double window_seconds);
  // Runs the executions that the FFN chooses from measured activity; with a replay, runs the
  // replay.
  ForwardRunCuda sparse(double window_seconds, PatternReplayCuda* replay);
  // ||sparse - dense|| / ||dense|| of the final hidden states.
  double sparse_error();

  const GpuEnergyMeter& energy() const { return energy_; }

 private:
  ForwardRunCuda measure(double window_seconds, const ForwardHooksCuda& hooks);
  void body(const ForwardHooksCuda& hooks);
  void head();
  void dense_bytes(int64_t layer, const FfnForwardCuda& problem);
  Timing time_full(const ForwardHooksCuda& hooks);
  // Called with true after an FFN's gate and with false after its other products.
  using Done = std::function<void(bool gate)>;
  Done done_ = [](bool) {};

  CudaContext& ctx_;
  const ModelCuda& model_;
  std::span<const int32_t> ids_;
  std::vector<ForwardSequence> sequences_;
  ForwardCuda forward_;
  DenseFfnCuda dense_;
  bool dense_tuned_ = false;
  FfnPlansCuda dense_plans_;    // of a model in e4m3
  DeviceBuffer<float> logits_;  // of one chunk of tokens
  GpuEnergyMeter energy_;
};

}  // namespace twell
