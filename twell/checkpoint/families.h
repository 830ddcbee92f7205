// SPDX-License-Identifier: Apache-2.0
// The model families that checkpoints come in: one table of what config.json calls them, what their
// layers have, and what transformers takes for keys that are absent. All of them use Llama's tensor
// names (parameter_table). Internal to model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "twell/model/config.h"

namespace twell {

struct FamilySpec {
  Family family = Family::kLlama;
  std::string_view model_type;    // of config.json
  std::string_view architecture;  // of config.json
  // The published sparse models: ReLU whatever hidden_act says, sparsity_* keys, tensors of their
  // trackers.
  bool sparse = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  int64_t context = 2048;      // max_position_embeddings
  int64_t kv_heads = 0;        // num_key_value_heads; 0: as many as heads
  int64_t head_dim = 0;        // 0: hidden_size / num_attention_heads
  int64_t window = 0;          // sliding_window when the key is absent; 0: none
  bool window_switch = false;  // a window counts only with use_sliding_window
};

std::span<const FamilySpec> family_specs();
// InputError, naming the source and what is supported.
const FamilySpec& family_of_model_type(std::string_view model_type, const std::string& source);
// InputError for a sparse layout that was never published.
const FamilySpec& family_spec(Family family, bool sparse = false);

}  // namespace twell
