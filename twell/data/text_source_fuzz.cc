// SPDX-License-Identifier: Apache-2.0
// Any bytes as a text, JSON-lines or compressed file, which the first byte chooses. The file is
// refused with an InputError, or gives the same documents in UTF-8 whatever the sizes of pieces and
// reads are.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/base/utf8.h"
#include "twell/data/text_documents.h"

namespace twell {
namespace {

constexpr int64_t kMaxBytes = int64_t{8} << 20;  // a few bytes can unpack to gigabytes
constexpr const char* kNames[] = {"a.txt",    "a.jsonl",    "a.txt.gz",  "a.jsonl.gz",
                                  "a.txt.xz", "a.jsonl.xz", "a.txt.zst", "a.jsonl.zst"};

// The documents, or none when the file is refused.
std::optional<std::vector<std::string>> read(const std::filesystem::path& file,
                                             const DocumentOptions& options) {
  std::vector<std::string> documents;
  int64_t bytes = 0;
  try {
    const auto reader = DocumentReader::open(file, options);
    TextPiece piece;
    while (bytes < kMaxBytes && reader->next(piece)) {
      TWELL_CHECK(!piece.text.empty() && piece.text.size() <= options.piece_bytes,
                  "a piece of {} bytes", piece.text.size());
      TWELL_CHECK(find_invalid_utf8(piece.text) == piece.text.size(), "a piece is not UTF-8");
      TWELL_CHECK(piece.begins_document || !documents.empty(), "a document without a beginning");
      if (piece.begins_document) documents.emplace_back();
      documents.back() += piece.text;
      bytes += std::ssize(piece.text);
    }
  } catch (const InputError&) {
    return std::nullopt;
  }
  if (bytes >= kMaxBytes) return std::nullopt;  // the readings stop at different places
  return documents;
}

void run(size_t kind, std::string_view bytes) {
  const TempFolder folder;
  const auto file = folder.write(kNames[kind % std::size(kNames)], bytes);
  DocumentOptions options;
  options.max_json_line = size_t{1} << 20;
  const auto whole = read(file, options);
  options.piece_bytes = 7;
  options.chunk_bytes = 5;
  const auto pieces = read(file, options);
  TWELL_CHECK(whole == pieces, "the documents depend on the size of the pieces");
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) twell::run(data[0], {reinterpret_cast<const char*>(data) + 1, size - 1});
  return 0;
}
