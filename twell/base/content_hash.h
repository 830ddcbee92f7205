// SPDX-License-Identifier: Apache-2.0
// Hash of the tensors and metadata of a safetensors file, XXH3-128: fast enough to check on every
// load. It detects damage, but does not prove authorship.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace twell {

// Key of the file's metadata that holds the hash of the rest.
inline constexpr std::string_view kContentHashKey = "content_hash";

// Feed metadata in key order, then the tensors in name order, each followed by its bytes.
class ContentHash {
 public:
  ContentHash();
  ContentHash(ContentHash&&) noexcept;
  ~ContentHash();
  void add_metadata(std::string_view key, std::string_view value);
  void add_tensor(std::string_view name, std::string_view dtype, std::span<const int64_t> shape);
  void add_bytes(std::span<const std::byte> bytes);
  std::string digest() const;  // "xxh3-128:" and 32 hexadecimal digits

 private:
  void add_text(std::string_view text) { add_bytes(std::as_bytes(std::span(text))); }

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace twell
