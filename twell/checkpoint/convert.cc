// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/convert.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/checkpoint_tensors.h"
#include "twell/checkpoint/convert_config.h"
#include "twell/checkpoint/tensor_convert.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kPiece = size_t{8} << 20;  // bytes copied before their pages are let go

bool is_weights_or_code(const fs::path& file) {
  constexpr std::string_view kExtensions[] = {".safetensors", ".bin",  ".pt",   ".pth", ".h5",
                                              ".msgpack",     ".onnx", ".gguf", ".py"};
  return std::find(std::begin(kExtensions), std::end(kExtensions), file.extension()) !=
         std::end(kExtensions);
}

class Conversion {
 public:
  Conversion(const fs::path& in, const ConvertOptions& options)
      : in_(in), options_(options), config_(load_config(in)), tensors_(in) {
    require_tensors_of(tensors_, config_);
    tensors_.verify_hashes();
    const fs::path path = in / kConfigFile;
    config_text_ = convert_config(read_file(path), path.string(), options);
    const fs::path index = in / kIndexFile;
    if (tensors_.source() == index.string()) index_text_ = convert_index(read_file(index));
  }

  void fill(const fs::path& out) {
    write_text(out / kConfigFile, config_text_);
    if (!index_text_.empty()) write_text(out / kIndexFile, index_text_);
    for (const auto& [name, file] : tensors_.files()) {
      changes(file) ? rewrite(file, out / name) : copy(file, out / name);
    }
    copy_the_rest(out);
    if (!config_.gated && options_.layout == CheckpointLayout::kHuggingFace) {
      result_.notes.push_back(
          "the layers have no gate projections (\"mlp_gated\": false), which transformers cannot "
          "express");
    }
  }

  ConvertResult take_result() { return std::move(result_); }

 private:
  // Counters of the sparse models have no place in Hugging Face's layout.
  bool is_left_out(const TensorInfo& info) const {
    if (options_.layout != CheckpointLayout::kHuggingFace) return false;
    return may_be_extra(info.name, config_) && info.name != "lm_head.weight";
  }
  bool is_converted(const TensorInfo& info) const {
    return options_.dtype && info.dtype != dtype_name(*options_.dtype) &&
           !may_be_extra(info.name, config_);
  }
  bool changes(const SafetensorsFile& file) const {
    return std::any_of(file.tensors().begin(), file.tensors().end(), [this](const auto& entry) {
      return is_left_out(entry.second) || is_converted(entry.second);
    });
  }

  std::string convert_index(const std::string& text) const {
    nlohmann::ordered_json index = nlohmann::ordered_json::parse(text);
    const nlohmann::ordered_json before = index;
    int64_t size = 0;
    for (const TensorInfo* info : tensors_.all()) {
      if (is_left_out(*info)) {
        index["weight_map"].erase(info->name);
      } else {
        size += stored_bytes(*info);
      }
    }
    const bool changed = std::any_of(tensors_.files().begin(), tensors_.files().end(),
                                     [this](const auto& file) { return changes(file.second); });
    if (changed) index["metadata"]["total_size"] = size;
    return index == before ? text : index.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
  }
  int64_t stored_bytes(const TensorInfo& info) const {
    if (!is_converted(info)) return std::ssize(info.bytes);
    int64_t values = 1;
    for (const int64_t size : info.shape) values *= size;
    return values * static_cast<int64_t>(dtype_size(*options_.dtype));
  }

  void write_text(const fs::path& path, const std::string& text) {
    write_file_atomic(path, text);
    count(text.size());
  }

  void copy(const SafetensorsFile& file, const fs::path& path) {
    AtomicFile out(path);
    const std::span<const std::byte> bytes = file.bytes();
    for (size_t begin = 0; begin < bytes.size(); begin += kPiece) {
      if (options_.on_piece) options_.on_piece();
      const auto piece = bytes.subspan(begin, std::min(kPiece, bytes.size() - begin));
      out.write(piece);
      file.release(piece);
    }
    out.commit();
    count(bytes.size());
  }

  void rewrite(const SafetensorsFile& file, const fs::path& path) {
    std::vector<TensorToWrite> list;
    for (const TensorInfo* info : file.file_order()) {
      if (is_left_out(*info)) {
        result_.notes.push_back(fmt::format("left out: tensor {}", info->name));
        continue;
      }
      const bool converted = is_converted(*info);
      list.push_back(
          {info->name, converted ? std::string(dtype_name(*options_.dtype)) : info->dtype,
           info->shape, [this, info, converted, &file](const ByteSink& sink) {
             if (options_.on_piece) options_.on_piece();
             converted ? write_converted(*info, *options_.dtype, sink) : sink(info->bytes);
             file.release(info->bytes);
           }});
    }
    std::map<std::string, std::string> metadata = file.metadata();
    metadata.erase(std::string(kContentHashKey));  // of the old content
    write_safetensors(path, list, metadata);
    count(fs::file_size(path));
  }

  // Tokenizer, templates, settings of generation, licences: what lies beside the weights.
  void copy_the_rest(const fs::path& out) {
    for (const fs::directory_entry& entry : fs::directory_iterator(in_)) {
      const fs::path name = entry.path().filename();
      if (name == kConfigFile || name == kIndexFile || name.string().starts_with('.')) continue;
      if (tensors_.files().contains(name.string())) continue;
      if (!entry.is_regular_file() || is_weights_or_code(name)) {
        result_.notes.push_back(fmt::format("not copied: {}", name.string()));
        continue;
      }
      write_text(out / name, read_file(entry.path()));
    }
    std::sort(result_.notes.begin(), result_.notes.end());
  }

  void count(uint64_t bytes) {
    ++result_.files;
    result_.bytes += static_cast<int64_t>(bytes);
  }

  fs::path in_;
  const ConvertOptions& options_;
  ModelConfig config_;
  CheckpointTensors tensors_;
  std::string config_text_, index_text_;
  ConvertResult result_;
};

}  // namespace

CheckpointLayout parse_checkpoint_layout(std::string_view name) {
  if (name == "keep") return CheckpointLayout::kKeep;
  if (name == "hf") return CheckpointLayout::kHuggingFace;
  if (name == "sparse") return CheckpointLayout::kSparse;
  throw InputError(fmt::format("unknown layout '{}'; use keep, hf or sparse", name));
}

ConvertResult convert_checkpoint(const fs::path& in, const fs::path& out,
                                 const ConvertOptions& options) {
  std::error_code ignored;
  TWELL_REQUIRE(!fs::exists(out, ignored), "{} exists; choose a new folder", out.string());
  Conversion conversion(in, options);
  write_folder_atomic(out, [&](const fs::path& folder) { conversion.fill(folder); });
  return conversion.take_result();
}

}  // namespace twell
