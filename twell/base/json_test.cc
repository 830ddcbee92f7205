// SPDX-License-Identifier: Apache-2.0
#include "twell/base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string fault(const std::string& text, const JsonLimits& limits = {}) {
  std::string plain = "no fault", ordered = plain;
  try {
    parse_json(text, "x", limits);
  } catch (const InputError& error) {
    plain = error.what();
  }
  try {
    parse_ordered_json(text, "x", limits);
  } catch (const InputError& error) {
    ordered = error.what();
  }
  EXPECT_EQ(plain, ordered);
  return plain;
}

std::string fault_of_field(const std::string& text, const JsonLimits& limits = {}) {
  try {
    parse_json_field(text, "text", "line 4", limits);
    return "no fault";
  } catch (const InputError& error) {
    return error.what();
  }
}

std::string repeat(const std::string& text, int64_t count) {
  std::string all;
  for (int64_t i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Json, ReadsEveryKindOfValue) {
  const std::string text =
      "\xEF\xBB\xBF \n{\"b\": [1, -2, 0.5, true, false, null, \"\\u00e9\\n\\ud83d\\ude00\"], "
      "\"a\": {\"x\": [], \"y\": {}}, \"\": [[[]]]}\t\r\n";
  const json value = parse_json(text, "x");
  EXPECT_EQ(value.dump(),
            "{\"\":[[[]]],\"a\":{\"x\":[],\"y\":{}},"
            "\"b\":[1,-2,0.5,true,false,null,\"é\\n😀\"]}");
  EXPECT_EQ(parse_ordered_json(text, "x").dump(),
            "{\"b\":[1,-2,0.5,true,false,null,\"é\\n😀\"],"
            "\"a\":{\"x\":[],\"y\":{}},\"\":[[[]]]}");
  for (const char* scalar : {"1", "-1", "\"a\"", "null", "true", "[]", "{}", "1e3"}) {
    EXPECT_EQ(parse_json(scalar, "x"), json::parse(scalar)) << scalar;
  }
}

TEST(Json, SaysWhereItIsNotValid) {
  EXPECT_EQ(fault(""), "x: not valid JSON at byte 1: it is empty");
  EXPECT_EQ(fault("[1,"), "x: not valid JSON at byte 4: it ends early");
  EXPECT_EQ(fault("{\"a\":\n 1,\n oops}"),
            "x: not valid JSON at byte 12 (line 3, column 2): a syntax error");
  EXPECT_EQ(fault("[\"a\xFF\"]"), "x: not valid JSON at byte 4: bytes that are not UTF-8");
  EXPECT_EQ(fault("[\"\xED\xA0\x80\"]"), "x: not valid JSON at byte 3: bytes that are not UTF-8");
  EXPECT_THAT(fault("{} {}"), HasSubstr("byte 4: a syntax error"));
  EXPECT_THAT(fault("[1]x"), HasSubstr("byte 4: a syntax error"));
  EXPECT_THAT(fault("[\"\\ud800\"]"), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault("['a']"), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault("[NaN]"), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault("[1] // remark"), HasSubstr("not valid JSON"));
  // nlohmann stops at a NUL byte, so other readers would see text behind it that this one does not.
  EXPECT_THAT(fault(std::string("{}\0", 3)), HasSubstr("byte 3: a byte of value 0"));
  EXPECT_THAT(fault(std::string("{\"a\": 1}\0{\"a\": 2}", 17)), HasSubstr("a byte of value 0"));
  EXPECT_THAT(fault(std::string("[1,\0 2]", 7)), HasSubstr("not valid JSON at byte 4"));
}

TEST(Json, NamesAPointerOfGitLfs) {
  EXPECT_THAT(fault("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
              HasSubstr("x: it is a Git LFS pointer"));
}

TEST(Json, ReadsNumbersAtTheirLimits) {
  const auto read = [](const std::string& text) { return parse_json("[" + text + "]", "x")[0]; };
  EXPECT_EQ(read("-0"), 0);
  EXPECT_TRUE(read("-0").is_number_integer());
  EXPECT_TRUE(std::signbit(read("-0.0").get<double>()));
  EXPECT_EQ(read("18446744073709551615").get<uint64_t>(), UINT64_MAX);
  EXPECT_EQ(read("-9223372036854775808").get<int64_t>(), INT64_MIN);
  EXPECT_TRUE(read("18446744073709551616").is_number_float());
  EXPECT_EQ(read("18446744073709551616").get<double>(), 18446744073709551616.0);
  EXPECT_EQ(read("-9223372036854775809").get<double>(), -9223372036854775808.0);
  EXPECT_EQ(read("1e-999").get<double>(), 0.0);
  EXPECT_EQ(read("1.7976931348623157e308").get<double>(), 1.7976931348623157e308);
  EXPECT_THAT(fault("[1, 1e999]"), HasSubstr("byte 9: a number too large for a double"));
  EXPECT_THAT(fault("[-1e999]"), HasSubstr("a number too large for a double"));
  for (const char* text : {"01", "+1", "1.", ".5", "1e", "0x10", "- 1", "--1"}) {
    EXPECT_THAT(fault(std::string("[") + text + "]"), HasSubstr("not valid JSON")) << text;
  }
}

TEST(Json, RefusesOrOverridesRepeatedKeys) {
  const std::string text = "{\"a\": 1, \"b\": {\"a\": 2, \"a\": 3}}";
  EXPECT_EQ(fault(text), "x: the key \"a\" appears twice, the second time at byte 26");
  EXPECT_THAT(fault("{\"\\u0061\": 1, \"a\": 2}"), HasSubstr("the key \"a\" appears twice"));
  EXPECT_EQ(fault("{\"a\": {\"a\": 1}, \"b\": [{\"a\": 1}, {\"a\": 1}]}"), "no fault");
  const JsonLimits last{.keys = JsonKeys::kLast};
  EXPECT_EQ(fault(text, last), "no fault");
  EXPECT_EQ(parse_json(text, "x", last).dump(), "{\"a\":1,\"b\":{\"a\":3}}");
  // As in Python, the place of the first and the value of the last.
  EXPECT_EQ(parse_ordered_json("{\"b\": [1], \"a\": 2, \"b\": {\"c\": 3}}", "x", last).dump(),
            "{\"b\":{\"c\":3},\"a\":2}");
}

TEST(Json, RefusesNestingBeyondItsLimit) {
  const auto nested = [](int depth) {
    return repeat("[{\"a\":", depth / 2) + "1" + repeat("}]", depth / 2);
  };
  EXPECT_EQ(fault(nested(64)), "no fault");
  EXPECT_THAT(fault(nested(66)), HasSubstr("nested more than 64 levels deep at byte 193"));
  EXPECT_EQ(fault(nested(66), {.depth = 66}), "no fault");
  EXPECT_THAT(fault(repeat("[", 300'000)), HasSubstr("nested more than 64"));
  EXPECT_EQ(fault("[[], [], [[]]]", {.depth = 3}), "no fault");
  EXPECT_THAT(fault("[[], [], [[]]]", {.depth = 2}), HasSubstr("at byte 11"));
}

TEST(Json, ReadsOneFieldOfAnObject) {
  const JsonLimits last{.keys = JsonKeys::kLast};
  const auto field = [&](const std::string& text) {
    return parse_json_field(text, "text", "line 4", last).dump();
  };
  EXPECT_EQ(field("{\"id\": 1, \"text\": \"a\", \"x\": [{\"text\": \"b\"}]}"), "\"a\"");
  EXPECT_EQ(field("{\"x\": {\"text\": \"b\"}, \"text\": [1, {\"c\": 2}], \"y\": 3}"),
            "[1,{\"c\":2}]");
  EXPECT_EQ(field("{\"text\": \"a\", \"text\": \"b\"}"), "\"b\"");
  EXPECT_EQ(field("{\"x\": [\"text\", \"a\"]}"), "null");
  EXPECT_EQ(field("{}"), "null");
  EXPECT_EQ(fault_of_field("\"text\""), "line 4 is not a JSON object");
  EXPECT_EQ(fault_of_field("[{\"text\": 1}]"), "line 4 is not a JSON object");
  EXPECT_EQ(fault_of_field("12"), "line 4 is not a JSON object");
  EXPECT_EQ(fault_of_field("{\"text\": \"a\", \"b\": }"),
            "line 4: not valid JSON at byte 20: a syntax error");
  EXPECT_THAT(fault_of_field("{\"b\": 1, \"b\": 2}"), HasSubstr("\"b\" appears twice"));
  EXPECT_THAT(fault_of_field("{\"b\": [[[[]]]]}", {.depth = 4}), HasSubstr("nested more than 4"));
}

TEST(Json, ErasesKeysInOnePass) {
  nlohmann::ordered_json object = {{"b", 1}, {"xb", {1, 2}}, {"a", {{"x", 1}}}, {"xa", 2}};
  erase_keys(object, [](const std::string& key) { return key.starts_with('x'); });
  EXPECT_EQ(object.dump(), "{\"b\":1,\"a\":{\"x\":1}}");
}

// Four times the text must take far less than sixteen times as long; the best of several runs each.
void expect_linear(const std::string& what, const std::function<std::string(int64_t)>& make,
                   const std::function<void(const std::string&)>& read) {
  const auto seconds = [&](int64_t count) {
    const std::string text = make(count);
    std::clock_t best = 0;
    for (int run = 0; run < 3; ++run) {
      const std::clock_t begin = std::clock();
      read(text);
      const std::clock_t taken = std::clock() - begin;
      best = run == 0 ? taken : std::min(best, taken);
    }
    return static_cast<double>(best) / CLOCKS_PER_SEC;
  };
  const double few = seconds(8'000), many = seconds(32'000);
  EXPECT_LT(many, 10 * few + 0.01) << what << ": " << few << " s, " << many << " s";
}

TEST(Json, TakesLinearTime) {
  const JsonLimits last{.depth = 1000, .keys = JsonKeys::kLast};
  const auto each = [&](const std::string& what, const std::function<std::string(int64_t)>& make) {
    expect_linear(what, make, [&](const std::string& text) { parse_json(text, "x"); });
    expect_linear("ordered " + what, make,
                  [&](const std::string& text) { parse_ordered_json(text, "x", last); });
  };
  each("empty objects", [](int64_t count) { return "[" + repeat("{},", count) + "0]"; });
  each("empty lists", [](int64_t count) { return "[" + repeat("[],", count) + "0]"; });
  each("keys", [](int64_t count) {
    std::string text = "{";
    for (int64_t i = 0; i < count; ++i) text += fmt::format("\"{}\":[{}],", i, i);
    return text + "\"\":0}";
  });
  const auto rows = [](int64_t count) {
    return "{\"x\":[" + repeat("{\"a\":[]},", count) + "0],\"text\":\"a\"}";
  };
  expect_linear("a field", rows,
                [&](const std::string& text) { parse_json_field(text, "text", "x", last); });
}

}  // namespace
}  // namespace twell
