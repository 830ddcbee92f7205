// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/allowed_hosts.h"

#include <gtest/gtest.h>

#include "twell/base/error.h"

namespace twell {
namespace {

TEST(AllowedHosts, ThisMachineIsAllowedAndForeignNamesAreNot) {
  const AllowedHosts hosts("127.0.0.1", {});
  for (const char* good :
       {"localhost", "LocalHost:8000", "localhost.", "a.localhost:1", "127.0.0.1", "127.0.0.1:8000",
        "127.1.2.3", "[::1]", "[::1]:80", "[::ffff:127.0.0.1]:80", "[0:0::1]", "localhost:"}) {
    EXPECT_TRUE(hosts.allow(good)) << good;
  }
  for (const char* bad : {"",
                          "evil.example",
                          "evil.example:8000",
                          "localhost.evil.example",
                          "evillocalhost",
                          "127.0.0.1.evil.example",
                          "192.168.1.2",
                          "[fe80::1]",
                          "[::1",
                          "::1",
                          "[localhost]",
                          "localhost:80a",
                          "localhost:80:80",
                          "localhost evil",
                          "127.0.0.1@evil",
                          "0.0.0.0",
                          "2130706433",
                          "127.1",
                          "[::2]x",
                          ".",
                          "user@localhost",
                          "*"}) {
    EXPECT_FALSE(hosts.allow(bad)) << bad;
  }
}

TEST(AllowedHosts, TheBoundAddressAndFurtherNames) {
  const AllowedHosts one("192.168.1.2", {"My.Server", "[fe80::1]", "10.0.0.1"});
  for (const char* good :
       {"192.168.1.2:80", "my.server", "MY.SERVER:8000", "[fe80::1]:80", "10.0.0.1", "localhost"}) {
    EXPECT_TRUE(one.allow(good)) << good;
  }
  EXPECT_FALSE(one.allow("192.168.1.3"));
  EXPECT_FALSE(one.allow("other.server"));
  for (const char* every : {"0.0.0.0", "::"}) {
    const AllowedHosts all(every, {});
    EXPECT_TRUE(all.allow("192.168.1.3:80"));
    EXPECT_TRUE(all.allow("[fe80::7]"));
    EXPECT_FALSE(all.allow("evil.example"));
  }
  EXPECT_TRUE(AllowedHosts("127.0.0.1", {"*"}).allow("evil.example"));
  EXPECT_TRUE(AllowedHosts("my-host", {}).allow("my-host:8000"));
  EXPECT_THROW(AllowedHosts("127.0.0.1", {"a b"}), InputError);
  EXPECT_THROW(AllowedHosts("127.0.0.1", {""}), InputError);
}

}  // namespace
}  // namespace twell
