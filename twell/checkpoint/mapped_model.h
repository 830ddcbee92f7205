// SPDX-License-Identifier: Apache-2.0
// A checkpoint as a model for inference on the CPU. Matrices stay in the mapped files in their
// dtype (F32, BF16 or F16) and are widened where they are used. Memory holds copies only of norms
// and biases, in f32, and of down_proj, in its dtype: a file stores it as [D, F], while sparse
// executions need a neuron per row. The pages of the file that were copied are released, so a
// process holds each weight once.
//
// Projections and an output head in int8 stay in the file too. With options.weights int8 and
// options.head_in_bytes, those of a file of floats are quantised, into memory; the head of tied
// embeddings becomes a matrix of its own. Weights in e4m3 are widened to f32.
//
// Loading checks what load_model checks (checkpoint.h), in one pass on all threads. The files must
// not be changed afterwards; replacing a folder, as twell's own commands do, leaves the mapped
// files as they were.
#pragma once

#include <filesystem>
#include <memory>

#include "twell/base/context.h"
#include "twell/checkpoint/tensor_load.h"
#include "twell/model/weights.h"

namespace twell {

std::shared_ptr<const ModelView> map_model(Context& ctx, const std::filesystem::path& folder,
                                           const LoadOptions& options = {});

}  // namespace twell
