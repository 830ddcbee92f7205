// SPDX-License-Identifier: Apache-2.0
// Reads the tensors of a mapped file into f32 memory, on all threads. The file is taken in pieces:
// each is converted, checked and hashed while it is in the caches, and then its pages are released,
// so that loading takes little memory beside the model.
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
  bool allow_non_finite = false;  // take weights that are infinite or NaN as they are
};

// Reads each tensor, of a float dtype, to where place_of puts it; an empty `out` leaves it out.
// InputError when the content is not what was hashed when the file was written, or, naming tensor
// and index, when a value that is read is not finite; the places have been written to by then.
void load_tensors(Context& ctx, const SafetensorsFile& file,
                  const std::function<TensorPlace(const TensorInfo&)>& place_of,
                  const LoadOptions& options = {});

}  // namespace twell
