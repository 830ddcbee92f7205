// SPDX-License-Identifier: Apache-2.0
// Writing shards in bytes of text per second, with a trivial tokenizer (one token per byte) and a
// trained one. Reading one shuffled training sequence in tokens per second.
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_folder.h"
#include "twell/data/batch_sampler.h"

namespace twell {
namespace {

// Documents of a few KB; their words are drawn from a vocabulary of 30,000.
std::string corpus(size_t bytes) {
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    // The square makes some words far more frequent than others, as in prose.
    const double u = uniform(1, 1, i);
    const uint64_t word = static_cast<uint64_t>(u * u * 30000);
    const auto letters = philox(2, 2, word);
    for (uint32_t k = 0; k < 2 + letters[0] % 8; ++k) {
      text += static_cast<char>('a' + (letters[1 + k % 3] >> (2 * k)) % 26);
    }
    text += i % 500 == 499 ? '\0' : i % 17 == 16 ? '\n' : ' ';
  }
  return text;
}

TokenEncoder byte_encoder() {
  return {.encode =
              [](std::string_view text, std::vector<int32_t>& ids) {
                ids.reserve(ids.size() + text.size());
                for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
              },
          .token_bytes = [](int32_t) { return 1; },
          .eos = 256,
          .vocab_size = 257,
          .hash = "bytes"};
}

void write(benchmark::State& state, const TokenEncoder& encoder) {
  const TempFolder folder;
  const std::string text = corpus(size_t{32} << 20);
  TextSource source({.paths = {folder.write("text", text)}});
  for (auto _ : state) write_shards(source, encoder, folder.path() / "shards", {});
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text.size()));
}

void write_bytes(benchmark::State& state) { write(state, byte_encoder()); }
BENCHMARK(write_bytes)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);

void write_bpe(benchmark::State& state) {
  bool given = false;
  const Tokenizer tokenizer = train_bpe({.vocab_size = 8192}, [&](std::string& text) {
    if (given) return false;
    text = corpus(size_t{4} << 20);
    return given = true;
  });
  write(state, TokenEncoder::of(tokenizer));
}
BENCHMARK(write_bpe)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);

void sample(benchmark::State& state) {
  const TempFolder folder;
  TextSource source({.paths = {folder.write("text", corpus(size_t{32} << 20))}});
  write_shards(source, byte_encoder(), folder.path() / "shards", {});
  const ShardSet shards(folder.path() / "shards", "bytes", 257);
  const int64_t length = state.range(0);
  const BatchSampler sampler(shards, Split::kTrain, length, 1, true);
  std::vector<int32_t> inputs(static_cast<size_t>(length)), targets(static_cast<size_t>(length));
  int64_t index = 0;
  for (auto _ : state) sampler.sequence(index++, inputs, targets);
  state.SetItemsProcessed(state.iterations() * length);
}
BENCHMARK(sample)->Arg(256)->Arg(2048);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
