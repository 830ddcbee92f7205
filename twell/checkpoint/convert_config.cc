// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/convert_config.h"

#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/families.h"

namespace twell {
namespace {

using nlohmann::ordered_json;

void set_family(ordered_json& object, const FamilySpec& family) {
  object["model_type"] = family.model_type;
  if (object.contains("architectures")) object["architectures"] = {family.architecture};
}

// The keys that the published sparse models have beyond those of their family.
void to_sparse(ordered_json& object, const ModelConfig& config, const std::string& source) {
  TWELL_REQUIRE(config.activation == Activation::kRelu,
                "{}: the sparse layout is for models with relu, this one has {}; sparsify it first "
                "('twell train --from DIR --relufy')",
                source, activation_name(config.activation));
  set_family(object, family_spec(config.family, /*sparse=*/true));
  object.erase("mlp_gated");
  object["sparsity_gated_mlp"] = config.gated;
}

void to_hugging_face(ordered_json& object, const ModelConfig& config) {
  set_family(object, family_spec(config.family));
  object["hidden_act"] = activation_name(config.activation);
  object["intermediate_size"] = config.ffn;
  object.erase("auto_map");
  for (auto it = object.begin(); it != object.end();) {
    it = it.key().starts_with("sparsity_") ? object.erase(it) : std::next(it);
  }
  if (!config.gated) object["mlp_gated"] = false;
}

void set_dtype(ordered_json& object, DType dtype) {
  // The old name and the new one.
  const char* key = object.contains("dtype") ? "dtype" : "torch_dtype";
  object[key] = torch_dtype_name(dtype);
}

}  // namespace

const char* torch_dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    default:
      return "float32";
  }
}

std::string convert_config(const std::string& text, const std::string& source,
                           const ConvertOptions& options) {
  const ModelConfig config = parse_config_text(text, source);
  const ordered_json before = ordered_json::parse(text);
  ordered_json object = before;
  const bool sparse = family_of_model_type(object["model_type"].get<std::string>(), source).sparse;
  if (options.layout == CheckpointLayout::kSparse && !sparse) to_sparse(object, config, source);
  if (options.layout == CheckpointLayout::kHuggingFace && sparse) to_hugging_face(object, config);
  if (options.dtype) set_dtype(object, *options.dtype);
  // As Python's json.dumps(indent=2) writes it, which is how transformers does.
  return object == before ? text : object.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace twell
