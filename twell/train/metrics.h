// SPDX-License-Identifier: Apache-2.0
// Measurements of a training step, as metrics.jsonl (one JSON object per step) and as progress
// line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// One layer over the tokens of one optimizer step.
struct LayerMetrics {
  double nnz = 0.0;     // active neurons per token, mean
  int64_t max_nnz = 0;  // of one token
  // Neurons active on any of 128 consecutive tokens, mean; negative where not counted (CPU).
  double union_neurons = -1.0;
  // Micro-batches whose pattern did not fit its memory, so that backward computed it again (GPU).
  int64_t recomputed = 0;
  int64_t tail_rows = 0;    // tokens that the hybrid execution kept dense
  double l1 = 0.0;          // sum over neurons of |h|, mean over tokens
  int64_t dead = 0;         // neurons that no token activated
  double dead_share = 0.0;  // of all neurons
  FfnTrainExecution execution = FfnTrainExecution::kDense;
};

struct StepMetrics {
  int64_t step = 0;                  // optimizer steps done; 0: before the first
  int64_t tokens = 0;                // trained on since the start of the run
  double ce = 0.0;                   // nats per token
  std::optional<double> kl;          // to the teacher, nats per token
  std::optional<double> relu_share;  // of the activation, while a model is sparsified
  double l1 = 0.0;                   // mean of the layers' l1
  double l1_coeff = 0.0;
  double learning_rate = 0.0;
  double grad_norm = 0.0;  // before clipping
  double seconds = 0.0;    // of this step
  double tokens_per_second = 0.0;
  std::optional<double> mfu;         // share of the device's peak; dense FLOPs, bf16 products
  int64_t device_bytes = 0;          // of device memory in use; 0 on the CPU
  std::vector<LayerMetrics> layers;  // empty before the first step
  std::optional<double> validation_ce;

  double loss() const { return ce + l1_coeff * l1; }
  double mean_nnz() const;
  double mean_dead_share() const;
  int64_t hybrid_layers() const;  // that ran the hybrid execution
};

// Tells which layers have changed their execution, once the new one has lasted: a layer near the
// limit may change it and back for many steps.
class ExecutionChanges {
 public:
  static constexpr int64_t kSettledSteps = 20;

  // Of the next step: a line for the layers that went from one execution to another at about the
  // same time; empty where nothing settled. What the first step runs is taken as known.
  //   "layers 0, 3: dense -> hybrid since step 39, with 122.8 of 1024 neurons active per token"
  std::vector<std::string> settled(const StepMetrics& metrics, int64_t ffn);

 private:
  struct Layer {
    FfnTrainExecution told, now;
    int64_t since = 0;  // the first step of `now`
  };
  std::vector<Layer> layers_;
};

nlohmann::json metrics_json(const StepMetrics& metrics);

// Appends one line per step. Opening cuts off the lines of steps after `last_kept_step`, which will
// be done again, and a line that a crash left incomplete.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& path, int64_t last_kept_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// "step 120/1000  983.0k tok  CE 3.214  val 3.301  L1 12.1  nnz 31.4  dead 12%  hybrid 6/8  8.1k
// tok/s  MFU 41%  18.2 GiB  ETA 3m12s". `validation_ce` is the latest one. Unknown values are left
// out, as is an eta_seconds < 0.
std::string format_progress(const StepMetrics& metrics, int64_t steps,
                            std::optional<double> validation_ce, double eta_seconds);
std::string format_count(double value);       // 1234567 -> "1.23M"
std::string format_duration(double seconds);  // 3912 -> "1h05m"
std::string format_bytes(double bytes);       // 1536 -> "1.50 KiB"

}  // namespace twell
