// SPDX-License-Identifier: Apache-2.0
// Measurements of a training step: the rows of metrics.jsonl (one JSON object per step) and the
// progress line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twell/base/log.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// One layer's activity over the tokens of one optimizer step.
struct LayerMetrics {
  double nnz = 0.0;     // active neurons per token, mean
  int64_t max_nnz = 0;  // maximum over tokens
  // Mean number of neurons active on any of 128 consecutive tokens; negative when not counted
  // (CPU).
  double union_neurons = -1.0;
  // Micro-batches whose pattern exceeded its memory, so that backward recomputed it (GPU).
  int64_t recomputed = 0;
  int64_t tail_rows = 0;    // tokens that the hybrid execution stored densely
  double l1 = 0.0;          // sum over neurons of |h|, mean over tokens
  int64_t dead = 0;         // neurons that were active on no token
  double dead_share = 0.0;  // of all neurons
  FfnTrainExecution execution = FfnTrainExecution::kDense;
};

// What the model writes behind a prompt, in UTF-8.
struct TextSample {
  std::string prompt, text;
};

struct StepMetrics {
  int64_t step = 0;                  // optimizer steps done; 0: none
  int64_t tokens = 0;                // trained on since the run's start
  double ce = 0.0;                   // nats per token
  bool ce_in_bf16 = false;           // it and validation_ce are of logits rounded to bf16 (GPU)
  std::optional<double> kl;          // KL divergence to the teacher, nats per token
  std::optional<double> relu_share;  // of ReLU in the activation, during sparsification
  double l1 = 0.0;                   // mean of the layers' l1
  double l1_coeff = 0.0;
  double learning_rate = 0.0;
  double grad_norm = 0.0;  // before clipping
  double seconds = 0.0;    // of this step
  double tokens_per_second = 0.0;
  std::optional<double> mfu;         // dense FLOP/s as a share of the device's bf16 peak
  int64_t device_bytes = 0;          // of device memory in use; 0 on the CPU
  std::vector<LayerMetrics> layers;  // empty before the first step
  std::optional<double> validation_ce;
  std::vector<TextSample> samples;  // of the model behind this step

  double loss() const { return ce + l1_coeff * l1; }
  double mean(double LayerMetrics::*figure) const;  // over the layers; 0 without any
  double mean_nnz() const { return mean(&LayerMetrics::nnz); }
  double mean_dead_share() const { return mean(&LayerMetrics::dead_share); }
  int64_t hybrid_layers() const;  // layers with the hybrid execution
};

// Reports layers whose execution changed, once the new execution has lasted: a layer near the
// threshold may switch back and forth for many steps.
class ExecutionChanges {
 public:
  static constexpr int64_t kSettledSteps = 20;

  // Takes the metrics of the next step. Returns a line about the layers that changed in the same
  // way at about the same time, or an empty string when none has settled. The first step's
  // executions are not reported.
  //   "layers 0, 3: dense -> hybrid since step 39, with 122.8 of 1024 neurons active per token"
  std::vector<std::string> settled(const StepMetrics& metrics, int64_t ffn);

 private:
  struct Layer {
    FfnTrainExecution told, now;
    int64_t since = 0;  // first step with `now`
  };
  std::vector<Layer> layers_;
};

nlohmann::json metrics_json(const StepMetrics& metrics);

// The objects of a file of JSON lines. Damaged lines are left out, and `log` gets a warning with
// their numbers; a last line without its newline, which a crash leaves, is left out silently.
// InputError when the file cannot be read.
std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path, const LogSink& log);

// Appends one line per step. Opening a file removes what stands behind the line of
// `last_kept_step`, which will be repeated, and a line left incomplete by a crash. Damaged lines in
// front of it stay, and `log` gets a warning. A line that cannot be written, an InputError, is kept
// and written before the next one.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& path, int64_t last_kept_step, const LogSink& log = {});
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  void write(const StepMetrics& metrics);
  void flush();  // writes the lines that were kept

 private:
  std::filesystem::path path_;
  std::string unwritten_;
  int fd_ = -1;
};

// Example: "step 120/1000  ETA 3m12s  8.1k tok/s  CE 3.214  val 3.301  nnz 31.4  dead 12%  hybrid
// 6/8  L1 12.1  MFU 41%  18.2 GiB  983k tok". Where that is wider than `columns`, single spaces
// stand between the figures, and whole figures are left out, those that matter least first.
// `validation_ce` is the latest value. Unknown values and an eta_seconds < 0 are omitted.
std::string format_progress(const StepMetrics& metrics, int64_t steps,
                            std::optional<double> validation_ce, double eta_seconds,
                            size_t columns = std::numeric_limits<size_t>::max());
std::string format_count(double value);       // 1234567 -> "1.23M"
std::string format_duration(double seconds);  // 3912 -> "1h05m"
std::string format_bytes(double bytes);       // 1536 -> "1.50 KiB"

}  // namespace twell
