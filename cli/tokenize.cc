// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "cli/commands.h"
#include "cli/config_file.h"
#include "cli/prepare_data.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/model/config.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace {

constexpr const char* kTokenizeFooter = R"(
OUT receives the shards with their manifest.json, tokenizer.json, and source.json, which names the
options and the size and time of every file. 'twell train --shards OUT' trains on them; it checks
their sizes and every token it reads, --verify every byte.

The files are cut into parts (--part-mib), which are tokenized on all threads. They stand in
OUT.partial until all are finished; when the command is interrupted or fails, the same command goes
on with the finished ones. The shards do not depend on --threads, nor on interruptions.

Examples:
  twell tokenize --data docs/ --out shards/ --vocab-size 8192
  twell tokenize --data fineweb/sample/10BT --tokenizer tokenizer.json --out shards/
  twell tokenize --data web.jsonl.zst --json-field content --tokenizer tokenizer.json --out shards/
  twell tokenize --verify shards/)";

struct TokenizeFlags {
  DataOptions data;
  int64_t vocab_size = preset_config("tiny").vocab_size;
  std::filesystem::path verify;
};

void print_statistics(const PreparedData& prepared) {
  const ShardCounts& counts = *prepared.written;
  const int64_t tokens = counts.train_tokens + counts.validation_tokens;
  const double bytes = static_cast<double>(counts.text_bytes);
  fmt::print("documents        {}\n", counts.documents);
  fmt::print("text             {}\n", format_bytes(bytes));
  fmt::print("tokens           {}  ({} training, {} validation)\n", tokens, counts.train_tokens,
             counts.validation_tokens);
  fmt::print("bytes per token  {:.3f}\n",
             bytes / static_cast<double>(std::max<int64_t>(tokens, 1)));
  fmt::print("vocabulary       {}\n", prepared.tokenizer.vocab_size());
  fmt::print("speed            {:.1f} MB/s\n", static_cast<double>(prepared.text_bytes) * 1e-6 /
                                                   std::max(prepared.tokenize_seconds, 1e-9));
  const TextSkips& skipped = prepared.skipped;
  if (skipped.files > 0) fmt::print("files skipped    {}\n", skipped.files);
  if (skipped.rows > 0) fmt::print("rows skipped     {}\n", skipped.rows);
}

int verify(const std::filesystem::path& folder) {
  const ShardSet shards(folder, Tokenizer::load(folder / "tokenizer.json"));
  shards.verify();
  fmt::print("{}: {} training and {} validation tokens, every checksum right\n", folder.string(),
             shards.tokens(Split::kTrain), shards.tokens(Split::kValidation));
  return kExitOk;
}

int tokenize(const TokenizeFlags& flags, const CommonOptions& common) {
  if (!flags.verify.empty()) return verify(flags.verify);
  TWELL_REQUIRE(!common.out.empty(), "no output folder given: add --out DIR");
  stop_on_signals();
  ProgressLine progress(10.0);
  const PreparedData prepared =
      prepare_shards({flags.data, common.data, flags.vocab_size, common.seed, common.threads},
                     common.out, progress);
  progress.finish();
  if (prepared.written) {
    print_statistics(prepared);
  } else {
    fmt::print("{} already holds the shards of this data\n", common.out.string());
  }
  return kExitOk;
}

}  // namespace

void add_tokenize_command(Command& root, CommonOptions& common) {
  const auto flags = std::make_shared<TokenizeFlags>();
  Command& command = root.add("tokenize", "Turn text into shards of token ids");
  command.runs([flags, &common] { return tokenize(*flags, common); });
  command.config_file();
  Option& data = add_data_option(
      command, common,
      "Text: files and folders of text, .jsonl or .parquet, also .gz, .xz, .zst; repeatable");
  Option& out = add_out_option(command, common, "Folder of the shards");
  command
      .value("--verify", &flags->verify, "DIR",
             "Instead: read the shards of this folder and check them against the checksums of "
             "their manifest")
      .excludes(data)
      .excludes(out)
      .not_in_files();
  add_source_options(command, flags->data);
  add_tokenizer_options(command, flags->data);
  command.value("--vocab-size", &flags->vocab_size, "V", "Vocabulary of a trained tokenizer")
      .range(257, 1 << 24)
      .excludes(command.at("tokenizer"));
  command
      .value("--part-mib", &flags->data.part_mib, "MIB",
             "MiB of files on disk in a part, the unit that is kept when the command is "
             "interrupted; a larger .parquet file is cut at its row groups, another is a part")
      .range(1, 1 << 20);
  command.choice("--changed-files", &flags->data.changed_files, {"refuse", "redo"},
                 "Files that have changed since a finished part of an interrupted command was made "
                 "from them: refuse stops, redo makes the part again");
  add_seed_option(command, common);
  add_threads_option(command, common);
  command.footer(kTokenizeFooter);
}

}  // namespace twell::cli
