// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/convert.h"

#include <algorithm>
#include <map>
#include <set>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/quantization.h"
#include "twell/checkpoint/tensor_convert.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr size_t kCopyBytes = size_t{8} << 20;  // bytes copied between releases of their pages

bool is_weights_or_code(const fs::path& file) {
  constexpr std::string_view kExtensions[] = {".safetensors", ".bin",  ".pt",   ".pth", ".h5",
                                              ".msgpack",     ".onnx", ".gguf", ".py"};
  return std::find(std::begin(kExtensions), std::end(kExtensions), file.extension()) !=
         std::end(kExtensions);
}

class Conversion {
 public:
  Conversion(const fs::path& in, const ConvertOptions& options)
      : in_(in), options_(options), opened_(open_checkpoint(in)) {
    const fs::path path = in / kConfigFile;
    TWELL_REQUIRE(!options.weights || !opened_.bytes || *options.weights == opened_.bytes->type,
                  "{}: the weights are in 8 bits already ({}); convert the original to {}",
                  in.string(), byte_option_name(opened_.bytes->type),
                  byte_option_name(*options.weights));
    TWELL_REQUIRE(!options.head_in_bytes || options.weights || opened_.bytes,
                  "{}: an output head in 8 bits needs projections in 8 bits: add --weights int8 or "
                  "fp8",
                  in.string());
    if (opened_.bytes) bytes_ = *opened_.bytes;
    if (options.weights) bytes_.type = *options.weights;
    bytes_.head = bytes_.head || options.head_in_bytes;
    if (options.head_in_bytes && opened_.config.tied_embeddings) {
      opened_.untie_head();
      const TensorInfo* const head = opened_.tensors.find(kHeadName);
      if (head == opened_.tensors.find(kEmbeddingName)) tied_ = head;
    }
    for (const ParamSpec& spec : opened_.table) {
      const bool becomes =
          (options.weights && is_projection(spec)) || (options.head_in_bytes && is_head(spec));
      if (becomes && !opened_.in_bytes(spec)) quantised_.insert(spec.name);
    }
    for (const ParamSpec& spec : opened_.table) {
      if (opened_.in_bytes(spec)) in_bytes_.insert(spec.name);
    }
    config_text_ = convert_config(read_file(path), path.string(), options.layout, options.dtype,
                                  quantised_.empty() ? std::nullopt : std::optional(bytes_));
    const fs::path index = in / kIndexFile;
    if (opened_.tensors.source() == index.string()) index_text_ = convert_index(read_file(index));
  }

  void fill(const fs::path& out) {
    write_text(out / kConfigFile, config_text_);
    if (!index_text_.empty()) write_text(out / kIndexFile, index_text_);
    for (const auto& [name, file] : opened_.tensors.files()) {
      if (!options_.allow_non_finite) require_finite(file);
      changes(file) ? rewrite(file, out / name) : copy(file, out / name);
    }
    copy_the_rest(out);
    if (!opened_.config.gated && options_.layout == CheckpointLayout::kHuggingFace) {
      result_.notes.push_back(
          "the layers have no gate projections (\"mlp_gated\": false), which transformers cannot "
          "express");
    }
    if (bytes_.head && bytes_.type == ByteType::kInt8) {
      result_.notes.push_back(
          "an output head in int8 runs on the CPU alone; GPUs here refuse this checkpoint");
    }
  }

  ConvertResult take_result() { return std::move(result_); }

 private:
  // Hugging Face's layout has no tensors for the counters of the sparse models.
  bool is_left_out(const TensorInfo& info) const {
    if (options_.layout != CheckpointLayout::kHuggingFace) return false;
    return may_be_extra(info.name, opened_.config) && info.name != kHeadName;
  }
  bool is_converted(const TensorInfo& info) const {
    return options_.dtype && info.dtype != dtype_name(*options_.dtype) && !opened_.is_extra(info) &&
           !is_quantised(info) && !of_bytes(info);
  }
  // Whether it is written in 8 bits.
  bool is_quantised(const TensorInfo& info) const {
    return quantised_.contains(info.name) && &info != tied_;
  }
  // Is in 8 bits, or a scale of such a tensor.
  bool of_bytes(const TensorInfo& info) const {
    const std::string scale = "_scale";
    return in_bytes_.contains(info.name) ||
           (info.name.ends_with(scale) &&
            in_bytes_.contains(info.name.substr(0, info.name.size() - scale.size())));
  }
  bool changes(const SafetensorsFile& file) const {
    return std::any_of(file.tensors().begin(), file.tensors().end(), [this](const auto& entry) {
      return is_left_out(entry.second) || is_converted(entry.second) ||
             is_quantised(entry.second) || &entry.second == tied_;
    });
  }

