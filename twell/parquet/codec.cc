// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/codec.h"

#include <snappy-c.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int32_t kUncompressed = 0, kSnappy = 1, kGzip = 2, kZstd = 6;

// Bytes written; more than `out` has room for, or anything else when the data is damaged.
size_t unsnappy(std::span<const std::byte> in, std::span<std::byte> out) {
  const auto* source = reinterpret_cast<const char*>(in.data());
  size_t size = 0;
  if (snappy_uncompressed_length(source, in.size(), &size) != SNAPPY_OK || size != out.size()) {
    return out.size() + 1;
  }
  const auto status =
      snappy_uncompress(source, in.size(), reinterpret_cast<char*>(out.data()), &size);
  return status == SNAPPY_OK ? size : out.size() + 1;
}

// Gzip members one after the other.
size_t gunzip(std::span<const std::byte> in, std::span<std::byte> out) {
  z_stream stream{};
  constexpr int kGzipOrZlib = 32;
  TWELL_CHECK(inflateInit2(&stream, MAX_WBITS + kGzipOrZlib) == Z_OK, "zlib failed to start");
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(in.data()));
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  int code = inflate(&stream, Z_FINISH);
  while (code == Z_STREAM_END && stream.avail_in > 0) {
    inflateReset(&stream);
    code = inflate(&stream, Z_FINISH);
  }
  const size_t written = out.size() - stream.avail_out;
  inflateEnd(&stream);
  return code == Z_STREAM_END ? written : out.size() + 1;
}

size_t unzstd(std::span<const std::byte> in, std::span<std::byte> out) {
  const size_t size = ZSTD_decompress(out.data(), out.size(), in.data(), in.size());
  return ZSTD_isError(size) != 0 ? out.size() + 1 : size;
}

size_t unpack(int32_t codec, std::span<const std::byte> in, std::span<std::byte> out) {
  switch (codec) {
    case kUncompressed:
      if (in.size() == out.size() && !in.empty()) std::memcpy(out.data(), in.data(), in.size());
      return in.size();
    case kSnappy:
      return unsnappy(in, out);
    case kGzip:
      return gunzip(in, out);
    case kZstd:
      return unzstd(in, out);
    default:
      throw Error(fmt::format("codec {} was not refused", codec));
  }
}

}  // namespace

std::string parquet_codec_refusal(int32_t codec) {
  if (codec == kUncompressed || codec == kSnappy || codec == kGzip || codec == kZstd) return {};
  static constexpr std::array<const char*, 8> kNames = {
      "UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW"};
  const auto index = static_cast<size_t>(codec);
  return fmt::format("compression {}",
                     index < kNames.size() ? kNames[index] : std::to_string(codec));
}

void decompress_page(int32_t codec, std::span<const std::byte> in, std::span<std::byte> out,
                     const std::string& where) {
  TWELL_REQUIRE(unpack(codec, in, out) == out.size(),
                "{}: a damaged page ({} bytes do not decompress to {})", where, in.size(),
                out.size());
}

}  // namespace twell
