// SPDX-License-Identifier: Apache-2.0
// Tensors of a mapped file into f32 memory at the speed of the disk, on all threads: piece by piece
// is converted as it comes, hashed while it is in the caches, and let go of.
#pragma once

#include <functional>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {

struct TensorPlace {
  MatrixF out;              // [rows, cols], contiguous, of as many values as the tensor
  bool transposed = false;  // which stores [cols, rows]
};

// Reads each tensor, of a float type, to where place_of puts it; an empty `out` leaves it out.
// InputError when the content is not what was hashed when the file was written: by then memory has
// been written to.
void load_tensors(Context& ctx, const SafetensorsFile& file,
                  const std::function<TensorPlace(const TensorInfo&)>& place_of);

}  // namespace twell
