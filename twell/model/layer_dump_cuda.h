// SPDX-License-Identifier: Apache-2.0
// layer_dump.h on the GPU.
#pragma once

#include "twell/model/layer_dump.h"
#include "twell/model/model_cuda.h"

namespace twell {

// InputError also for a model whose projections are in 8 bits on the device.
LayerDump dump_layer_cuda(CudaContext& ctx, const ModelCuda& model, std::span<const int32_t> ids,
                          int64_t layer, FfnPolicy policy);

}  // namespace twell
