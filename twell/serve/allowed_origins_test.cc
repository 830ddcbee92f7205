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

TEST(AllowedOrigins, LocalhostIsEveryPortOfThisMachine) {
  const AllowedOrigins local({"localhost"});
  EXPECT_FALSE(local.empty());
  for (const char* origin :
       {"http://localhost", "http://localhost:8080", "https://localhost:3000", "http://127.0.0.1",
        "http://127.0.0.1:3000", "http://[::1]", "https://[::1]:3000"}) {
    EXPECT_TRUE(local.allow(origin)) << origin;
    EXPECT_EQ(told(local, {.origin = origin})["Access-Control-Allow-Origin"], origin);
  }
  for (const char* origin :
       {"http://web.example", "http://notlocalhost", "http://localhost.example",
        "http://localhost:", "http://localhost:80.example", "http://127.0.0.10",
        "http://[::1].example", "localhost", "ftp://localhost", "http://localhost@web.example",
        "null", ""}) {
    EXPECT_FALSE(local.allow(origin)) << origin;
  }
  const AllowedOrigins both({"localhost", "https://a.example"});
  EXPECT_TRUE(both.allow("https://a.example"));
  EXPECT_TRUE(both.allow("http://localhost:1"));
  EXPECT_FALSE(both.allow("https://b.example"));
}

// A page that fetches with "credentials: include" gets a reply only where this field is. With "*"
// it would let any page act with a user's cookies of a proxy in front.
TEST(AllowedOrigins, CookiesOnlyForOriginsThatAreNamed) {
  const char* field = "Access-Control-Allow-Credentials";
  const AllowedOrigins two({"https://a.example", "localhost"});
  for (const char* origin : {"https://a.example", "http://localhost:3000"}) {
    EXPECT_EQ(told(two, {.origin = origin})[field], "true") << origin;
    EXPECT_EQ(told(two, {.origin = origin, .wanted_method = "POST"})[field], "true") << origin;
  }
  EXPECT_FALSE(told(two, {.origin = "https://b.example"}).contains(field));
  EXPECT_FALSE(told(AllowedOrigins({"*"}), {.origin = "https://a.example"}).contains(field));
  const AllowedOrigins all({"*", "https://a.example"});
  EXPECT_EQ(told(all, {.origin = "https://a.example"})[field], "true");
  EXPECT_FALSE(told(all, {.origin = "https://b.example"}).contains(field));
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
  for (const char* text : {"", "Localhost:3000", "https://a.example/", "https://", "://a",
                           "a b://c", "https://a.example/path", "https://a,b"}) {
    EXPECT_THROW(AllowedOrigins({text}), InputError) << text;
  }
}

}  // namespace
}  // namespace twell
