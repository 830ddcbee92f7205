// SPDX-License-Identifier: Apache-2.0
// Format: https://github.com/huggingface/safetensors#format
#include "twell/checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"

namespace twell {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "file contents are mapped as they are");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr int kHeaderDepth = 3;                    // {"tensor": {"shape": [...]}}
constexpr int kIndexDepth = 8;                     // {"weight_map": {...}} and foreign metadata
constexpr size_t kHashPiece = size_t{8} << 20;     // bytes hashed between releases of their pages

// Bytes of a value.
const std::map<std::string_view, uint64_t>& dtype_sizes() {
  static const std::map<std::string_view, uint64_t> kSizes = {
      {"BOOL", 1}, {"U8", 1},      {"I8", 1},  {"F8_E5M2", 1}, {"U16", 2}, {"F8_E4M3", 1},
      {"I16", 2},  {"F8_E8M0", 1}, {"F16", 2}, {"BF16", 2},    {"I32", 4}, {"U32", 4},
      {"F32", 4},  {"I64", 8},     {"U64", 8}, {"F64", 8}};
  return kSizes;
}

// Reads a header entry, checked by itself and against the size of the data section.
TensorInfo read_entry(const std::string& source, const std::string& name, const json& entry,
                      std::span<const std::byte> data) {
  const auto require = [&](bool condition, const std::string& fault) {
    TWELL_REQUIRE(condition, "{}: tensor {}: {}", source, name, fault);
  };
  require(entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
              entry.contains("shape") && entry.contains("data_offsets"),
          "must have dtype, shape and data_offsets, and nothing else");
  TensorInfo info{.name = name, .dtype = {}, .shape = {}, .bytes = {}};

  require(entry["dtype"].is_string(), "dtype must be a string");
  info.dtype = entry["dtype"].get<std::string>();
  const auto value_size = dtype_sizes().find(info.dtype);
  require(value_size != dtype_sizes().end(),
          fmt::format("dtype \"{}\" is not supported", info.dtype));

  require(entry["shape"].is_array(), "shape must be an array");
  uint64_t size = value_size->second;
  for (const json& item : entry["shape"]) {
    require(item.is_number_unsigned() && item.get<uint64_t>() <= uint64_t{INT64_MAX},
            "shape must hold sizes, 0 or more");
    require(!__builtin_mul_overflow(size, item.get<uint64_t>(), &size), "shape is too large");
    info.shape.push_back(item.get<int64_t>());
  }

  const json& offsets = entry["data_offsets"];
  require(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
              offsets[1].is_number_unsigned() && offsets[0] <= offsets[1],
          "data_offsets must be [begin, end]");
  const auto begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  require(end <= data.size(),
          fmt::format("ends at byte {} of the data, but the file holds {}: it is truncated", end,
                      data.size()));
  require(end - begin == size,
          fmt::format("{} [{}] takes {} bytes, but data_offsets give {}", info.dtype,
                      fmt::join(info.shape, ", "), size, end - begin));
  info.bytes = data.subspan(begin, size);
  return info;
}

