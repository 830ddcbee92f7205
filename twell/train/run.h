// SPDX-License-Identifier: Apache-2.0
// A training run from its first step, or from a checkpoint, to its last: validation, metrics,
// checkpoints, and a clean stop. With several ranks, all call run_training; rank 0 has the folder's
// lock, writes and reports, and the others write their shards of checkpoints only.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/log.h"
#include "twell/data/training_data.h"
#include "twell/model/weights.h"
#include "twell/tokenizer/tokenizer.h"
#include "twell/train/engine.h"
#include "twell/train/metrics.h"
#include "twell/train/options.h"
#include "twell/train/run_folder.h"
#include "twell/train/text_files.h"

namespace twell {

// Passed to on_progress after every step, and once before the first if the model is validated then.
struct Progress {
  const StepMetrics& metrics;
  int64_t steps = 0;                    // of the whole run
  std::optional<double> validation_ce;  // the latest one
  double eta_seconds = -1.0;            // negative: unknown
};

struct TrainRun {
  const TrainOptions& options;  // resolved
  const Tokenizer& tokenizer;   // saved with every checkpoint
  const TrainingData& data;
  const RunFolder& folder;
  std::string saved_options;              // saved for --resume once the run can start
  std::optional<Checkpoint> resume_from;  // the same on all ranks; its weights are in the model
  bool tensorboard = false;
  const std::atomic<bool>& stop;  // once true on any rank: finish the step, save, return
  LogSink log;
  std::function<void(const Progress&)> on_progress;
  TextFiles text_files;  // of the original model, saved with every checkpoint
  // With options.sample_every: what the model, whose weights are up to date, writes behind each of
  // options.sample_prompts, in UTF-8; called on rank 0, every so many steps and after the last. An
  // InputError is a warning. infer/text_sampler.h makes it.
  std::function<std::vector<std::string>(const Model& model)> sample;
  // A checkpoint that cannot be saved is a warning, and is tried again at the next one. The run's
  // last one is tried this often, with this pause in between, or until `stop` becomes true.
  int64_t last_save_attempts = 60;
  std::chrono::milliseconds last_save_pause{10'000};
};

struct TrainSummary {
  StepMetrics last;  // last step of this call; step 0: none
  int64_t steps_done = 0;
  bool interrupted = false;
  double seconds = 0.0;
  std::optional<double> first_validation_ce, last_validation_ce;  // of this call
  std::filesystem::path checkpoint;                               // the newest, on rank 0
};

// InputError when training diverges or the last checkpoint cannot be saved; the last good one
// stays. `ctx` is the host context.
TrainSummary run_training(Context& ctx, TrainEngine& engine, const TrainRun& run);

// InputError when the tokenizer has more tokens than the model's vocabulary.
void check_tokenizer(const ModelConfig& config, const Tokenizer& tokenizer);

}  // namespace twell
