// SPDX-License-Identifier: Apache-2.0
// Converts a checkpoint folder to another layout (Hugging Face's or that of the published sparse
// models), or its weights to another dtype or to 8 bits. Everything else is copied byte for byte,
// so that converting there and back restores the files. Files are mapped and copied in pieces, so
// that memory use does not grow with the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/checkpoint/config_json.h"

namespace twell {

CheckpointLayout parse_checkpoint_layout(std::string_view name);  // "keep", "hf", "sparse"

struct ConvertOptions {
  CheckpointLayout layout = CheckpointLayout::kKeep;
  std::optional<DType> dtype;  // of the weights; none: unchanged
  // Projections of layers in 8 bits, with a scale per output (quantization.h), made of their values
  // in bf16; none: unchanged.
  std::optional<ByteType> weights = {};
  // The output head in 8 bits too, in the type of the projections. A tied model gets a head of its
  // own; its embedding stays as it is.
  bool head_in_bytes = false;
  bool allow_non_finite = false;  // copy weights that are infinite or NaN
  // Called before every piece is written. An exception from it ends the conversion and leaves
  // nothing of `out`.
  std::function<void()> on_piece = {};
};

struct ConvertResult {
  int64_t files = 0;
  int64_t bytes = 0;               // written
  std::vector<std::string> notes;  // one line for each omitted or non-portable item
};

// Writes the folder `out`, which must not exist; it is created complete or not at all. InputError
// on any fault of the checkpoint (load_model), or when the layout cannot represent the model.
ConvertResult convert_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                 const ConvertOptions& options);

}  // namespace twell
