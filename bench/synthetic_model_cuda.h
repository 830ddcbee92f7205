// SPDX-License-Identifier: Apache-2.0
// Random weights whose gates can be made sparse on any input without changing anything else: one
// component of the residual stream is constant, so the gates' weights for it act as a bias, which
// is 0 (half of the neurons are active) or negative.
#pragma once

#include <memory>

#include "twell/model/model_cuda.h"

namespace twell {

// The weights are a function of the seed.
std::unique_ptr<ModelCuda> synthetic_model(CudaContext& ctx, const ModelConfig& config,
                                           uint64_t seed);
// Runs on the context's stream. When sparse, about one neuron in 200 is active.
void set_synthetic_sparsity(CudaContext& ctx, const ModelCuda& model, bool sparse);

}  // namespace twell
