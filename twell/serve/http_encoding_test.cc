// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/http_encoding.h"

#include <gtest/gtest.h>
#include <zlib.h>

namespace twell {
namespace {

std::string deflated(const std::string& text) {
  uLongf size = compressBound(text.size());
  std::string out(size, '\0');
  compress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(text.data()),
           text.size());
  out.resize(size);
  return out;
}

TEST(HttpEncoding, Bodies) {
  MemoryBudget memory(1 << 20);
  const std::string text(100000, 'a');
  const auto decode = [&](std::string_view encoding, std::string body, int64_t most = 1 << 20) {
    MemoryBudget::Share share(memory);
    const Decoded decoded = decode_body(encoding, most, share, body);
    EXPECT_TRUE(decoded != Decoded::kGood || body == text || body == text + text) << encoding;
    return decoded;
  };
  EXPECT_EQ(decode("", text), Decoded::kGood);
  EXPECT_EQ(decode("Identity", text), Decoded::kGood);
  EXPECT_EQ(decode("gzip", gzip(text)), Decoded::kGood);
  EXPECT_EQ(decode(" GZIP ", gzip(text)), Decoded::kGood);
  EXPECT_EQ(decode("x-gzip", gzip(text) + gzip(text)), Decoded::kGood);
  EXPECT_EQ(decode("deflate", deflated(text)), Decoded::kGood);
  for (const char* unknown : {"br", "zstd", "gzip, gzip", "gzip, br", "identity, gzip", "x"}) {
    EXPECT_EQ(decode(unknown, gzip(text)), Decoded::kUnknownEncoding) << unknown;
  }
  EXPECT_EQ(decode("gzip", ""), Decoded::kBroken);
  EXPECT_EQ(decode("gzip", text), Decoded::kBroken);
  EXPECT_EQ(decode("gzip", gzip(text) + "x"), Decoded::kBroken);
  EXPECT_EQ(decode("deflate", deflated(text) + "x"), Decoded::kBroken);
  const std::string whole = gzip(text);
  for (size_t size = 0; size < whole.size(); size += 7) {
    EXPECT_EQ(decode("gzip", whole.substr(0, size)), Decoded::kBroken) << size;
  }
  EXPECT_EQ(decode("gzip", whole, 99999), Decoded::kTooLong);
  EXPECT_EQ(decode("gzip", gzip(std::string(2 << 20, 'a')), 4 << 20), Decoded::kNoMemory);
  EXPECT_EQ(memory.used(), 0);
}

TEST(HttpEncoding, Fields) {
  for (const char* good :
       {"gzip", "br, GZIP", "deflate;q=0.1, gzip;q=0.5", "gzip;q=1.000", "x-gzip"}) {
    EXPECT_TRUE(accepts_gzip(good)) << good;
  }
  for (const char* bad : {"", "br", "gzip;q=0", "gzip; q=0.0", "gzipped", "identity, *;q=0", ","}) {
    EXPECT_FALSE(accepts_gzip(bad)) << bad;
  }
  EXPECT_EQ(first_value(" Application/JSON ; charset=utf-8"), "application/json");
  EXPECT_EQ(first_value(""), "");
}

}  // namespace
}  // namespace twell
