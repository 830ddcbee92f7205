// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint into GPU memory. Each tensor is read from its mapped file, checked for values
// that are not finite, rounded to bf16 and, for down_proj, transposed. Host memory holds no copy of
// the model.
#pragma once

#include <filesystem>
#include <memory>

#include "twell/checkpoint/tensor_load.h"
#include "twell/model/model_cuda.h"

namespace twell {

// InputError on any fault of the folder, on a model that the GPU code does not support, and, with
// the numbers, on one that does not fit into GPU memory together with `other_bytes`. Waits for the
// stream. Projections, and an output head, are in e4m3 where the options or the checkpoint ask for
// it and the device has it, else in bf16.
std::unique_ptr<ModelCuda> load_model_cuda(CudaContext& ctx, const std::filesystem::path& folder,
                                           int64_t other_bytes = 0,
                                           const LoadOptions& options = {});

// What will be. InputError when the options ask for what the device or the checkpoint does
// not have.
CudaBytes loads_in_bytes(const std::filesystem::path& folder, const LoadOptions& options);

}  // namespace twell