std::map<std::string, std::string> read_metadata(const json& object, const std::string& source) {
  TWELL_REQUIRE(object.is_object(), "{}: __metadata__ must be an object", source);
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : object.items()) {
    TWELL_REQUIRE(value.is_string(), "{}: __metadata__ entry {} must be a string", source, key);
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

// The format requires that every byte of the data section belongs to exactly one tensor.
void require_contiguous(const SafetensorsContent& content, std::span<const std::byte> data,
                        const std::string& source) {
  size_t next = 0;
  for (const TensorInfo* info : content.file_order()) {
    const size_t begin = static_cast<size_t>(info->bytes.data() - data.data());
    TWELL_REQUIRE(begin >= next, "{}: tensor {} overlaps the one before it", source, info->name);
    TWELL_REQUIRE(begin == next, "{}: {} unused bytes before tensor {}", source, begin - next,
                  info->name);
    next = begin + info->bytes.size();
  }
  TWELL_REQUIRE(next == data.size(), "{}: {} unused bytes after the last tensor", source,
                data.size() - next);
}

// Writing makes two passes over the tensors, because the header, which comes first, contains their
// hash.

// Alignment of the first tensor, so that mapped files can be used directly.
constexpr size_t kDataAlignment = 64;

struct Survey {
  std::string digest;
  std::vector<uint64_t> sizes;  // bytes of each tensor
};

Survey take_survey(std::span<const TensorToWrite> tensors,
                   const std::map<std::string, std::string>& metadata) {
  Survey out;
  ContentHash hash;
  for (const auto& [key, value] : metadata) hash.add_metadata(key, value);
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TWELL_CHECK(by_name.emplace(tensors[i].name, i).second, "tensor {} given twice",
                tensors[i].name);
  }
  out.sizes.resize(tensors.size());
  for (const auto& [name, i] : by_name) {
    hash.add_tensor(name, tensors[i].dtype, tensors[i].shape);
    tensors[i].write([&, index = i](std::span<const std::byte> bytes) {
      out.sizes[index] += bytes.size();
      hash.add_bytes(bytes);
    });
  }
  out.digest = hash.digest();
  return out;
}

// The length and the JSON, padded with spaces.
std::string make_header(std::span<const TensorToWrite> tensors, const Survey& survey,
                        std::map<std::string, std::string> metadata) {
  metadata.emplace(kContentHashKey, survey.digest);
  // Entries are written one by one: inserting into an ordered_json object searches all earlier
  // ones.
  std::string text = "{\"__metadata__\":" + nlohmann::ordered_json(metadata).dump();
  uint64_t offset = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t end = offset + survey.sizes[i];
    const nlohmann::ordered_json entry = {
        {"dtype", tensors[i].dtype}, {"shape", tensors[i].shape}, {"data_offsets", {offset, end}}};
    text += "," + json(tensors[i].name).dump() + ":" + entry.dump();
    offset = end;
  }
  text += "}";
  const uint64_t bytes_before = sizeof(uint64_t) + text.size();
  text.append((kDataAlignment - bytes_before % kDataAlignment) % kDataAlignment, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

// A plain file name without separators cannot refer to a file outside the checkpoint's folder.
bool is_plain_file_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string::npos &&
         name.find('\\') == std::string::npos && name.find('\0') == std::string::npos &&
         !name.starts_with('.');
}

}  // namespace

std::vector<const TensorInfo*> SafetensorsContent::file_order() const {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, info] : tensors) order.push_back(&info);
  // An empty tensor comes before the one at the same offset.
  std::ranges::stable_sort(order, {}, [](const TensorInfo* info) {
    return std::pair(info->bytes.data(), info->bytes.size());
  });
  return order;
}

SafetensorsContent parse_safetensors(std::span<const std::byte> file, const std::string& source) {
  uint64_t header_bytes = 0;
  TWELL_REQUIRE(!is_lfs_pointer({reinterpret_cast<const char*>(file.data()), file.size()}),
                "{}: {}", source, kLfsAdvice);
  TWELL_REQUIRE(file.size() >= sizeof(header_bytes), "{}: {} bytes are too few for safetensors",
                source, file.size());
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  const std::span<const std::byte> rest = file.subspan(sizeof(header_bytes));
  TWELL_REQUIRE(header_bytes <= kMaxHeaderBytes && header_bytes <= rest.size(),
                "{}: not a safetensors file, or truncated: header of {} bytes in a file of {}",
                source, header_bytes, file.size());
  const std::span<const std::byte> data = rest.subspan(header_bytes);
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), header_bytes);
  TWELL_REQUIRE(text.starts_with('{'), "{}: the header does not start with '{{'", source);

  SafetensorsContent content;
  const json header = parse_json(text, source, {.depth = kHeaderDepth});
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      content.metadata = read_metadata(entry, source);
    } else {
      content.tensors.emplace(name, read_entry(source, name, entry, data));
    }
  }
  require_contiguous(content, data, source);
  return content;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), content_(parse_safetensors(file_.bytes(), path.string())) {}

