// SPDX-License-Identifier: Apache-2.0
// twell bench: the parts that all benchmarks share.
#include "cli/bench.h"

#include "cli/commands.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"

namespace twell::cli {

void add_bench_command(Command& root, CommonOptions& common) {
  Command& bench = root.add("bench", "Speed of dense and sparse execution");
  add_bench_forward_command(bench, common);
  add_bench_decode_command(bench, common);
  add_bench_ffn_command(bench, common);
  add_bench_train_command(bench, common);
}

std::vector<int32_t> first_tokens(const CommonOptions& common, const TextOptions& text,
                                  int64_t tokens) {
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, load_config(common.checkpoint));
  std::vector<int32_t> ids;
  TextPieces pieces(common, text, tokenizer, 0);
  pieces.for_each([&](const TextPiece& piece) {
    ids.insert(ids.end(), piece.ids.begin(), piece.ids.end());
    return std::ssize(ids) < tokens;
  });
  TWELL_REQUIRE(std::ssize(ids) >= tokens,
                "the text has {} tokens, and {} are needed: give more text, or fewer or shorter "
                "sequences",
                ids.size(), tokens);
  ids.resize(static_cast<size_t>(tokens));
  return ids;
}

}  // namespace twell::cli
