// SPDX-License-Identifier: Apache-2.0
// Compressors for this folder's tests.
#pragma once

#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include <string>
#include <string_view>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell {

inline std::string gzip(std::string_view text) {
  z_stream stream{};
  TWELL_CHECK(deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK,
              "deflateInit2 failed");
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  TWELL_CHECK(deflate(&stream, Z_FINISH) == Z_STREAM_END, "deflate failed");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

inline std::string xz(std::string_view text) {
  std::string out(lzma_stream_buffer_bound(text.size()), '\0');
  size_t size = 0;
  const lzma_ret code = lzma_easy_buffer_encode(
      0, LZMA_CHECK_CRC64, nullptr, reinterpret_cast<const uint8_t*>(text.data()), text.size(),
      reinterpret_cast<uint8_t*>(out.data()), &size, out.size());
  TWELL_CHECK(code == LZMA_OK, "lzma_easy_buffer_encode failed");
  out.resize(size);
  return out;
}

inline std::string zst(std::string_view text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  const size_t size = ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1);
  TWELL_CHECK(!ZSTD_isError(size), "ZSTD_compress failed");
  out.resize(size);
  return out;
}

}  // namespace twell
