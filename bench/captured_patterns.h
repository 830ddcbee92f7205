// SPDX-License-Identifier: Apache-2.0
// Captured activation patterns: which neurons of a layer's FFN fired on each of M tokens, as
// safetensors with layerN.row_nnz U16 [M] and layerN.col U16 [sum of row_nnz], ascending in a row.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "twell/checkpoint/safetensors.h"

namespace twell {

struct CapturedLayer {
  std::vector<uint16_t> row_nnz;  // [M]
  std::vector<uint16_t> columns;  // [sum of row_nnz]
};

// Layers that the file holds a pattern of, not all of a model's perhaps. InputError when none.
std::set<int64_t> captured_layers(const SafetensorsFile& file);
// InputError when it is not there or not of that form.
CapturedLayer read_captured_layer(const SafetensorsFile& file, int64_t layer);

}  // namespace twell