const TensorInfo& SafetensorsFile::tensor(std::string_view name) const {
  const auto it = content_.tensors.find(name);
  TWELL_REQUIRE(it != content_.tensors.end(), "{}: tensor {} is missing", file_.path().string(),
                name);
  return it->second;
}

std::optional<ContentHash> SafetensorsFile::begin_hash() const {
  if (!content_.metadata.contains(std::string(kContentHashKey))) return std::nullopt;
  ContentHash hash;
  for (const auto& [key, value] : content_.metadata) {
    if (key != kContentHashKey) hash.add_metadata(key, value);
  }
  return hash;
}

void SafetensorsFile::require_hash(const ContentHash& hash) const {
  const std::string& expected = content_.metadata.at(std::string(kContentHashKey));
  TWELL_REQUIRE(hash.digest() == expected,
                "{}: the content does not match its hash ({} expected {}): the file was damaged or "
                "altered after it was written",
                file_.path().string(), hash.digest(), expected);
}

void SafetensorsFile::verify_hash() const {
  std::optional<ContentHash> hash = begin_hash();
  if (!hash) return;
  expect_full_read();
  for (const auto& [name, info] : content_.tensors) {
    hash->add_tensor(name, info.dtype, info.shape);
    for (size_t begin = 0; begin < info.bytes.size(); begin += kHashPiece) {
      const auto piece = info.bytes.subspan(begin, std::min(kHashPiece, info.bytes.size() - begin));
      hash->add_bytes(piece);
      release(piece);
    }
  }
  require_hash(*hash);
}

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  TWELL_CHECK(!metadata.contains(std::string(kContentHashKey)), "{} is set by the writer",
              kContentHashKey);
  const Survey first_pass = take_survey(tensors, metadata);
  AtomicFile file(path);
  file.write(make_header(tensors, first_pass, metadata));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t begin = file.size();
    tensors[i].write([&](std::span<const std::byte> bytes) { file.write(bytes); });
    TWELL_CHECK(file.size() - begin == first_pass.sizes[i],
                "tensor {} gave {} bytes, then {} when asked again", tensors[i].name,
                first_pass.sizes[i], file.size() - begin);
  }
  file.commit();
}

std::map<std::string, std::string> parse_shard_index(std::string_view text,
                                                     const std::string& source) {
  const nlohmann::json index = parse_json(text, source, {.depth = kIndexDepth});
  TWELL_REQUIRE(
      index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
      "{}: weight_map is missing", source);
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    TWELL_REQUIRE(file.is_string() && is_plain_file_name(file.get<std::string>()),
                  "{}: tensor {} is mapped to {}, which is not the name of a .safetensors file in "
                  "this folder",
                  source, tensor, file.dump(-1, ' ', true));
    files.emplace(tensor, file.get<std::string>());
  }
  return files;
}

std::string rewrite_shard_index(const std::string& text, std::span<const std::string> removed,
                                std::optional<int64_t> total_size,
                                const std::map<std::string, std::string>& added) {
  nlohmann::ordered_json index = parse_ordered_json(text, "the index", {.depth = kIndexDepth});
  const nlohmann::ordered_json before = index;
  if (!removed.empty()) {
    const std::set<std::string_view> names(removed.begin(), removed.end());
    erase_keys(index["weight_map"], [&](const std::string& name) { return names.contains(name); });
  }
  // Appended without a search for each: an ordered object is a list.
  if (!added.empty()) {
    auto& entries = index["weight_map"].get_ref<nlohmann::ordered_json::object_t&>();
    for (const auto& [name, file] : added) entries.emplace_back(name, file);
  }
  if (total_size) {
    if (!index["metadata"].is_object()) index["metadata"] = nlohmann::ordered_json::object();
    index["metadata"]["total_size"] = *total_size;
  }
  return index == before ? text : index.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace twell
