// SPDX-License-Identifier: Apache-2.0
// The keys that clients must present as "Authorization: Bearer KEY".
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

class ApiKeys {
 public:
  ApiKeys() = default;  // no keys: everyone is allowed
  explicit ApiKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}
  // A key per line; empty lines and lines that begin with # are skipped. InputError when the file
  // cannot be read, has no key, or has one with other characters than printable ASCII.
  static ApiKeys load(const std::filesystem::path& file);

  // authorization: the header's value. The time does not depend on how much of a key is right.
  bool allow(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

}  // namespace twell
