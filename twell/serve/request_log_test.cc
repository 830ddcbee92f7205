// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/request_log.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace twell {
namespace {

TEST(RequestLog, ALineHoldsFiguresOnly) {
  HttpRecord record{
      .time = std::chrono::system_clock::time_point(std::chrono::milliseconds(1700000000123)),
      .method = "POST",
      .path = "/v1/completions",
      .status = 200,
      .seconds = 0.25};
  EXPECT_EQ(request_line(record),
            R"({"time":"2023-11-14T22:13:20.123Z","method":"POST","path":"/v1/completions",)"
            R"("status":200,"prompt_tokens":null,"completion_tokens":null,"seconds":0.25})"
            "\n");
  record.usage = {.prompt_tokens = 12, .completion_tokens = 0};
  const auto line = nlohmann::json::parse(request_line(record));
  EXPECT_EQ(line["prompt_tokens"], 12);
  EXPECT_EQ(line["completion_tokens"], 0);
}

// Strangers choose paths: a line stays a line, of bounded length and valid UTF-8.
TEST(RequestLog, HostilePathsStayOnTheirLine) {
  HttpRecord record{.path = "/\n\"\xff" + std::string(100000, 'a')};
  const std::string line = request_line(record);
  EXPECT_LT(line.size(), 1000u);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_FALSE(nlohmann::json::parse(line, nullptr, false).is_discarded());
}

}  // namespace
}  // namespace twell
