// SPDX-License-Identifier: Apache-2.0
// Writing, in two passes over the tensors: the hash goes into the header, in front of the data.
#include <nlohmann/json.hpp>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace {

constexpr size_t kDataAlignment =
    64;  // of the first tensor, so that mapped files can be used as is

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
  nlohmann::ordered_json header = {{"__metadata__", metadata}};
  uint64_t offset = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t end = offset + survey.sizes[i];
    header[tensors[i].name] = {
        {"dtype", tensors[i].dtype}, {"shape", tensors[i].shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  const uint64_t bytes_before = sizeof(uint64_t) + text.size();
  text.append((kDataAlignment - bytes_before % kDataAlignment) % kDataAlignment, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

}  // namespace

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

}  // namespace twell
