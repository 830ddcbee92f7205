// SPDX-License-Identifier: Apache-2.0
// Random weights whose gates can be made sparse on any input without changing anything else: one
// component of the residual stream is constant, so the gates' weights for it act as a bias, which
// is 0 (half of the neurons are active) or negative (about one in 200 is).
#pragma once

#include <memory>

#include "twell/base/context.h"
#include "twell/model/weights.h"

namespace twell {

class CudaContext;
class ModelCuda;

// The negative bias. Its bf16 consists of two equal bytes, which cudaMemset2D can write.
inline constexpr float kSyntheticBias = -0.37109375f;

// The weights are a function of the seed. Half of the neurons are active.
std::unique_ptr<Model> synthetic_model(Context& ctx, const ModelConfig& config, uint64_t seed);

// Makes one neuron in 200 active, or half of them again. On a GPU the context's stream orders the
// change.
void set_synthetic_sparsity(Model& model, bool sparse);
// A model in e4m3 must have been quantised while it was sparse.
void set_synthetic_sparsity(CudaContext& ctx, const ModelCuda& model, bool sparse);

}  // namespace twell
