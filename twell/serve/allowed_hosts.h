// SPDX-License-Identifier: Apache-2.0
// The names under which a server without API keys is reached. A foreign web page can let a name of
// its own point to the server's address, and the browser then takes the server for the page's; but
// the requests still carry that name in their Host field.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

class AllowedHosts {
 public:
  // bound: the address or name that the server listens on. names: further ones, "*" for all.
  // InputError for a name that is no host.
  AllowedHosts(const std::string& bound, const std::vector<std::string>& names);

  // host: a Host field's value, with or without a port. Allowed are localhost and names below it,
  // addresses of this machine's loopback, the bound address, and the further names; where the
  // server listens on every address, all addresses, because a page cannot give an address another
  // meaning.
  bool allow(std::string_view host) const;

 private:
  std::set<std::string> names_;  // in lower case
  bool any_address_ = false, any_ = false;
};

}  // namespace twell
