// SPDX-License-Identifier: Apache-2.0
// A checkpoint straight into GPU memory: each tensor is read from its mapped file, rounded to bf16
// and, for down_proj, transposed on the way. No copy of the model is made in host memory.
#pragma once

#include <filesystem>
#include <memory>

#include "twell/model/model_cuda.h"

namespace twell {

// InputError on any fault of the folder, on a model that the GPU code does not run, and, with the
// numbers, on one that does not fit with `other_bytes` beside it. Waits for the stream.
std::unique_ptr<ModelCuda> load_model_cuda(CudaContext& ctx, const std::filesystem::path& folder,
                                           int64_t other_bytes = 0);

}  // namespace twell
