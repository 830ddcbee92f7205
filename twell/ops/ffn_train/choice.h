// SPDX-License-Identifier: Apache-2.0
// How a layer trains on a GPU: dense or hybrid, forward and backward, chosen by what earlier steps
// measured. Plain arithmetic without CUDA headers.
//   execution   GPU      takes
//   dense       any      every layer
//   hybrid      8.0 on   activations that leave zeros, no biases, F a multiple of 8 up to 524,288
//                        (on other GPUs than Hopper 131,072), D up to 131,072, D F below 2^35
#pragma once

#include <cstdint>
#include <string>

#include "twell/ops/ffn/activity.h"
#include "twell/ops/ffn/gpu_layer.h"

namespace twell {

enum class FfnTrainExecution { kDense, kHybrid };
enum class FfnTrainPolicy { kAuto, kDense, kHybrid };  // kAuto: the faster one, by estimate

// Why this execution cannot train the layer; empty when it can. portable: on hybrid's kernels for
// every GPU, which others than Hopper run in any case.
std::string gpu_ffn_train_unsupported(FfnTrainExecution execution, const GpuFfnLayer& layer,
                                      bool portable = false);

// The execution for calls of `tokens` tokens. Dense where the policy's is not supported, and with
// kAuto before anything is measured.
FfnTrainExecution choose_gpu_ffn_train(const GpuFfnLayer& layer, int64_t tokens,
                                       FfnTrainPolicy policy, const LayerActivity& activity);

}  // namespace twell
