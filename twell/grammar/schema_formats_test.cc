// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/schema_formats.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

namespace twell::json_schema {
namespace {

struct Format {
  const char* name;
  std::vector<std::string> are, are_not;
};

TEST(SchemaFormats, PatternsAreThoseOfTheFormats) {
  const std::string label(63, 'a');
  const Format formats[] = {
      {"date",
       {"2026-11-27", "2024-02-29", "2000-02-29", "0001-01-31", "0004-02-29", "1999-12-31",
        "2026-04-30"},
       {"2026-11-31", "2026-04-31", "2025-02-29", "1900-02-29", "0000-01-01", "0000-02-29",
        "2026-00-10", "2026-13-10", "2026-01-00", "2026-02-30", "2026-1-1", "26-01-01"}},
      {"time",
       {"23:59:59Z", "00:00:00.5+01:30", "12:30:00-23:59"},
       {"24:00:00Z", "23:59:60Z", "12:60:00Z", "12:00:00", "12:00Z", "12:00:00.Z"}},
      {"date-time",
       {"2026-11-27T12:00:00Z", "2024-02-29T00:00:00.125-01:00"},
       {"2026-11-31T12:00:00Z", "2026-11-27 12:00:00Z", "2026-11-27", "2026-11-27T12:00:00"}},
      {"hostname",
       {"a", "a-b.Example", label + "." + label, "1.2", "a.b.c.d.e.f.g"},
       {label + "a", "-a", "a-", "a..b", ".a", "a.", "xn--a", "a_b", "", "a.b.c.d.e.f.g.h"}},
      {"ipv4",
       {"0.0.0.0", "127.0.0.1", "255.249.199.99"},
       {"256.0.0.1", "01.2.3.4", "1.2.3", "1.2.3.4.5", "1.2.3.", "300.1.1.1"}}};
  for (const Format& format : formats) {
    const std::regex pattern(pattern_of_format(format.name).value());
    for (const std::string& text : format.are) {
      EXPECT_TRUE(std::regex_match(text, pattern)) << format.name << ": " << text;
    }
    for (const std::string& text : format.are_not) {
      EXPECT_FALSE(std::regex_match(text, pattern)) << format.name << ": " << text;
    }
    EXPECT_TRUE(is_known_format(format.name));
  }
  EXPECT_TRUE(is_known_format("uuid"));
  EXPECT_EQ(pattern_of_format("uuid"), std::nullopt);
  EXPECT_FALSE(is_known_format("color"));
}

}  // namespace
}  // namespace twell::json_schema
