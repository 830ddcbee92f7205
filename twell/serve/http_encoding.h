// SPDX-License-Identifier: Apache-2.0
// Content encodings of HTTP bodies: gzip and deflate (RFC 1952, RFC 1950).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "twell/serve/memory_budget.h"

namespace twell {

enum class Decoded { kGood, kUnknownEncoding, kTooLong, kBroken, kNoMemory };

// Replaces a body by what it was before it was encoded: the value of Content-Encoding, or nothing.
// The share grows by what the body does. The body is unchanged unless the result is kGood.
Decoded decode_body(std::string_view encoding, int64_t most_bytes, MemoryBudget::Share& share,
                    std::string& body);

// Whether a client that sends this Accept-Encoding takes gzip.
bool accepts_gzip(std::string_view accept_encoding);

// At zlib's fastest level: the higher ones take several times as long for a few percent.
std::string gzip(std::string_view text);

// The value of a field up to a semicolon, without blanks around it, in lower case:
// "Application/JSON; charset=utf-8" gives "application/json".
std::string first_value(std::string_view field);

}  // namespace twell