  void require_finite(const SafetensorsFile& file) const {
    for (const TensorInfo* info : file.file_order()) {
      if (opened_.is_extra(*info) || in_bytes_.contains(info->name)) continue;
      const int64_t index = first_non_finite(info->bytes, info->dtype);
      if (index >= 0) refuse_non_finite(*info, index, file.path().string());
      file.release(info->bytes);
    }
  }

  std::string convert_index(const std::string& text) const {
    std::vector<std::string> left_out;
    int64_t size = 0;
    for (const TensorInfo* info : opened_.tensors.all()) {
      is_left_out(*info) ? left_out.push_back(info->name) : void(size += stored_bytes(*info));
    }
    const bool changed = std::any_of(opened_.tensors.files().begin(), opened_.tensors.files().end(),
                                     [this](const auto& file) { return changes(file.second); });
    std::map<std::string, std::string> added;
    for (const auto& [name, file] : opened_.tensors.files()) {
      for (const auto& [tensor, info] : file.tensors()) {
        if (is_quantised(info)) added.emplace(scale_name(tensor), name);
        if (&info != tied_) continue;
        size += quantised_bytes(info);
        added.emplace(scale_name(kHeadName), name);
        added.emplace(tensor == kHeadName ? kEmbeddingName : kHeadName, name);
      }
    }
    return rewrite_shard_index(text, left_out, changed ? std::optional(size) : std::nullopt, added);
  }
  static int64_t quantised_bytes(const TensorInfo& info) {
    return info.shape[0] * (info.shape[1] + int64_t{sizeof(float)});
  }
  int64_t stored_bytes(const TensorInfo& info) const {
    int64_t values = 1;
    for (const int64_t size : info.shape) values *= size;
    if (is_quantised(info)) return quantised_bytes(info);
    if (!is_converted(info)) return std::ssize(info.bytes);
    return values * static_cast<int64_t>(dtype_size(*options_.dtype));
  }

  void write_text(const fs::path& path, const std::string& text) {
    write_file_atomic(path, text);
    count(text.size());
  }

  void copy(const SafetensorsFile& file, const fs::path& path) {
    AtomicFile out(path);
    const std::span<const std::byte> bytes = file.bytes();
    for (size_t begin = 0; begin < bytes.size(); begin += kCopyBytes) {
      if (options_.on_piece) options_.on_piece();
      const auto piece = bytes.subspan(begin, std::min(kCopyBytes, bytes.size() - begin));
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
      if (is_quantised(*info)) {
        add_quantised(*info, info->name, file, list);
        continue;
      }
      const bool converted = is_converted(*info);
      list.push_back({info == tied_ ? kEmbeddingName : info->name,
                      converted ? std::string(dtype_name(*options_.dtype)) : info->dtype,
                      info->shape, [this, info, converted, &file](const ByteSink& sink) {
                        if (options_.on_piece) options_.on_piece();
                        converted ? write_converted(*info, *options_.dtype, sink)
                                  : sink(info->bytes);
                        file.release(info->bytes);
                      }});
      if (info == tied_) add_quantised(*info, kHeadName, file, list);
    }
    std::map<std::string, std::string> metadata = file.metadata();
    metadata.erase(std::string(kContentHashKey));  // it belongs to the old content
    write_safetensors(path, list, metadata);
    count(fs::file_size(path));
  }

  void add_quantised(const TensorInfo& info, const std::string& name, const SafetensorsFile& file,
                     std::vector<TensorToWrite>& list) const {
    const ByteType type = bytes_.type;
    list.push_back({name, std::string(byte_type_name(type)), info.shape,
                    [this, &info, &file, type](const ByteSink& sink) {
                      if (options_.on_piece) options_.on_piece();
                      write_bytes(info, type, sink);
                      file.release(info.bytes);
                    }});
    list.push_back({scale_name(name),
                    "F32",
                    {info.shape[0], 1},
                    [this, &info, &file, type](const ByteSink& sink) {
                      if (options_.on_piece) options_.on_piece();
                      write_byte_scales(info, type, sink);
                      file.release(info.bytes);
                    }});
  }

  // Copies the files next to the weights: tokenizer, templates, generation settings, licences.
  void copy_the_rest(const fs::path& out) {
    for (const fs::directory_entry& entry : fs::directory_iterator(in_)) {
      const fs::path name = entry.path().filename();
      if (name == kConfigFile || name == kIndexFile || name.string().starts_with('.')) continue;
      if (opened_.tensors.files().contains(name.string())) continue;
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
  OpenCheckpoint opened_;
  std::set<std::string, std::less<>> quantised_, in_bytes_;  // names of tensors to be, and that are
  ByteWeights bytes_;                                        // what is in 8 bits afterwards
  const TensorInfo* tied_ = nullptr;  // an embedding whose model gets a head in 8 bits of its own
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
