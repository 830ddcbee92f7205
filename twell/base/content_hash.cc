// SPDX-License-Identifier: Apache-2.0
#include "twell/base/content_hash.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include "twell/base/error.h"

namespace twell {

struct ContentHash::State {
  State() : xxh(XXH3_createState()) {
    TWELL_CHECK(xxh != nullptr && XXH3_128bits_reset(xxh) == XXH_OK, "cannot make a hash state");
  }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* xxh;
};

ContentHash::ContentHash() : state_(std::make_unique<State>()) {}
ContentHash::ContentHash(ContentHash&&) noexcept = default;
ContentHash::~ContentHash() = default;

// Length prefixes make two different lists of strings hash differently.
void ContentHash::add_metadata(std::string_view key, std::string_view value) {
  add_text(fmt::format("metadata {} {} {}{}", key.size(), value.size(), key, value));
}

void ContentHash::add_tensor(std::string_view name, std::string_view dtype,
                             std::span<const int64_t> shape) {
  add_text(fmt::format("tensor {} {}{} [{}]", name.size(), name, dtype, fmt::join(shape, ",")));
}

void ContentHash::add_bytes(std::span<const std::byte> bytes) {
  const XXH_errorcode code = XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size());
  TWELL_CHECK(code == XXH_OK, "hashing {} bytes failed", bytes.size());
}

std::string ContentHash::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh);
  return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace twell
