// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/allowed_origins.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr std::string_view kMaxAge = "600";  // seconds that a browser keeps a preflight's reply

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

// scheme://host or scheme://host:port, in lower case as browsers write it.
bool is_origin(std::string_view text) {
  const size_t colon = text.find("://");
  if (colon == text.npos || colon == 0) return false;
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  const auto of_scheme = [&](char c) { return letter(c) || c == '+' || c == '-' || c == '.'; };
  const auto of_host = [&](char c) {
    return letter(c) || c == '-' || c == '.' || c == '_' || c == ':' || c == '[' || c == ']';
  };
  const std::string_view host = text.substr(colon + 3);
  return std::ranges::all_of(text.substr(0, colon), of_scheme) && !host.empty() &&
         std::ranges::all_of(host, of_host);
}

// A page of this machine, whatever its port: http(s)://localhost, 127.0.0.1 or [::1]. A name that
// only begins so, such as localhost.example, is another site's.
bool is_local(std::string_view origin) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!origin.starts_with(scheme)) continue;
    for (const std::string_view host : {"localhost", "127.0.0.1", "[::1]"}) {
      std::string_view port = origin.substr(scheme.size());
      if (!port.starts_with(host)) continue;
      port.remove_prefix(host.size());
      if (port.empty()) return true;
      const auto digit = [](char c) { return c >= '0' && c <= '9'; };
      return port.size() > 1 && port[0] == ':' && std::ranges::all_of(port.substr(1), digit);
    }
  }
  return false;
}

// Names of fields, separated by commas.
bool are_field_names(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == ',' || c == ' ';
  });
}

}  // namespace

AllowedOrigins::AllowedOrigins(const std::vector<std::string>& origins) {
  for (const std::string& given : origins) {
    if (given == "*") {
      any_ = true;
      continue;
    }
    if (given == "localhost") {
      local_ = true;
      continue;
    }
    std::string origin = given;
    std::ranges::transform(origin, origin.begin(), lower);
    TWELL_REQUIRE(
        is_origin(origin),
        "\"{}\" is not the origin of a page: write https://HOST, http://HOST:PORT (without "
        "a path), localhost for every port of this machine, or * for any",
        given);
    origins_.insert(std::move(origin));
  }
}

bool AllowedOrigins::allow(std::string_view origin) const { return any_ || names(origin); }

bool AllowedOrigins::names(std::string_view origin) const {
  return (local_ && is_local(origin)) || origins_.contains(origin);
}

AllowedOrigins::Headers AllowedOrigins::headers(const CrossOrigin& request) const {
  Headers out;
  if (empty()) return out;
  out.emplace_back("Vary", "Origin");
  if (request.origin.empty() || !allow(request.origin)) return out;
  out.emplace_back("Access-Control-Allow-Origin", request.origin);
  // "*" means pages of sites that nobody thought of, which must not act with a user's cookies.
  if (names(request.origin)) out.emplace_back("Access-Control-Allow-Credentials", "true");
  if (!request.is_preflight()) return out;
  out.emplace_back("Access-Control-Allow-Methods", "GET, POST");
  // "*" would leave out Authorization.
  out.emplace_back("Access-Control-Allow-Headers", are_field_names(request.wanted_headers)
                                                       ? request.wanted_headers
                                                       : std::string("*"));
  out.emplace_back("Access-Control-Max-Age", kMaxAge);
  if (request.private_network == "true") {
    out.emplace_back("Access-Control-Allow-Private-Network", "true");
  }
  return out;
}

}  // namespace twell
