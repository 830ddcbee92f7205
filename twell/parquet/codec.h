// SPDX-License-Identifier: Apache-2.0
// The compression of pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace twell {

// Why pages of the codec (CompressionCodec of parquet.thrift) cannot be read; empty when they can:
// uncompressed, SNAPPY, GZIP, ZSTD.
std::string parquet_codec_refusal(int32_t codec);

// Decompresses `in` into all of `out`. InputError, naming `where`, when `in` is damaged or holds
// more or less than that.
void decompress_page(int32_t codec, std::span<const std::byte> in, std::span<std::byte> out,
                     const std::string& where);

}  // namespace twell
