// SPDX-License-Identifier: Apache-2.0
#include "cli/loading.h"
#include "cli/process.h"

#include <fmt/core.h>

#include <algorithm>

#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"

namespace twell::cli {
namespace {

// Tokens per piece: long enough that the lost context at a cut does not matter, and small in
// memory.
constexpr int64_t kShardPiece = int64_t{1} << 16;

// Truncates ids to the remaining limit and subtracts their number from it.
bool take(std::vector<int32_t>& ids, int64_t& left) {
  if (std::ssize(ids) - 1 >= left) {
    ids.resize(static_cast<size_t>(left) + 1);
    left = 0;
    return false;
  }
  left -= std::ssize(ids) - 1;
  return true;
}

int64_t text_bytes(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  int64_t bytes = 0;
  for (size_t i = 1; i < ids.size(); ++i) {
    if (!tokenizer.is_special(ids[i])) bytes += std::ssize(tokenizer.token_bytes(ids[i]));
  }
  return bytes;
}

}  // namespace

Tokenizer load_tokenizer(const std::filesystem::path& folder, const ModelConfig& config) {
  Tokenizer tokenizer = Tokenizer::load(folder / "tokenizer.json");
  TWELL_REQUIRE(tokenizer.vocab_size() <= config.vocab_size,
                "{}: tokenizer.json has {} tokens, but the model only {} (config.json vocab_size)",
                folder.string(), tokenizer.vocab_size(), config.vocab_size);
  return tokenizer;
}

void TextFileOptions::declare(Command& command) {
  command.value("--json-field", &json_field, "NAME",
                "Field of .jsonl lines and .parquet rows that holds the text");
  command.choice(
      "--bad-files", &bad_files, {"error", "skip"},
      "Unreadable, binary or non-UTF-8 files, and rows without text: error stops, skip leaves "
      "them out");
}

TextSourceOptions TextFileOptions::source(std::vector<std::filesystem::path> paths,
                                          LogSink log) const {
  return {.paths = std::move(paths),
          .json_field = json_field,
          .bad_file = bad_files == "skip" ? BadFile::kSkip : BadFile::kError,
          .log = std::move(log)};
}

void add_text_options(Command& command, CommonOptions& common, TextOptions& text) {
  Option& data = add_data_option(
      command, common,
      "Text to run on: files and folders (.txt, .jsonl, .parquet, .gz, .xz, .zst); repeatable");
  command
      .value("--shards", &text.shards, "DIR",
             "Run on the held-out split of a folder of token shards instead")
      .excludes(data);
  text.files.declare(command);
}

TextPieces::TextPieces(const CommonOptions& common, const TextOptions& text,
                       const Tokenizer& tokenizer, int64_t max_tokens)
    : tokenizer_(tokenizer),
      begin_token_(text.begin_token),
      left_(max_tokens == 0 ? INT64_MAX : max_tokens) {
  TWELL_REQUIRE(!common.data.empty() || !text.shards.empty(),
                "no text given: use --data PATH or --shards DIR");
  TWELL_REQUIRE(max_tokens >= 0, "--max-tokens must be 0 (all) or positive, got {}", max_tokens);
  if (!text.shards.empty()) {
    shards_ = std::make_unique<ShardSet>(text.shards, tokenizer);
  } else {
    source_ = std::make_unique<TextSource>(text.files.source(
        common.data,
        [](LogLevel, std::string_view message) { print_error("twell: {}\n", message); }));
  }
}

void TextPieces::for_each(const std::function<bool(const TextPiece&)>& use) {
  shards_ != nullptr ? for_each_of_shards(use) : for_each_of_files(use);
}

void TextPieces::for_each_of_shards(const std::function<bool(const TextPiece&)>& use) {
  const int64_t total = shards_->tokens(Split::kValidation);
  for (int64_t begin = 0; begin + 1 < total && left_ > 0; begin += kShardPiece) {
    TextPiece piece;
    piece.ids.resize(static_cast<size_t>(std::min(kShardPiece + 1, total - begin)));
    shards_->read(Split::kValidation, begin, piece.ids);
    take(piece.ids, left_);
    piece.bytes = text_bytes(tokenizer_, piece.ids);
    if (!use(piece)) return;
  }
}

void TextPieces::for_each_of_files(const std::function<bool(const TextPiece&)>& use) {
  std::string document;
  while (left_ > 0 && source_->next(document)) {
    TextPiece piece;
    const int32_t eos = tokenizer_.eos_token();
    const bool begins = begin_token_ && tokenizer_.bos_token() >= 0;
    if (!begins && eos >= 0) piece.ids.push_back(eos);
    tokenizer_.encode_sequence(document, piece.ids, begin_token_, false);
    if (piece.ids.size() < 2) continue;
    const bool whole = take(piece.ids, left_);
    // Without a begin token, the first token of the text serves only as context.
    piece.bytes =
        whole && (begins || eos >= 0) ? std::ssize(document) : text_bytes(tokenizer_, piece.ids);
    if (!use(piece)) return;
  }
}

}  // namespace twell::cli
