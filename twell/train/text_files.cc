// SPDX-License-Identifier: Apache-2.0
#include "twell/train/text_files.h"

#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "twell/base/file.h"

namespace twell {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

constexpr const char* kTokenizerConfig = "tokenizer_config.json";

int32_t pad_token(const Tokenizer& tokenizer) {
  for (const char* name : {"<|pad|>", "<pad>", "[PAD]", "<|padding|>"}) {
    const int32_t token = tokenizer.find(name);
    if (token >= 0 && tokenizer.is_special(token)) return token;
  }
  return tokenizer.eos_token();
}

std::string tokenizer_config(const ModelConfig& config, const Tokenizer& tokenizer) {
  ordered_json json = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  const auto name = [&](const char* key, int32_t token) {
    if (token >= 0) json[key] = tokenizer.token_bytes(token);
  };
  name("bos_token", tokenizer.bos_token());
  name("eos_token", tokenizer.eos_token());
  name("pad_token", pad_token(tokenizer));
  json["model_max_length"] = config.context;
  json["clean_up_tokenization_spaces"] = false;  // decoding gives back the text
  return json.dump(2) + "\n";
}

std::string generation_config(const ModelConfig& config, const Tokenizer& tokenizer) {
  ordered_json json = ordered_json::object();
  if (tokenizer.bos_token() >= 0) json["bos_token_id"] = tokenizer.bos_token();
  // Several tokens may end a text, as the model's configuration says.
  ordered_json ends = ordered_json::array();
  const int64_t first = config.eos_token >= 0 ? config.eos_token : tokenizer.eos_token();
  if (first >= 0) ends.push_back(first);
  for (const int64_t token : config.more_eos_tokens) ends.push_back(token);
  if (!ends.empty()) json["eos_token_id"] = ends.size() == 1 ? ends.front() : ends;
  if (const int32_t pad = pad_token(tokenizer); pad >= 0) json["pad_token_id"] = pad;
  json["max_length"] = config.context;
  return json.dump(2) + "\n";
}

}  // namespace

TextFiles text_files_of(const fs::path& checkpoint) {
  TextFiles files;
  const auto take = [&](const fs::path& path) {
    if (fs::is_regular_file(checkpoint / path)) files[path.string()] = read_file(checkpoint / path);
  };
  for (const char* name : {kTokenizerConfig, "special_tokens_map.json", kGenerationConfig,
                           "chat_template.jinja", "chat_template.json"}) {
    take(name);
  }
  const fs::path more = "additional_chat_templates";
  std::error_code none;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoint / more, none)) {
    if (entry.path().extension() == ".jinja") take(more / entry.path().filename());
  }
  return files;
}

void complete_text_files(TextFiles& files, const ModelConfig& config, const Tokenizer& tokenizer) {
  if (!files.contains(kTokenizerConfig)) {
    files[kTokenizerConfig] = tokenizer_config(config, tokenizer);
  }
  if (!files.contains(kGenerationConfig)) {
    files[kGenerationConfig] = generation_config(config, tokenizer);
  }
}

void save_text_files(const fs::path& folder, const ModelConfig& config, const Tokenizer& tokenizer,
                     TextFiles kept) {
  tokenizer.save(folder / "tokenizer.json");
  complete_text_files(kept, config, tokenizer);
  for (const auto& [path, text] : kept) {
    make_folder((folder / path).parent_path());
    write_file_atomic(folder / path, text);
  }
}

}  // namespace twell
