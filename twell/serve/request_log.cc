// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/request_log.h"

#include <fmt/core.h>

#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "twell/serve/openai.h"

namespace twell {
namespace {

constexpr size_t kPathBytes = 200;

std::string utc(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto whole = std::chrono::floor<std::chrono::seconds>(since);
  const auto second = static_cast<std::time_t>(whole.count());
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(since - whole).count();
  std::tm parts{};
  ::gmtime_r(&second, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     millis);
}

}  // namespace

std::string request_line(const HttpRecord& record) {
  using nlohmann::ordered_json;
  const auto or_null = [](const std::optional<int64_t>& count) {
    return count ? ordered_json(*count) : ordered_json();
  };
  return to_text({{"time", utc(record.time)},
                  {"method", record.method.substr(0, kPathBytes)},
                  {"path", record.path.substr(0, kPathBytes)},
                  {"status", record.status},
                  {"prompt_tokens", or_null(record.usage.prompt_tokens)},
                  {"completion_tokens", or_null(record.usage.completion_tokens)},
                  {"seconds", std::round(record.seconds * 1e6) / 1e6}}) +
         "\n";
}

}  // namespace twell
