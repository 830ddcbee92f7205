// SPDX-License-Identifier: Apache-2.0
// Reads the tensors of a mapped file on all threads: widens them to f32, copies them, or only
// checks them. Each piece of the file is checked, converted and hashed while it is in the caches.
// Then its pages are released, so that loading needs little memory in addition to the model; those
// of tensors that stay in the file are kept.
#pragma once

#include <functional>
#include <optional>

#include "twell/base/context.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/format/byte_matrix.h"

namespace twell {

struct LoadOptions {
  bool allow_non_finite = false;  // accept NaN and infinity
  // Projections of layers in 8 bits, also of a checkpoint that stores them as floats; none: as
  // stored.
  std::optional<ByteType> weights = {};
  // The output head in the type of the projections too, also of a checkpoint that stores it as
  // floats.
  bool head_in_bytes = false;
};

// Reads each tensor of a float dtype to the place that place_of returns.
// InputError when the content does not match the file's hash, or, with tensor and index, when a
// value is not finite; the places have been written to by then.
void load_tensors(Context& ctx, const SafetensorsFile& file,
                  const std::function<TensorPlace(const TensorInfo&)>& place_of,
                  const LoadOptions& options = {});

}  // namespace twell
