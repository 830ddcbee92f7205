// SPDX-License-Identifier: Apache-2.0
// A model's feed-forward layers, as the registry of executions describes them.
#pragma once

#include "twell/model/config.h"
#include "twell/ops/ffn/gpu_layer.h"

namespace twell {

inline GpuFfnShape ffn_shape(const ModelConfig& config) {
  return {.width = config.width,
          .ffn = config.ffn,
          .gated = config.gated,
          .activation = config.activation,
          .biased = config.mlp_bias};
}

}  // namespace twell
