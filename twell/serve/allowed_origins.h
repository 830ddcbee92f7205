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
  // origins: such as "https://chat.example" or "http://localhost:3000"; "*": any. InputError for
  // what is no origin.
  explicit AllowedOrigins(const std::vector<std::string>& origins);

  bool empty() const { return !any_ && origins_.empty(); }
  bool allow(std::string_view origin) const;
  // What a reply says to the browser: nothing where no origin is allowed, or the request has none.
  // Credentials that the browser keeps (cookies) are never asked for; keys of the API are fields
  // that the page sends itself.
  Headers headers(const CrossOrigin& request) const;

 private:
  std::set<std::string, std::less<>> origins_;
  bool any_ = false;
};

}  // namespace twell
