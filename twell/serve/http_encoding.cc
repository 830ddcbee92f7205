// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/http_encoding.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int kGzip = 15 + 16;        // the widest window, in gzip's frame
constexpr int kGzipOrZlib = 15 + 32;  // whichever begins
constexpr int kDeflateMemory = 8;     // zlib's default

std::string_view trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

struct Inflater {
  Inflater() { TWELL_CHECK(inflateInit2(&stream, kGzipOrZlib) == Z_OK, "zlib: no memory"); }
  ~Inflater() { inflateEnd(&stream); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  z_stream stream{};
};

}  // namespace

std::string first_value(std::string_view field) {
  std::string value(trimmed(field.substr(0, field.find(';'))));
  for (char& c : value) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return value;
}

Decoded decode_body(std::string_view encoding, int64_t most_bytes, MemoryBudget::Share& share,
                    std::string& body) {
  const std::string name = first_value(encoding);
  if (name.empty() || name == "identity") return Decoded::kGood;
  if (name != "gzip" && name != "x-gzip" && name != "deflate") return Decoded::kUnknownEncoding;
  Inflater inflater;
  z_stream& stream = inflater.stream;
  stream.next_in = reinterpret_cast<Bytef*>(body.data());
  stream.avail_in = static_cast<uInt>(body.size());
  std::string out;
  std::array<char, size_t{64} << 10> piece;
  while (true) {
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = piece.size();
    const int status = inflate(&stream, Z_NO_FLUSH);
    const auto count = static_cast<int64_t>(piece.size() - stream.avail_out);
    if (std::ssize(out) + count > most_bytes) return Decoded::kTooLong;
    if (!share.grow(count)) return Decoded::kNoMemory;
    out.append(piece.data(), static_cast<size_t>(count));
    if (status == Z_STREAM_END) {
      if (stream.avail_in == 0) break;
      // A further member of a gzip file.
      if (name == "deflate" || inflateReset2(&stream, kGzip) != Z_OK) return Decoded::kBroken;
    } else if (status != Z_OK || (count == 0 && stream.avail_in == 0)) {
      return Decoded::kBroken;
    }
  }
  body = std::move(out);
  return Decoded::kGood;
}

bool accepts_gzip(std::string_view accept_encoding) {
  while (!accept_encoding.empty()) {
    const size_t end = std::min(accept_encoding.find(','), accept_encoding.size());
    const std::string_view one = accept_encoding.substr(0, end);
    accept_encoding.remove_prefix(std::min(end + 1, accept_encoding.size()));
    const std::string name = first_value(one);
    if (name != "gzip" && name != "x-gzip") continue;
    const size_t parameters = one.find(';');
    if (parameters == one.npos) return true;
    const std::string weight = first_value(one.substr(parameters + 1));
    return !weight.starts_with("q=") || std::atof(weight.c_str() + 2) > 0.0;
  }
  return false;
}

std::string gzip(std::string_view text) {
  z_stream stream{};
  TWELL_CHECK(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kGzip, kDeflateMemory,
                           Z_DEFAULT_STRATEGY) == Z_OK,
              "zlib: no memory");
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int status = deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  TWELL_CHECK(status == Z_STREAM_END, "zlib gives {}", status);
  return out;
}

}  // namespace twell
