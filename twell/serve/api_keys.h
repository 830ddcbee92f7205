// SPDX-License-Identifier: Apache-2.0
// The keys that clients must present as "Authorization: Bearer KEY" or "X-Api-Key: KEY".
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
  // The number of the key that an Authorization header presents, or where there is none an
  // X-Api-Key header; "Bearer" may be in any case. The time does not depend on how much of a key is
  // right.
  std::optional<size_t> find(std::string_view authorization, std::string_view api_key) const;
  // Whether the headers open the server: all do where there are no keys.
  bool allow(std::string_view authorization, std::string_view api_key) const {
    return keys_.empty() || find(authorization, api_key).has_value();
  }

 private:
  std::vector<std::string> keys_;
};

}  // namespace twell
