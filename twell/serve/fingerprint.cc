// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/fingerprint.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <system_error>
#include <vector>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/file.h"

namespace twell {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPages = 256, kPageBytes = 4096;

void add_text(ContentHash& hash, const std::string& text) {
  hash.add_bytes(std::as_bytes(std::span(text)));
}

void add_pages(ContentHash& hash, const fs::path& path, uint64_t size) {
  std::ifstream file(path, std::ios::binary);
  std::string page;
  const uint64_t last = size < kPageBytes ? 0 : size - kPageBytes;
  for (uint64_t i = 0; i < kPages; ++i) {
    page.resize(std::min(size, kPageBytes));
    file.seekg(static_cast<std::streamoff>(last / (kPages - 1) * i +
                                           last % (kPages - 1) * i / (kPages - 1)));
    file.read(page.data(), static_cast<std::streamsize>(page.size()));
    TWELL_REQUIRE(file, "{}: cannot be read", path.string());
    add_text(hash, page);
    if (last == 0) return;
  }
}

}  // namespace

std::string system_fingerprint(const fs::path& checkpoint, std::span<const std::string> settings) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoint, error)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  TWELL_REQUIRE(!error, "{}: cannot be read ({})", checkpoint.string(), error.message());
  std::ranges::sort(files);
  ContentHash hash;
  for (size_t i = 0; i < settings.size(); ++i) {
    hash.add_metadata(fmt::format("setting {}", i), settings[i]);
  }
  for (const fs::path& path : files) {
    const std::string extension = path.extension().string();
    if (extension == ".json" || extension == ".jinja") {
      hash.add_metadata(path.filename().string(), read_file(path));
    } else if (extension == ".safetensors") {
      const uint64_t size = fs::file_size(path);
      hash.add_metadata(path.filename().string(), std::to_string(size));
      add_pages(hash, path, size);
    }
  }
  return "fp_" + hash.digest().substr(std::string("xxh3-128:").size(), 12);
}

}  // namespace twell
