// SPDX-License-Identifier: Apache-2.0
// For tests: a folder that is removed afterwards.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "twell/base/error.h"

namespace twell {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "twell_test.XXXXXX").string();
    TWELL_CHECK(::mkdtemp(name.data()) != nullptr, "cannot make a folder like {}", name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view text) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary).write(text.data(), static_cast<long>(text.size()));
    return file;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace twell
