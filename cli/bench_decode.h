// SPDX-License-Identifier: Apache-2.0
// `twell bench decode`: what all devices share.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/decode_benchmark.h"
#include "twell/format/byte_matrix.h"

namespace twell::cli {

// The model to run: a checkpoint, or a preset with synthetic weights.
struct BenchSubject {
  std::filesystem::path checkpoint;  // empty: use the preset
  std::string preset;
  int64_t kv_heads = 0;  // of the preset; 0: as many as it has
  int64_t context = 0;   // longest sequence, if longer than the preset's
  uint64_t seed = 0;
  bool allow_non_finite = false;    // accept NaN and infinity in the checkpoint
  std::optional<ByteType> weights;  // LoadOptions::weights, also of a preset
  bool head_in_bytes = false;       // LoadOptions::head_in_bytes
};
// The configuration of its preset.
ModelConfig preset_of(const BenchSubject& subject);
std::string describe(const BenchSubject& subject);

struct BenchDecode {
  BenchSubject subject;
  std::vector<int64_t> batches = {1, 8, 64};
  DecodeLoad load;               // of each batch
  std::vector<int32_t> prompts;  // [largest batch, P]; empty: random ids are drawn
  std::filesystem::path jsonl;
  bool masks = false;        // compares steps with masks of a grammar with those without
  double mask_micros = 0.0;  // masks of a stand-in that take so long; 0: of a grammar
};

// A model on the device that decodes.
struct DecodeDevice {
  std::string name;
  const ModelConfig& config;
  DecodeMemory memory;
  double bytes_per_second = 0.0;
  std::string bandwidth_source;                 // completes "as ..."
  std::function<void(bool sparse)> set_sparse;  // empty: the activity is the model's own
  std::function<std::unique_ptr<Session>(const SessionOptions&)> session;
  std::function<nlohmann::json()> first_fields;  // of a result row
};

// Prints a row per batch, and appends them to arguments.jsonl.
void compare_decoding(const BenchDecode& arguments, const DecodeDevice& device);

}  // namespace twell::cli
