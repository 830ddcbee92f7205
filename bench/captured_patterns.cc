// SPDX-License-Identifier: Apache-2.0
#include "bench/captured_patterns.h"

#include <cstdio>
#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

std::vector<uint16_t> read_u16(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& tensor = file.tensor(name);
  TWELL_REQUIRE(tensor.dtype == "U16" && tensor.shape.size() == 1,
                "pattern tensor {} must be U16 with one dimension, it is {} with {}", name,
                tensor.dtype, tensor.shape.size());
  std::vector<uint16_t> values(static_cast<size_t>(tensor.shape[0]));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

}  // namespace

std::set<int64_t> captured_layers(const SafetensorsFile& file) {
  std::set<int64_t> layers;
  for (const auto& [name, tensor] : file.tensors()) {
    int64_t layer = -1;
    int end = 0;
    if (std::sscanf(name.c_str(), "layer%ld.row_nnz%n", &layer, &end) == 1 &&
        end == static_cast<int>(name.size())) {
      layers.insert(layer);
    }
  }
  TWELL_REQUIRE(!layers.empty(), "{} holds no activation pattern (layerN.row_nnz, layerN.col)",
                file.path().string());
  return layers;
}

CapturedLayer read_captured_layer(const SafetensorsFile& file, int64_t layer) {
  return {read_u16(file, fmt::format("layer{}.row_nnz", layer)),
          read_u16(file, fmt::format("layer{}.col", layer))};
}

}  // namespace twell
