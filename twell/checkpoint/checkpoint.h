// SPDX-License-Identifier: Apache-2.0
// A checkpoint is a folder with config.json, model.safetensors (or shards and their index),
// tokenizer.json, and the trainer's files during training. Names and layouts are Hugging Face's.
// InputError names the file and the fault.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/checkpoint/tensor_load.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/weights.h"

namespace twell {

// The files of a folder. Weights in several files have an index that names the file of each tensor.
inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
// Tensors, of which a tied model's files may hold one under either name.
inline constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
inline constexpr const char* kHeadName = "lm_head.weight";

// Reads config.json and model.safetensors or its shards (F32, BF16 or F16, or in 8
// bits, converted to f32 on all threads), checking names, shapes, dtypes, sizes, that all values
// are finite, and the content hash where the file carries one.
std::unique_ptr<Model> load_model(Context& ctx, const std::filesystem::path& folder,
                                  const LoadOptions& options = {});
ModelConfig load_config(const std::filesystem::path& folder);
// What a folder stores in 8 bits (quantization.h); none: nothing. A tied head is the embedding,
// which is a matrix of floats.
std::optional<ByteWeights> load_weight_bytes(const std::filesystem::path& folder);
// Writes config.json and model.safetensors into an existing folder (see write_folder_atomic).
void save_model(const Model& model, const std::filesystem::path& folder, DType dtype);

// The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json
// names.
class CheckpointTensors {
 public:
  explicit CheckpointTensors(const std::filesystem::path& folder);
  const TensorInfo* find(std::string_view name) const;  // null when there is none
  // Makes `name` stand for the tensor of another name, where there is one and none of this name.
  void stand_in(std::string_view name, std::string_view other);
  std::vector<const TensorInfo*> all() const;  // sorted by name
  const std::map<std::string, SafetensorsFile>& files() const { return files_; }
  void verify_hashes() const;
  const std::string& source() const { return source_; }  // the file that messages name

 private:
  std::string source_;
  std::map<std::string, SafetensorsFile> files_;
  std::map<std::string, const TensorInfo*, std::less<>> tensors_, stand_ins_;
};

// A folder whose configuration, tensor names, shapes, dtypes and hashes have been checked. The
// values are still in the mapped files; they may not be finite.
struct OpenCheckpoint {
  ModelConfig config;
  std::vector<ParamSpec> table;
  // Float tensors for every parameter of the table, in its shape; those of `bytes` in that type,
  // with their scales.
  CheckpointTensors tensors;
  std::optional<ByteWeights> bytes;

  // Gives a model with tied embeddings an output head of its own, of the embedding's values.
  void untie_head();
  bool in_bytes(const ParamSpec& spec) const;
  // Whether the model does not need the tensor.
  bool is_extra(const TensorInfo& info) const;
};

// A matrix in 8 bits, in the shape of its file. Its values point into the file; the scales are
// widened. InputError on a scale that is negative or not finite.
struct StoredBytes {
  ByteMatrix view() const { return {type, values, scales.data(), rows, cols}; }
  ByteType type = ByteType::kE4M3;
  const uint8_t* values = nullptr;
  std::vector<float> scales;
  int64_t rows = 0, cols = 0;
};
StoredBytes stored_bytes(const OpenCheckpoint& opened, const ParamSpec& spec);
// InputError on a value that is NaN. Reads all of them.
void require_no_nan(const OpenCheckpoint& opened, const StoredBytes& bytes,
                    const std::string& name);
// The same in f32, in the shape of the table; refuses NaN.
void widen_stored_bytes(Context& ctx, const OpenCheckpoint& opened, const ParamSpec& spec,
                        float* out);
OpenCheckpoint open_checkpoint(const std::filesystem::path& folder);
// The same without the hashes, for callers whose load_tensors checks them.
OpenCheckpoint open_with_hashes_unread(const std::filesystem::path& folder);

// Whether a checkpoint may hold this tensor although the model has no parameter of that name.
bool may_be_extra(const std::string& name, const ModelConfig& config);

}  // namespace twell
