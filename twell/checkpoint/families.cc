// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/families.h"

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr FamilySpec kFamilies[] = {
    {.family = Family::kLlama, .model_type = "llama", .architecture = "LlamaForCausalLM"},
    {.family = Family::kLlama,
     .model_type = "llama_sparse_relu",
     .architecture = "SparseLlamaForCausalLM",
     .sparse = true},
    {.family = Family::kMistral,
     .model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .context = 131072,
     .kv_heads = 8,
     .window = 4096},
    {.family = Family::kQwen2,
     .model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .qkv_bias = true,
     .context = 32768,
     .kv_heads = 32,
     .window = 4096,
     .window_switch = true},
    {.family = Family::kQwen2,
     .model_type = "qwen2_sparse_relu",
     .architecture = "SparseQwen2ForCausalLM",
     .sparse = true,
     .qkv_bias = true,
     .context = 32768,
     .kv_heads = 32,
     .window = 4096,
     .window_switch = true},
    {.family = Family::kQwen3,
     .model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .qk_norm = true,
     .context = 32768,
     .kv_heads = 32,
     .head_dim = 128,
     .window = 4096,
     .window_switch = true},
};

}  // namespace

std::span<const FamilySpec> family_specs() { return kFamilies; }

const FamilySpec& family_of_model_type(std::string_view model_type, const std::string& source) {
  std::string known;
  for (const FamilySpec& spec : kFamilies) {
    if (spec.model_type == model_type) return spec;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", spec.model_type);
  }
  throw InputError(fmt::format("{}: model_type \"{}\" is not supported; supported are {}", source,
                               model_type, known));
}

const FamilySpec& family_spec(Family family, bool sparse) {
  const FamilySpec* plain = nullptr;
  for (const FamilySpec& spec : kFamilies) {
    if (spec.family != family) continue;
    if (spec.sparse == sparse) return spec;
    plain = &spec;
  }
  TWELL_CHECK(plain != nullptr, "a family without a row in the table");
  throw InputError(fmt::format("{} models have no published sparse layout", plain->model_type));
}

}  // namespace twell
