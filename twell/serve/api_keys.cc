// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/api_keys.h"

#include <algorithm>
#include <sstream>

#include "twell/base/error.h"
#include "twell/base/file.h"

namespace twell {
namespace {

// Whether the texts are equal. Every byte of `given` is compared with a byte of `key`, so the time
// depends on the lengths alone.
bool equal_in_constant_time(std::string_view given, std::string_view key) {
  size_t difference = given.size() ^ key.size();
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<size_t>(static_cast<unsigned char>(given[i]) ^
                                      static_cast<unsigned char>(key[i % key.size()]));
  }
  const volatile size_t result = difference;
  return result == 0;
}

}  // namespace

ApiKeys ApiKeys::load(const std::filesystem::path& file) {
  std::vector<std::string> keys;
  std::istringstream text(read_file(file));
  int64_t number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with('#')) continue;
    TWELL_REQUIRE(std::all_of(line.begin(), line.end(), [](char c) { return c > ' ' && c < 0x7f; }),
                  "{} line {}: a key must be printable ASCII without spaces", file.string(),
                  number);
    keys.push_back(line);
  }
  TWELL_REQUIRE(!keys.empty(), "{}: no key in it; write a key per line", file.string());
  return ApiKeys(std::move(keys));
}

std::optional<size_t> ApiKeys::find(std::string_view authorization,
                                    std::string_view api_key) const {
  constexpr std::string_view kScheme = "bearer ";
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  const bool bearer = authorization.size() >= kScheme.size() &&
                      std::equal(kScheme.begin(), kScheme.end(), authorization.begin(),
                                 [&](char expected, char c) { return lower(c) == expected; });
  if (!authorization.empty() && !bearer) return std::nullopt;
  const std::string_view given = bearer ? authorization.substr(kScheme.size()) : api_key;
  std::optional<size_t> found;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (equal_in_constant_time(given, keys_[i])) found = i;
  }
  return found;
}

}  // namespace twell
