// SPDX-License-Identifier: Apache-2.0
// The state that a trainer needs in addition to the model to continue bit for bit, in the folder
// `trainer/` of a checkpoint: state.json (step, options, data, hints) and optimizer.safetensors
// (moments, and the f32 weights when the model file has lower precision). Several ranks write a
// file each, optimizer-RRRRR-of-WWWWW.safetensors, with their pieces of the flat arrays one after
// another and the table of these pieces (`pieces`, I64 [n, 2]: begin in the flat array, size); any
// number of ranks can read them. The data position and the random numbers are pure functions of the
// seed and the step, so only the step is saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "twell/train/shard_layout.h"

namespace twell {

// A layer's activity, smoothed over the last steps, which decides its next execution. Negative:
// unknown.
struct LayerHint {
  double nnz = -1.0;            // active neurons per token
  double union_neurons = -1.0;  // active on any of 128 consecutive tokens; GPU only
};

struct TrainerState {
  int64_t step = 0;              // optimizer steps done
  std::string trajectory;        // trajectory_text of the options
  std::string data;              // identity of the token stream
  std::vector<LayerHint> hints;  // [L]; empty before the first step
  int ranks = 1;                 // that wrote the optimizer's state; set by reading
};

struct OptimizerTensors {
  std::span<float> exp_avg;     // [S], a rank's shard (shard_layout.h)
  std::span<float> exp_avg_sq;  // [S]
  // [N], in the order of the model's parameter table. Written when not empty (each rank its
  // pieces); read when the files have them.
  std::span<float> weights;
};

// Every rank writes its file, and rank 0 state.json as well.
void save_trainer_state(const std::filesystem::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors, const ShardLayout& layout);
// InputError when anything is missing, damaged or of a different size.
TrainerState load_trainer_state(const std::filesystem::path& checkpoint,
                                const OptimizerTensors& tensors, const ShardLayout& layout);

// Whether the run that saved the checkpoint masked documents; false when it has no trainer state.
bool saved_document_mask(const std::filesystem::path& checkpoint);
// An integer among the options of the run that saved the checkpoint (trajectory_text).
int64_t saved_option(const std::filesystem::path& checkpoint, const char* name);
// Reads all of a training checkpoint, model and trainer state, and describes the first fault; empty
// when it is intact.
std::string checkpoint_fault(const std::filesystem::path& checkpoint);

// InputError that names the first option whose value differs between the saved and the given
// trajectory_text.
void require_same_trajectory(const std::string& saved, const std::string& given);

}  // namespace twell
