// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint folder in another layout, Hugging Face's or that of the published sparse
// models, or with weights of another dtype. Everything that does not change is copied byte for
// byte, so that converting there and back gives the same files. The files are mapped and copied a
// piece at a time, so that memory does not grow with the model.
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
  std::optional<DType> dtype;     // of the weights; none: unchanged
  bool allow_non_finite = false;  // copy weights that are infinite or NaN
  // Called before every piece that is written; what it throws ends the conversion, and nothing of
  // `out` is left behind.
  std::function<void()> on_piece = {};
};

struct ConvertResult {
  int64_t files = 0;
  int64_t bytes = 0;               // written
  std::vector<std::string> notes;  // one line each, on what was left out or is not portable
};

// Writes the folder `out`, which must not exist; it appears whole or not at all. InputError on any
// fault of the checkpoint (load_model), or when the layout cannot express the model.
ConvertResult convert_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                 const ConvertOptions& options);

}  // namespace twell
