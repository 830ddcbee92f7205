// SPDX-License-Identifier: Apache-2.0
// Bytes of text per second of UTF-8 validation alone and of reading a whole file in pieces.
#include "twell/data/text_source.h"

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/utf8.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

constexpr size_t kBytes = size_t{16} << 20;

// Words of the given letters, each followed by a space, in sentences of a dozen words.
std::string words(const std::vector<std::string>& letters, size_t bytes) {
  std::string text;
  text.reserve(bytes + 64);
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    const auto random = philox(1, 2, i);
    for (uint32_t k = 0; k < 2 + random[0] % 7; ++k) {
      text += letters[(random[1] >> (4 * k) & 15) % letters.size()];
    }
    text += i % 12 == 11 ? ".\n" : " ";
  }
  return text;
}

std::string english() {
  return words({"e", "t", "a", "o", "i", "n", "s", "r", "h", "l", "d", "c"}, kBytes);
}
std::string french() {
  return words({"e", "t", "a", "o", "i", "n", "s", "r", "\u00e9", "l", "d", "\u00e0"}, kBytes);
}
std::string chinese() { return words({"\u4e2d", "\u6587", "\u5b57", "\u8bed"}, kBytes); }

void validate(benchmark::State& state, const std::string& text) {
  for (auto _ : state) {
    if (find_invalid_utf8(text) != text.size()) state.SkipWithError("not UTF-8");
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text.size()));
}
BENCHMARK_CAPTURE(validate, english, english());
BENCHMARK_CAPTURE(validate, french, french());
BENCHMARK_CAPTURE(validate, chinese, chinese());

std::string json_lines(const std::string& text) {
  std::string lines;
  for (size_t begin = 0; begin < text.size(); begin += 4000) {
    std::string part = text.substr(begin, 4000);
    lines += "{\"id\": 1, \"text\": \"";
    for (char c : part) lines += c == '\n' ? std::string("\\n") : std::string(1, c);
    lines += "\"}\n";
  }
  return lines;
}

// Reports bytes of text returned, not bytes on disk.
void read(benchmark::State& state, const std::string& name, const std::string& contents) {
  const TempFolder folder;
  TextSource source({.paths = {folder.write(name, contents)}});
  TextPiece piece;
  int64_t bytes = 0;
  for (auto _ : state) {
    source.rewind();
    while (source.next(piece)) bytes += static_cast<int64_t>(piece.text.size());
  }
  state.SetBytesProcessed(bytes);
}
BENCHMARK_CAPTURE(read, text, "a.txt", english());
BENCHMARK_CAPTURE(read, text_chinese, "a.txt", chinese());
BENCHMARK_CAPTURE(read, jsonl, "a.jsonl", json_lines(english()));
BENCHMARK_CAPTURE(read, text_gz, "a.gz", gzip(english()));
BENCHMARK_CAPTURE(read, text_xz, "a.xz", xz(english()));
BENCHMARK_CAPTURE(read, text_zst, "a.zst", zst(english()));

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
