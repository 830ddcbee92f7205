// SPDX-License-Identifier: Apache-2.0
// Speed of encoding and training on the headers in /usr/include, or on the text in the file that
// the environment variable TWELL_BENCH_TEXT names, cut into pieces of 1 MiB.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "twell/base/file.h"
#include "twell/base/utf8.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kTextBytes = size_t{32} << 20;

std::vector<std::string> read_pieces() {
  namespace fs = std::filesystem;
  if (const char* file = std::getenv("TWELL_BENCH_TEXT")) {
    const std::string text = read_file(file);
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size(); at += pieces.back().size()) {
      pieces.push_back(
          text.substr(at, utf8_prefix(std::string_view(text).substr(at), kPieceBytes)));
    }
    return pieces;
  }
  std::vector<fs::path> paths;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator("/usr/include", error)) {
    if (entry.is_regular_file(error)) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> pieces;
  size_t total = 0;
  for (const fs::path& path : paths) {
    if (total >= kTextBytes) break;
    const std::string text = read_file(path);
    if (find_invalid_utf8(text) != text.size()) continue;
    if (pieces.empty() || pieces.back().size() + text.size() > kPieceBytes) pieces.emplace_back();
    pieces.back() += text;
    total += text.size();
  }
  return pieces;
}

const std::vector<std::string>& text_pieces() {
  static const std::vector<std::string> pieces = read_pieces();
  return pieces;
}

int64_t bytes_of(const std::vector<std::string>& pieces) {
  size_t bytes = 0;
  for (const std::string& piece : pieces) bytes += piece.size();
  return static_cast<int64_t>(bytes);
}

bool skip_without_text(benchmark::State& state) {
  if (bytes_of(text_pieces()) >= int64_t{4} << 20) return false;
  state.SkipWithError("there are no 4 MiB of text to encode");
  return true;
}

Tokenizer train(const std::string& pre_tokenizer, int64_t vocab_size, int threads) {
  BpeTrainingOptions options;
  options.vocab_size = vocab_size;
  options.pre_tokenizer = pre_tokenizer;
  options.threads = threads;
  size_t next = 0;
  return train_bpe(options, [&](std::string& text) {
    if (next == text_pieces().size()) return false;
    text = text_pieces()[next++];
    return true;
  });
}

void encode_all(const Tokenizer& tokenizer, int threads) {
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      std::vector<int32_t> ids;
      for (size_t i = static_cast<size_t>(t); i < text_pieces().size(); i += threads) {
        ids.clear();
        tokenizer.encode(text_pieces()[i], ids);
        benchmark::DoNotOptimize(ids.data());
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

void encode(benchmark::State& state, const std::string& pre_tokenizer) {
  if (skip_without_text(state)) return;
  const int threads = static_cast<int>(state.range(0));
  const Tokenizer tokenizer = train(pre_tokenizer, state.range(1), 2);
  for (auto _ : state) encode_all(tokenizer, threads);
  state.SetBytesProcessed(state.iterations() * bytes_of(text_pieces()));
}

void training(benchmark::State& state, const std::string& pre_tokenizer) {
  if (skip_without_text(state)) return;
  for (auto _ : state) train(pre_tokenizer, state.range(1), static_cast<int>(state.range(0)));
  state.SetBytesProcessed(state.iterations() * bytes_of(text_pieces()));
}

#define TWELL_TOKENIZER_BENCH(function, name)           \
  BENCHMARK_CAPTURE(function, name, std::string(#name)) \
      ->ArgNames({"threads", "vocab"})                  \
      ->ArgsProduct({{1, 2}, {4096, 32768}})            \
      ->Unit(benchmark::kMillisecond)                   \
      ->MeasureProcessCPUTime()                         \
      ->UseRealTime()

TWELL_TOKENIZER_BENCH(encode, gpt2);
TWELL_TOKENIZER_BENCH(encode, smollm2);
TWELL_TOKENIZER_BENCH(encode, llama3);
TWELL_TOKENIZER_BENCH(encode, qwen2);
TWELL_TOKENIZER_BENCH(training, gpt2);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
