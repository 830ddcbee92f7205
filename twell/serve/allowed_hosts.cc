// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/allowed_hosts.h"

#include <arpa/inet.h>

#include <algorithm>
#include <optional>

#include "twell/base/error.h"

namespace twell {
namespace {

struct Host {
  std::string name;  // in lower case; of an IPv6 address without brackets
  bool address = false;
  bool loopback = false;
};

bool is_number(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// A host as a name or as an address. Nothing when it is neither.
std::optional<Host> parse_name(std::string_view text, bool bracketed) {
  Host host{.name = std::string(text)};
  for (char& c : host.name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  if (in6_addr six; inet_pton(AF_INET6, host.name.c_str(), &six) == 1) {
    host.address = true;
    host.loopback =
        IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
    char canonical[INET6_ADDRSTRLEN] = {};
    inet_ntop(AF_INET6, &six, canonical, sizeof(canonical));
    host.name = canonical;
    return host;
  }
  if (bracketed) return std::nullopt;
  if (in_addr four; inet_pton(AF_INET, host.name.c_str(), &four) == 1) {
    host.address = true;
    host.loopback = (ntohl(four.s_addr) >> 24) == 127;
    return host;
  }
  if (host.name.ends_with('.')) host.name.pop_back();  // the name from the root on
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_';
  };
  if (host.name.empty() || !std::ranges::all_of(host.name, fits)) return std::nullopt;
  return host;
}

// A Host field: a name or address, and perhaps a port.
std::optional<Host> parse_host(std::string_view text) {
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == text.npos) return std::nullopt;
    const std::string_view rest = text.substr(end + 1);
    if (!rest.empty() && (rest.front() != ':' || !is_number(rest.substr(1)))) return std::nullopt;
    return parse_name(text.substr(1, end - 1), true);
  }
  const size_t colon = text.find(':');
  if (colon != text.npos && !is_number(text.substr(colon + 1))) return std::nullopt;
  return parse_name(text.substr(0, colon), false);
}

}  // namespace

AllowedHosts::AllowedHosts(const std::string& bound, const std::vector<std::string>& names) {
  const std::optional<Host> own = parse_name(bound, false);
  if (own) names_.insert(own->name);
  any_address_ = own && (own->name == "0.0.0.0" || own->name == "::");
  for (const std::string& name : names) {
    if (name == "*") {
      any_ = true;
      continue;
    }
    std::optional<Host> host = parse_name(name, false);
    if (!host) host = parse_host(name);
    TWELL_REQUIRE(host, "\"{}\" is not the name or address of a host", name);
    names_.insert(host->name);
  }
}

bool AllowedHosts::allow(std::string_view text) const {
  if (any_) return true;
  const std::optional<Host> host = parse_host(text);
  if (!host) return false;
  return host->loopback || host->name == "localhost" || host->name.ends_with(".localhost") ||
         (host->address && any_address_) || names_.contains(host->name);
}

}  // namespace twell
