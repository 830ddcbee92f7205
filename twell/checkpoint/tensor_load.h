// SPDX-License-Identifier: Apache-2.0
// Reads the tensors of a mapped file into f32 memory, on all threads. Each piece of the file is
// converted, checked and hashed while it is in the caches, then its pages are released, so that
// loading needs little memory in addition to the model.
#pragma once

#include <functional>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {

struct TensorPlace {
  MatrixF out;              // [rows, cols], contiguous, as many values as the tensor has
  bool transposed = false;  // whether the tensor stores [cols, rows]
};

struct LoadOptions {
  bool allow_non_finite = false;  // accept NaN and infinity
};

// Reads each tensor of a float dtype to the place that place_of returns; an empty `out` skips it.
// InputError when the content does not match the file's hash, or, with tensor and index, when a
// value is not finite; the places have been written to by then.
void load_tensors(Context& ctx, const SafetensorsFile& file,
                  const std::function<TensorPlace(const TensorInfo&)>& place_of,
                  const LoadOptions& options = {});

}  // namespace twell
