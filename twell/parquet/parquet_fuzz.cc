// SPDX-License-Identifier: Apache-2.0
// Reads hostile Parquet files: each gives rows that can be written as JSON, or an InputError.
#include <cstdint>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/parquet/reader.h"

namespace twell {
namespace {

constexpr int64_t kMaxRows = 2000;  // a few bytes can encode millions of nulls

void read(std::span<const std::byte> bytes, const std::vector<std::string>& names) {
  try {
    ParquetReader reader(bytes, "fuzz", names);
    nlohmann::json row;
    while (reader.row() < kMaxRows && reader.next(row)) {
      TWELL_CHECK(nlohmann::json::parse(row.dump()).is_object(), "not an object");
    }
  } catch (const InputError&) {
  }
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  twell::read(bytes, {});
  twell::read(bytes, {"text"});
  return 0;
}
