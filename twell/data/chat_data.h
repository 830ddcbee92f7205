// SPDX-License-Identifier: Apache-2.0
// Conversations to train on: JSON lines, rendered by a chat template, with targets on the
// assistant's answers alone.
//
// A line is an object with "messages", a list of objects as chat templates take them, or with
// "prompt" and "completion", two texts or two such lists; "tools", where it is there, goes to the
// template. What is learned are the tokens of each answer of an assistant (of a completion, its own
// alone), up to and with the special token that ends it; what follows the last answer is left out.
// An answer begins where the conversation before it, rendered with add_generation_prompt, ends. It
// ends with the special token that ends the conversation's last answer. A line whose conversation
// does not begin with that rendering, or whose answers end with no special token, has a fault.
//
// Conversations are packed into sequences, each whole and with attention to itself alone, its
// positions beginning at 0. A conversation that is longer than a sequence is cut at its end, and
// left out where no answer begins before the cut. The rest of a sequence is filled with beginnings
// of conversations without targets, so that sparsity is measured and trained on nothing but text.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/log.h"
#include "twell/chat_template/chat_template.h"
#include "twell/data/training_data.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct ChatDataOptions {
  std::filesystem::path file;         // .jsonl, also .gz, .xz, .zst
  int64_t length = 0;                 // tokens of a sequence
  double validation_fraction = 0.01;  // of the conversations, at least one of several
  uint64_t seed = 0;                  // of the choice for validation
  bool skip_bad_lines = false;        // report and count them instead of stopping
  LogSink log;                        // names the first few of them
  std::function<void()> check;        // called now and then; what it throws ends the reading
};

struct ChatCounts {
  std::array<int64_t, kSplits> conversations{};
  int64_t cut = 0;       // of them, cut at the end of a sequence
  int64_t too_long = 0;  // left out, because no answer begins in time
  int64_t skipped = 0;   // lines with a fault
};

class ChatData : public TrainingData {
 public:
  // InputError names the file, the line and the fault; also when no conversation is left.
  ChatData(Context& ctx, const ChatTemplate& chat, const Tokenizer& tokenizer,
           const ChatDataOptions& options);

  const ChatCounts& counts() const { return counts_; }
  // The special tokens that end answers.
  const std::set<int32_t>& end_tokens() const { return end_tokens_; }
  int64_t bytes() const;  // in memory

  int64_t tokens(Split split) const override { return sequences(split, length_) * length_; }
  int64_t sequences(Split split, int64_t length) const override;
  void read_sequence(Split split, int64_t index, std::span<int32_t> inputs,
                     std::span<int32_t> targets) const override;
  void add_documents(Split split, int64_t index, std::span<const int32_t> inputs,
                     std::vector<int64_t>& lengths) const override;
  int64_t targets(Split split, int64_t index, int64_t length) const override;
  std::string identity() const override;

 private:
  // Tokens [begin, begin + length) of ids_ as inputs, each with the next one as its target.
  struct Piece {
    int64_t begin;
    int32_t length;
    bool learned;  // false: without targets
  };
  struct Sequences {
    std::vector<Piece> pieces;
    std::vector<size_t> first;     // [sequences + 1] in pieces
    std::vector<int32_t> targets;  // [sequences]
  };
  struct Line {
    std::string text;
    int64_t number = 0;
    std::vector<int32_t> ids;  // as in ids_
    std::string fault;
  };
  void read(Context& ctx, const ChatTemplate& chat, const Tokenizer& tokenizer,
            const ChatDataOptions& options);
  void encode(const ChatTemplate& chat, const Tokenizer& tokenizer, Line& line) const;
  void take(const Line& line);
  Sequences pack(const std::vector<size_t>& conversations) const;
  const Sequences& of(Split split) const { return splits_[static_cast<size_t>(split)]; }

  std::string source_;
  int64_t length_;
  // Conversation after conversation. A token that is learned is stored as its complement.
  std::vector<int32_t> ids_;
  std::vector<int64_t> begins_;  // of conversations in ids_, and the end
  std::set<int32_t> end_tokens_;
  ChatCounts counts_;
  std::array<Sequences, kSplits> splits_;
  std::string hash_;
};

}  // namespace twell
