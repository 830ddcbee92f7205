// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/allowed_origins.h"

#include <gtest/gtest.h>

#include <map>

#include "twell/base/error.h"

namespace twell {
namespace {

std::map<std::string, std::string> told(const AllowedOrigins& origins, const CrossOrigin& request) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : origins.headers(request)) out.emplace(name, value);
  return out;
}

TEST(AllowedOrigins, NoneByDefault) {
  EXPECT_TRUE(told({}, {.origin = "https://a.example", .wanted_method = "POST"}).empty());
}

TEST(AllowedOrigins, OnlyThoseThatAreNamed) {
  const AllowedOrigins two({"https://A.example", "http://localhost:3000"});
  for (const char* origin : {"https://a.example", "http://localhost:3000"}) {
    EXPECT_EQ(told(two, {.origin = origin})["Access-Control-Allow-Origin"], origin);
  }
  for (const char* origin : {"http://a.example", "https://a.example:444", "https://b.a.example",
                             "http://localhost", "null", ""}) {
    const auto headers = told(two, {.origin = origin, .wanted_method = "POST"});
    EXPECT_EQ(headers.size(), 1u) << origin;  // Vary: a cache must not hand on another's reply
    EXPECT_TRUE(headers.contains("Vary")) << origin;
  }
}

TEST(AllowedOrigins, PreflightsHearWhatMayFollow) {
  const AllowedOrigins any({"*"});
  auto headers = told(any, {.origin = "null",
                            .wanted_method = "POST",
                            .wanted_headers = "authorization,content-type",
                            .private_network = "true"});
  EXPECT_EQ(headers["Access-Control-Allow-Origin"], "null");
  EXPECT_EQ(headers["Access-Control-Allow-Methods"], "GET, POST");
  EXPECT_EQ(headers["Access-Control-Allow-Headers"], "authorization,content-type");
  EXPECT_EQ(headers["Access-Control-Allow-Private-Network"], "true");
  EXPECT_FALSE(headers.contains("Access-Control-Allow-Credentials"));
  headers = told(any, {.origin = "null", .wanted_method = "POST", .wanted_headers = "a\tb"});
  EXPECT_EQ(headers["Access-Control-Allow-Headers"], "*");
}

TEST(AllowedOrigins, RefusesWhatIsNoOrigin) {
  for (const char* text : {"", "localhost", "https://a.example/", "https://", "://a", "a b://c",
                           "https://a.example/path", "https://a,b"}) {
    EXPECT_THROW(AllowedOrigins({text}), InputError) << text;
  }
}

}  // namespace
}  // namespace twell
