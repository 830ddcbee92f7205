// SPDX-License-Identifier: Apache-2.0
// The way from a user's settings (option_table.h) to a run that can train: the model that is asked
// for, the options joined and checked, the tokenizer matched, the point to resume from, the model's
// weights and the engine. The command line and Python start runs by these calls alone. Faults are
// InputErrors in the words of the command line's flags.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/checkpoint/tensor_load.h"
#include "twell/data/training_data.h"
#include "twell/dist/communicator.h"
#include "twell/model/weights.h"
#include "twell/tokenizer/tokenizer.h"
#include "twell/train/engine.h"
#include "twell/train/option_table.h"
#include "twell/train/run_device.h"
#include "twell/train/run_folder.h"
#include "twell/train/text_files.h"

namespace twell {

// The model that the settings ask for: that of the checkpoint, or the preset with what is set. Its
// vocabulary is matched to the tokenizer later.
ModelConfig requested_config(const RunSettings& settings);

struct RequestedOptions {
  TrainOptions options;  // not resolved yet (resolve_options)
  std::string note;      // what the user should know, or empty
};
// Joins the settings for this model. L1 is off by default where the activation leaves no zeros, and
// a note says so.
RequestedOptions requested_options(const RunSettings& settings, const ModelConfig& config);

// Takes the vocabulary size from the tokenizer unless it is set, and checks the two.
ModelConfig match_tokenizer(const RunSettings& settings, ModelConfig config,
                            const Tokenizer& tokenizer);

// The options of a run that goes on from this checkpoint: a warm-up and a batch that were derived
// stay those that it began with. InputError when the run is past its end.
TrainOptions resumed_options(TrainOptions requested, const ModelConfig& config,
                             const Checkpoint& resume_from);

// A run about to begin or to go on. Everything that is passed outlives it.
class StartedRun {
 public:
  // Loads or initialises the model, and loads the teacher where it distils.
  StartedRun(Context& ctx, const RunSettings& settings, const ModelConfig& config,
             const TrainOptions& requested, const std::optional<Checkpoint>& resume_from,
             const LoadOptions& load = {});

  const TrainOptions& options() const { return options_; }  // resolved
  Model& model() { return *model_; }
  // The files for chat, generation and transformers of the original, or of the checkpoint that the
  // run goes on with.
  const TextFiles& text_files() const { return text_files_; }

  void make_engine(Context& ctx, const RunDevice& device, const TrainingData& data,
                   Communicator* ranks);
  TrainEngine& engine() { return *engine_; }
  // Frees the engine, and with it the device's memory.
  void drop_engine() { engine_.reset(); }

 private:
  TrainOptions options_;
  std::unique_ptr<Model> model_, teacher_;
  TextFiles text_files_;
  std::unique_ptr<TrainEngine> engine_;
};

}  // namespace twell
