// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/rle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

const std::string kWhere = "f";

// Packs bit by bit as specified: groups of eight, lowest bit first.
void append_packed(std::string& out, const std::vector<uint32_t>& values, int width) {
  ASSERT_EQ(values.size() % 8, 0u);
  const size_t groups = values.size() / 8;
  ASSERT_LT(groups, 64u);
  out += static_cast<char>((groups << 1) | 1);
  const size_t begin = out.size();
  out.append(groups * static_cast<size_t>(width), '\0');
  size_t bit = 0;
  for (const uint32_t value : values) {
    for (int i = 0; i < width; ++i, ++bit) {
      if (((value >> i) & 1) != 0) {
        out[begin + bit / 8] = static_cast<char>(out[begin + bit / 8] | (1 << (bit % 8)));
      }
    }
  }
}

void append_run(std::string& out, uint32_t count, uint32_t value, int width) {
  for (uint32_t head = count << 1;; head >>= 7) {
    out += static_cast<char>((head & 0x7F) | (head >= 0x80 ? 0x80 : 0));
    if (head < 0x80) break;
  }
  for (int i = 0; i < (width + 7) / 8; ++i) out += static_cast<char>(value >> (8 * i));
}

TEST(Rle, PackedGroupsAndRunsOfEveryWidth) {
  for (int width = 0; width <= 32; ++width) {
    const uint64_t range = uint64_t{1} << width;
    std::vector<uint32_t> wanted, group;
    std::string bytes;
    for (uint64_t part = 0; part < 6; ++part) {
      group.clear();
      for (uint64_t i = 0; i < 8 * (1 + part * 3); ++i) {
        group.push_back(static_cast<uint32_t>(uniform_below(5, part, i, range)));
      }
      append_packed(bytes, group, width);
      wanted.insert(wanted.end(), group.begin(), group.end());
      const auto repeated = static_cast<uint32_t>(range - 1);
      append_run(bytes, 100 + 1000 * static_cast<uint32_t>(part), repeated, width);
      wanted.insert(wanted.end(), 100 + 1000 * part, repeated);
    }
    RleReader reader(std::as_bytes(std::span(bytes)), width, kWhere);
    for (size_t i = 0; i < wanted.size(); ++i) ASSERT_EQ(reader.next(), wanted[i]) << width;
    EXPECT_THROW(reader.next(), InputError);
  }
}

TEST(Rle, TheLengthOfARunHasFiveBytesAtMost) {
  const uint32_t count = 1u << 30;
  std::string bytes;
  append_run(bytes, count, 7, 8);
  ASSERT_EQ(bytes.size(), 6u);
  RleReader reader(std::as_bytes(std::span(bytes)), 8, kWhere);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(reader.next(), 7u);
}

TEST(Rle, TheLastGroupMayBeCutShort) {
  std::string bytes;
  append_packed(bytes, {1, 2, 3, 4, 5, 6, 7, 0}, 3);
  bytes.resize(bytes.size() - 1);  // 16 of 24 bits are left: five numbers
  RleReader reader(std::as_bytes(std::span(bytes)), 3, kWhere);
  for (uint32_t i = 1; i <= 5; ++i) EXPECT_EQ(reader.next(), i);
  EXPECT_THROW(reader.next(), InputError);
}

TEST(Rle, RefusesWhatIsMalformed) {
  const auto fault = [](std::string_view bytes, int width) {
    try {
      RleReader(std::as_bytes(std::span(bytes)), width, kWhere).next();
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using testing::HasSubstr;
  EXPECT_THAT(fault("", 1), HasSubstr("f: a damaged page (levels or indices end early)"));
  EXPECT_THAT(fault("\x04", 8), HasSubstr("end early"));
  EXPECT_THAT(fault("\xff\xff\xff\xff\xff\xff", 1), HasSubstr("a run that is too long"));
  EXPECT_THAT(fault(std::string_view("\0", 1), 1), HasSubstr("an empty run"));
  EXPECT_THAT(fault("\x04", 33), HasSubstr("numbers of 33 bits"));
}

}  // namespace
}  // namespace twell
