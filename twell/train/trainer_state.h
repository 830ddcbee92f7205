// SPDX-License-Identifier: Apache-2.0
// The state that a trainer needs in addition to the model to continue bit for bit, in the folder
// `trainer/` of a checkpoint: state.json (step, options, data, hints) and optimizer.safetensors
// (moments, and the f32 weights when the model file has lower precision). The data position and the
// random numbers are pure functions of the seed and the step, so only the step is saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

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
};

// Every array is flat [N], in the order of the model's parameter table.
struct OptimizerTensors {
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  std::span<float> weights;  // written when not empty; read when the file has them
};

void save_trainer_state(const std::filesystem::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors);
// InputError when anything is missing, damaged or of a different size.
TrainerState load_trainer_state(const std::filesystem::path& checkpoint,
                                const OptimizerTensors& tensors);

// The number of warm-up steps of the run that saved the checkpoint.
int64_t saved_warmup_steps(const std::filesystem::path& checkpoint);
// Reads all of a training checkpoint, model and trainer state, and describes the first fault; empty
// when it is intact.
std::string checkpoint_fault(const std::filesystem::path& checkpoint);

// InputError that names the first option whose value differs between the saved and the given
// trajectory_text.
void require_same_trajectory(const std::string& saved, const std::string& given);

}  // namespace twell
