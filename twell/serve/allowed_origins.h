// SPDX-License-Identifier: Apache-2.0
// The web pages of other sites that may use this server (cross-origin resource sharing). A browser
// names a page's site in the Origin field, asks before it sends what a plain form could not send
// (OPTIONS, a "preflight"), and shows the page a reply only if that names the site.
// Source: the Fetch standard, section 3.2.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace twell {

// What a request says about where it comes from.
struct CrossOrigin {
  std::string origin;           // of the page; empty: no browser, or a page of this server
  std::string wanted_method;    // of a preflight: the method that is to follow,
  std::string wanted_headers;   // its fields,
  std::string private_network;  // and "true" where a page of the internet asks for this network
  bool is_preflight() const { return !origin.empty() && !wanted_method.empty(); }
};

class AllowedOrigins {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  AllowedOrigins() = default;  // none
  // origins: such as "https://chat.example" or "http://localhost:3000"; "localhost": pages of this
  // machine, whatever their port; "*": any. InputError for what is no origin.
  explicit AllowedOrigins(const std::vector<std::string>& origins);

  bool empty() const { return !any_ && !local_ && origins_.empty(); }
  bool allow(std::string_view origin) const;
  // What a reply says to the browser: nothing where no origin is allowed, or the request has none.
  // Pages of origins that are named may send what the browser keeps for the server: its own API
  // has no cookies, but a proxy in front may. Keys of the API are fields that a page sends itself.
  Headers headers(const CrossOrigin& request) const;

 private:
  bool names(std::string_view origin) const;  // other than by "*"

  std::set<std::string, std::less<>> origins_;
  bool any_ = false;
  bool local_ = false;
};

}  // namespace twell
