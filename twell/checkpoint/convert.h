// SPDX-License-Identifier: Apache-2.0
// A checkpoint folder into another: as Hugging Face writes it, or as the sparse models were
// published. What does not change is copied byte for byte, so that there and back is the identity.
// Works through the mapped files a piece at a time: memory does not grow with the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/dtype.h"

namespace twell {

enum class CheckpointLayout {
  kKeep,
  // The family's own class in transformers; without code, keys and tensors of the sparse models.
  kHuggingFace,
  // llama_sparse_relu or qwen2_sparse_relu, with their sparsity_* keys.
  kSparse,
};
CheckpointLayout parse_checkpoint_layout(std::string_view name);  // "keep", "hf", "sparse"

struct ConvertOptions {
  CheckpointLayout layout = CheckpointLayout::kKeep;
  std::optional<DType> dtype;  // of the weights; none: as they are
  // Called before every piece that is written; what it throws ends the conversion, and nothing of
  // `out` is left behind.
  std::function<void()> on_piece = {};
};

struct ConvertResult {
  int64_t files = 0;
  int64_t bytes = 0;               // written
  std::vector<std::string> notes;  // one line each: what was left out, what transformers cannot do
};

// Writes the folder `out`, which must not exist; it appears whole. config.json and every tensor are
// checked first. InputError on any fault, or when the layout cannot express the model.
ConvertResult convert_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                 const ConvertOptions& options);

}  // namespace twell
