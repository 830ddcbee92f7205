// SPDX-License-Identifier: Apache-2.0
// What a trainer needs beyond the model to continue bit for bit, in the folder `trainer/` of a
// checkpoint: state.json (step, options, data, hints) and optimizer.safetensors (moments, and the
// f32 weights when the model file holds fewer bits). Data position and random numbers are pure
// functions of the seed and the step, so that the step is all there is to save of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace twell {

// How active a layer was over the last steps, smoothed: what its next execution is chosen from.
// Negative: not known.
struct LayerHint {
  double nnz = -1.0;            // active neurons per token
  double union_neurons = -1.0;  // active on any of 128 tokens in a row; counted on the GPU
};

struct TrainerState {
  int64_t step = 0;              // optimizer steps done
  nlohmann::json trajectory;     // trajectory_json of the options
  std::string data;              // identity of the token stream
  std::vector<LayerHint> hints;  // [L]; empty before the first step
};

// Everything is flat [N], in the order of the model's parameter table.
struct OptimizerTensors {
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  std::span<float> weights;  // written when not empty; read back when the file has them
};

void save_trainer_state(const std::filesystem::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors);
// InputError on anything missing, damaged or of another size.
TrainerState load_trainer_state(const std::filesystem::path& checkpoint,
                                const OptimizerTensors& tensors);

// InputError naming the first option whose value differs from the one the run was started with.
void require_same_trajectory(const nlohmann::json& saved, const nlohmann::json& given);

}  // namespace twell
