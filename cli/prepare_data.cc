// SPDX-License-Identifier: Apache-2.0
#include "cli/prepare_data.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <ranges>

#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/rng.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kSampleStream = 0x7361'6d70'6c65;  // "sample" in ASCII

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Bytes that will be read from disk, as far as known in advance.
int64_t expected_bytes(const DataRequest& request, const TextSource& source) {
  const int64_t limit = request.options.max_bytes;
  const int64_t total = std::max<int64_t>(source.total_bytes(), 1);
  return limit > 0 ? std::min(limit, total) : total;
}

// Trains on randomly picked documents, so that a sample under the byte limit covers all of the
// data.
Tokenizer train_tokenizer(const DataRequest& request, ProgressLine& progress) {
  TextSource source(request.text({}));
  std::string first;
  TWELL_REQUIRE(source.next(first), "there is no text in {}",
                fmt::join(request.paths | std::views::transform(&fs::path::native), ", "));
  source.rewind();
  const int64_t limit = request.options.tokenizer_sample_mib << 20;
  const double share =
      static_cast<double>(limit) / static_cast<double>(expected_bytes(request, source));
  int64_t bytes = 0;
  uint64_t index = 0;
  const auto next_text = [&](std::string& text) {
    while (bytes < limit && source.next(text)) {
      check_interrupted();
      if (uniform(request.seed, kSampleStream, index++) >= share) continue;
      bytes += static_cast<int64_t>(text.size());
      return true;
    }
    return false;
  };
  BpeTrainingOptions options;
  options.vocab_size = request.vocab_size;
  options.pre_tokenizer = request.options.pre_tokenizer;
  options.threads = request.threads;
  progress.update("training a tokenizer", true);
  const auto start = Clock::now();
  Tokenizer tokenizer = train_bpe(options, next_text);
  progress.print(fmt::format("tokenizer: {} tokens, learned from {} of text in {:.1f} s",
                             tokenizer.vocab_size(), format_bytes(static_cast<double>(bytes)),
                             seconds_since(start)));
  return tokenizer;
}

// Identifies the source of the shards: equal identities give equal shards.
nlohmann::json source_identity(const DataRequest& request, int64_t total_bytes) {
  const DataOptions& options = request.options;
  nlohmann::json json = {{"bytes", total_bytes},
                         {"json_field", options.json_field},
                         {"bad_files", options.bad_files},
                         {"max_bytes", options.max_bytes},
                         {"validation_fraction", options.validation_fraction},
                         {"seed", request.seed}};
  for (const fs::path& path : request.paths) {
    json["data"].push_back(fs::absolute(path).lexically_normal().string());
  }
  if (options.tokenizer.empty()) {
    json["tokenizer"] = {{"vocab_size", request.vocab_size},
                         {"pre_tokenizer", options.pre_tokenizer},
                         {"sample_mib", options.tokenizer_sample_mib}};
  } else {
    json["tokenizer"] = Tokenizer::load(options.tokenizer).hash();
  }
  return json;
}

bool made_from(const fs::path& folder, const nlohmann::json& identity) {
  if (!holds_shards(folder) || !fs::exists(folder / "source.json")) return false;
  return nlohmann::json::parse(read_file(folder / "source.json"), nullptr, false) == identity;
}

}  // namespace

void add_source_options(Command& command, DataOptions& options) {
  command.group("Data");
  command.value("--json-field", &options.json_field, "NAME",
                "Field of .jsonl lines and .parquet rows that holds the text");
  command
      .value("--bad-files", &options.bad_files, "error|skip",
             "Unreadable, binary or non-UTF-8 files: error stops, skip leaves them out")
      .choices({"error", "skip"});
  command
      .value("--max-data-bytes", &options.max_bytes, "N",
             "Stop reading after this many bytes of text; 0: read everything")
      .at_least(0);
}

void add_tokenizer_options(Command& command, DataOptions& options) {
  command.group("Data");
  command.value("--tokenizer", &options.tokenizer, "FILE",
                "Hugging Face tokenizer.json (byte-level BPE); without it one is trained");
  command
      .value("--pre-tokenizer", &options.pre_tokenizer, "gpt2|smollm2|llama3|qwen2",
             "How a trained tokenizer cuts text into words")
      .choices({"gpt2", "smollm2", "llama3", "qwen2"});
  command
      .value("--tokenizer-sample", &options.tokenizer_sample_mib, "MIB",
             "MiB of text, at most, that a tokenizer is trained on")
      .range(1, 1 << 16);
  command
      .value("--val-fraction", &options.validation_fraction, "X",
             "Share of the documents set aside for validation")
      .range(1e-6, 0.5);
}

TextSourceOptions DataRequest::text(const LogSink& log) const {
  TWELL_REQUIRE(!paths.empty(), "no text given: add --data PATH");
  TextSourceOptions text;
  text.paths = paths;
  text.json_field = options.json_field;
  text.bad_file = options.bad_files == "skip" ? BadFile::kSkip : BadFile::kError;
  text.max_bytes = options.max_bytes;
  text.log = log;
  return text;
}

bool holds_shards(const fs::path& folder) {
  return fs::exists(folder / "manifest.json") && fs::exists(folder / "tokenizer.json");
}

int64_t shard_bytes(const DataRequest& request, const fs::path& folder) {
  if (holds_shards(folder)) {
    int64_t bytes = 0;
    for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
      if (file.path().extension() == ".bin") bytes += static_cast<int64_t>(file.file_size());
    }
    return bytes;
  }
  if (request.paths.empty()) return 0;
  // Lower estimate: English and code have about three bytes per token, more with large
  // vocabularies.
  constexpr int64_t kTextBytesPerToken = 3;
  const int64_t id_bytes = request.vocab_size <= 65536 ? 2 : 4;
  return expected_bytes(request, TextSource(request.text({}))) / kTextBytesPerToken * id_bytes;
}

PreparedData prepare_shards(const DataRequest& request, const fs::path& folder,
                            ProgressLine& progress) {
  TextSource source(request.text(progress.log_sink()));
  const nlohmann::json identity = source_identity(request, source.total_bytes());
  if (made_from(folder, identity)) {
    return {Tokenizer::load(folder / "tokenizer.json"), std::nullopt, 0.0, 0};
  }
  TWELL_REQUIRE(request.replace || !fs::exists(folder) || fs::is_empty(folder),
                "{} is in use and was not made from this data with these options; choose another "
                "folder",
                folder.string());
  Tokenizer tokenizer = request.options.tokenizer.empty()
                            ? train_tokenizer(request, progress)
                            : Tokenizer::load(request.options.tokenizer);
  TokenizeOptions options;
  options.validation_fraction = request.options.validation_fraction;
  options.seed = request.seed;
  options.threads = request.threads;
  const auto start = Clock::now();
  const double total = static_cast<double>(expected_bytes(request, source));
  options.progress = [&](int64_t done, int64_t, int64_t tokens) {
    check_interrupted();
    const double bytes = static_cast<double>(done);
    progress.update(fmt::format("tokenizing {:.0f}%  {} tokens  {:.1f} MB/s",
                                std::min(100.0, 100.0 * bytes / total),
                                format_count(static_cast<double>(tokens)),
                                bytes * 1e-6 / std::max(seconds_since(start), 1e-9)));
  };
  const ShardCounts counts = write_shards(source, tokenizer, folder, options);
  const double seconds = seconds_since(start);
  tokenizer.save(folder / "tokenizer.json");
  write_file_atomic(folder / "source.json", identity.dump(2) + "\n");
  return {std::move(tokenizer), counts, seconds, source.files_skipped()};
}

}  // namespace twell::cli
