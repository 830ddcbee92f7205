// SPDX-License-Identifier: Apache-2.0
#include "cli/prepare_data.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/rng.h"
#include "twell/tokenizer/end_token.h"
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
  const std::vector<std::string> paths(request.paths.begin(), request.paths.end());
  TWELL_REQUIRE(source.next(first), "there is no text in {}", fmt::join(paths, ", "));
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
  if (!request.options.end_token.empty()) options.special_tokens = {request.options.end_token};
  options.threads = request.threads;
  progress.update("training a tokenizer", true);
  const auto start = Clock::now();
  Tokenizer tokenizer = train_bpe(options, next_text);
  progress.print(fmt::format("tokenizer: {} tokens, learned from {} of text in {:.1f} s",
                             tokenizer.vocab_size(), format_bytes(static_cast<double>(bytes)),
                             seconds_since(start)));
  return tokenizer;
}

// The tokenizer, or how it will be trained: with equal text, equal ways give equal tokenizers.
nlohmann::json tokenizer_identity(const DataRequest& request) {
  const DataOptions& options = request.options;
  if (!options.tokenizer.empty()) {
    const Tokenizer tokenizer = load_with_end_token(options.tokenizer, options.end_token);
    if (!has_declared_end_token(tokenizer)) return tokenizer.hash();
    return {{"hash", tokenizer.hash()}, {"end_token", tokenizer.eos_token()}};
  }
  nlohmann::json way = {{"vocab_size", request.vocab_size},
                        {"pre_tokenizer", options.pre_tokenizer},
                        {"sample_mib", options.tokenizer_sample_mib}};
  if (!options.end_token.empty()) way["end_token"] = options.end_token;
  return way;
}

std::string progress_text(const TokenizeProgress& now, int64_t max_bytes, double seconds) {
  const auto share_of = [](int64_t part, int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1));
  };
  double share = share_of(now.bytes_read, now.total_bytes);
  if (max_bytes > 0) share = std::max(share, share_of(now.text_bytes, max_bytes));
  share = std::min(share, 1.0);
  const double share_now = share - share_of(now.kept_bytes, now.total_bytes);
  std::string text =
      fmt::format("tokenizing {:.0f}%  {} of {} parts  {} tokens  {:.1f} MB/s", 100 * share,
                  now.parts_finished, now.parts, format_count(static_cast<double>(now.tokens)),
                  static_cast<double>(now.text_bytes) * 1e-6 / std::max(seconds, 1e-9));
  if (share_now > 0) text += "  ETA " + format_duration((1 - share) / share_now * seconds);
  return text;
}

}  // namespace

void add_source_options(Command& command, DataOptions& options) {
  command.group("Data");
  options.files.declare(command);
  command
      .value("--max-data-bytes", &options.max_bytes, "N",
             "Stop reading after this many bytes of text; 0: read everything")
      .at_least(0);
}

void add_tokenizer_options(Command& command, DataOptions& options) {
  command.group("Data");
  Option& tokenizer = command.value("--tokenizer", &options.tokenizer, "FILE",
                                    "Hugging Face tokenizer.json (BPE); without it one is trained");
  command.value("--end-token", &options.end_token, "TEXT",
                "Token that ends a document (default: the one that tokenizer_config.json, "
                "config.json or generation_config.json beside the tokenizer names, else "
                "<|endoftext|> or similar)");
  command
      .choice("--pre-tokenizer", &options.pre_tokenizer, {"gpt2", "smollm2", "llama3", "qwen2"},
              "How a trained tokenizer cuts text into words")
      .excludes(tokenizer);
  command
      .value("--tokenizer-sample", &options.tokenizer_sample_mib, "MIB",
             "MiB of text, at most, that a tokenizer is trained on")
      .range(1, 1 << 16)
      .excludes(tokenizer);
  command
      .value("--val-fraction", &options.validation_fraction, "X",
             "Share of the documents set aside for validation")
      .range(1e-6, 0.5);
}

TextSourceOptions DataRequest::text(const LogSink& log) const {
  TWELL_REQUIRE(!paths.empty(), "no text given: add --data PATH");
  TextSourceOptions text = options.files.source(paths, log);
  text.max_bytes = options.max_bytes;
  return text;
}

bool holds_shards(const fs::path& folder) {
  return !folder.empty() && fs::exists(folder / "manifest.json") &&
         fs::exists(folder / "tokenizer.json");
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
  const nlohmann::json identity = tokenizer_identity(request);
  TokenizeOptions options;
  options.validation_fraction = request.options.validation_fraction;
  options.part_bytes = request.options.part_mib << 20;
  options.seed = request.seed;
  options.threads = request.threads;
  options.redo_changed = request.options.changed_files == "redo";
  if (holds_shards(folder) && ShardWriter::made(source, identity, folder, options)) {
    return {Tokenizer::load(folder / "tokenizer.json"), std::nullopt, 0.0, 0, {}};
  }
  TWELL_REQUIRE(request.replace || !fs::exists(folder) || fs::is_empty(folder),
                "{} is in use and was not made from this data with these options; choose another "
                "folder",
                folder.string());
  Clock::time_point start;
  int64_t text_bytes = 0;
  options.progress = [&](const TokenizeProgress& now) {
    check_interrupted();
    text_bytes = now.text_bytes;
    progress.update(progress_text(now, request.options.max_bytes, seconds_since(start)));
  };
  ShardWriter writer(source, identity, folder, options, request.replace);
  const auto parts = [&] {
    return fmt::format("{} of {} parts", writer.finished_parts(), writer.parts());
  };
  if (writer.finished_parts() > 0) {
    progress.print(fmt::format("going on with {} in {}", parts(), writer.work_folder().string()));
  }
  const auto say_what_is_kept = [&] {
    progress.print(fmt::format("{} are kept in {}: the same command goes on with them", parts(),
                               writer.work_folder().string()));
  };
  const fs::path saved = writer.work_folder() / "tokenizer.json";
  try {
    Tokenizer tokenizer =
        fs::exists(saved) ? Tokenizer::load(saved)
        : request.options.tokenizer.empty()
            ? train_tokenizer(request, progress)
            : load_with_end_token(request.options.tokenizer, request.options.end_token);
    if (!fs::exists(saved)) save_with_end_token(tokenizer, saved.parent_path());
    check_interrupted();
    start = Clock::now();
    const ShardCounts counts = writer.write(TokenEncoder::of(tokenizer));
    return {std::move(tokenizer), counts, seconds_since(start), text_bytes, writer.skipped()};
  } catch (const Interrupted&) {
    if (writer.finished_parts() == 0) {
      progress.print(fs::exists(saved)
                         ? fmt::format("no part was finished; the tokenizer is kept in {}: the "
                                       "same command goes on with it",
                                       writer.work_folder().string())
                         : "nothing was finished: the same command starts again");
    } else {
      say_what_is_kept();
    }
    throw;
  } catch (...) {
    if (writer.finished_parts() > 0) say_what_is_kept();
    throw;
  }
}

}  // namespace twell::cli
