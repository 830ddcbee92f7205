// SPDX-License-Identifier: Apache-2.0
// What a trainer needs beyond the model to continue bit for bit, in the folder `trainer/` of a
// checkpoint: state.json (step, options, data, hints) and optimizer.safetensors (moments, and the
// f32 weights when the model file holds fewer bits). The position in the data and the random
// numbers are pure functions of the seed and the step, so only the step is saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace twell {

// The smoothed activity of a layer over the last steps, from which its next execution is chosen.
// Negative: not known.
struct LayerHint {
  double nnz = -1.0;            // active neurons per token
  double union_neurons = -1.0;  // active on any of 128 tokens in a row; counted on the GPU
};

struct TrainerState {
  int64_t step = 0;              // optimizer steps done
  std::string trajectory;        // trajectory_text of the options
  std::string data;              // identity of the token stream
  std::vector<LayerHint> hints;  // [L]; empty before the first step
};

// Everything is flat [N], in the order of the model's parameter table.
struct OptimizerTensors {
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  std::span<float> weights;  // written when not empty; read when the file has them
};

void save_trainer_state(const std::filesystem::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors);
// InputError on anything missing, damaged or of another size.
TrainerState load_trainer_state(const std::filesystem::path& checkpoint,
                                const OptimizerTensors& tensors);

// The number of warm-up steps that the run was started with.
int64_t saved_warmup_steps(const std::filesystem::path& checkpoint);
// What is wrong with a checkpoint of a training run, model and trainer state; empty when it is
// intact. Reads all of it.
std::string checkpoint_fault(const std::filesystem::path& checkpoint);

// InputError naming the first option whose value differs from the one the run was started with.
// Both are texts of trajectory_text.
void require_same_trajectory(const std::string& saved, const std::string& given);

}  // namespace twell
