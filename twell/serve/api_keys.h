// SPDX-License-Identifier: Apache-2.0
// The keys that clients must present as "Authorization: Bearer KEY".
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
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

  bool empty() const { return keys_.empty(); }
  // The number of the key that an Authorization header presents; "Bearer" may be in any case. The
  // time does not depend on how much of a key is right.
  std::optional<size_t> find(std::string_view authorization) const;
  // Whether the header opens the server: every one does where there are no keys.
  bool allow(std::string_view authorization) const {
    return keys_.empty() || find(authorization).has_value();
  }

 private:
  std::vector<std::string> keys_;
};

}  // namespace twell
