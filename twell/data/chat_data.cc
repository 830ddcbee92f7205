// SPDX-License-Identifier: Apache-2.0
#include "twell/data/chat_data.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/data/decompress.h"
#include "twell/data/split_writer.h"
#include "twell/data/text_documents.h"
#include "twell/data/text_source.h"

namespace twell {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

constexpr size_t kLinesAtOnce = 4096;
constexpr size_t kBytesAtOnce = size_t{16} << 20;

int32_t token_of(int32_t stored) { return stored < 0 ? ~stored : stored; }

// A line's messages, and the first of them whose answers are learned.
struct Conversation {
  ordered_json messages = ordered_json::array();
  size_t learned_from = 0;
  std::string tools;  // as JSON, or empty
};

bool is_answer(const ordered_json& message) {
  return message.is_object() && message.contains("role") && message["role"] == "assistant";
}

// Messages out of a text of this role, or out of a list.
void add_messages(const ordered_json& value, const char* role, const char* key,
                  ordered_json& messages) {
  if (value.is_string()) {
    messages.push_back({{"role", role}, {"content", value}});
    return;
  }
  TWELL_REQUIRE(value.is_array(), "{} must be a text or a list of messages", key);
  for (const ordered_json& message : value) messages.push_back(message);
}

Conversation conversation_of(const std::string& line) {
  ordered_json row = parse_ordered_json(line, "the line", {.keys = JsonKeys::kLast});
  TWELL_REQUIRE(row.is_object(), "it is no JSON object");
  Conversation out;
  if (row.contains("messages")) {
    TWELL_REQUIRE(row["messages"].is_array(), "messages must be a list");
    out.messages = std::move(row["messages"]);
  } else {
    TWELL_REQUIRE(row.contains("prompt") && row.contains("completion"),
                  "it has neither messages nor prompt and completion");
    add_messages(row["prompt"], "user", "prompt", out.messages);
    out.learned_from = out.messages.size();
    add_messages(row["completion"], "assistant", "completion", out.messages);
  }
  if (row.contains("tools") && row["tools"].is_array() && !row["tools"].empty()) {
    out.tools = row["tools"].dump();
  }
  for (size_t i = 0; i < out.messages.size(); ++i) {
    const ordered_json& message = out.messages[i];
    TWELL_REQUIRE(message.is_object() && message.contains("role") && message["role"].is_string(),
                  "message {} has no role", i + 1);
  }
  while (!out.messages.empty() && !is_answer(out.messages.back())) {
    out.messages.erase(out.messages.size() - 1);
  }
  TWELL_REQUIRE(out.messages.size() > out.learned_from, "it has no answer of an assistant");
  return out;
}

// A part of a text around a byte, for messages.
std::string around(const std::string& text, size_t at) {
  constexpr size_t kBytes = 24;
  size_t begin = at, end = std::min(text.size(), at + kBytes);
  const auto inside = [&](size_t i) { return (static_cast<unsigned char>(text[i]) >> 6) == 2; };
  while (begin > 0 && begin < text.size() && inside(begin)) --begin;
  while (end < text.size() && inside(end)) --end;
  return ordered_json(text.substr(begin, end - begin)).dump();
}

// Adds the tokens of `text` up to a byte to those of its beginning, as a prompt of that length
// would have them.
class PrefixEncoder {
 public:
  PrefixEncoder(const Tokenizer& tokenizer, const std::string& text)
      : tokenizer_(tokenizer), text_(text) {}

  void advance(size_t end) {
    const std::string_view text = text_;
    std::vector<int32_t> whole = tokenizer_.encode(text.substr(0, end));
    if (whole.size() >= ids_.size() && std::equal(ids_.begin(), ids_.end(), whole.begin())) {
      ids_ = std::move(whole);
    } else {
      // Tokens would reach across the end of the prompt, where an answer begins anew.
      tokenizer_.encode(text.substr(at_, end - at_), ids_);
    }
    at_ = end;
  }
  const std::vector<int32_t>& ids() const { return ids_; }

 private:
  const Tokenizer& tokenizer_;
  const std::string& text_;
  size_t at_ = 0;
  std::vector<int32_t> ids_;
};

}  // namespace

ChatData::ChatData(Context& ctx, const ChatTemplate& chat, const Tokenizer& tokenizer,
                   const ChatDataOptions& options)
    : source_(options.file.string()), length_(options.length) {
  const fs::path name = is_compressed(options.file) ? options.file.stem() : options.file;
  TWELL_REQUIRE(name.extension() == ".jsonl",
                "{} is no file of JSON lines: chat data is a .jsonl file, also .gz, .xz or .zst",
                source_);
  TWELL_REQUIRE(fs::is_regular_file(options.file), "{} is no file", source_);
  read(ctx, chat, tokenizer, options);
  const size_t count = begins_.size() - 1;
  TWELL_REQUIRE(count > 0, "{} has no conversation to train on{}{}", source_,
                counts_.skipped > 0 ? fmt::format("; {} lines have faults", counts_.skipped) : "",
                counts_.too_long > 0
                    ? fmt::format("; in {} no answer begins within the {} tokens of a sequence",
                                  counts_.too_long, length_)
                    : "");

  // Conversations with the lowest hashes are for validation, so that copies of one are together.
  const auto bytes_of = [&](size_t i) {
    const std::span<const int32_t> ids(ids_.data() + begins_[i], ids_.data() + begins_[i + 1]);
    return std::as_bytes(ids);
  };
  std::vector<uint64_t> hashes(count);
  for (size_t i = 0; i < count; ++i) hashes[i] = crc64(bytes_of(i), options.seed);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return hashes[i]; });
  const auto wanted =
      static_cast<size_t>(std::llround(options.validation_fraction * static_cast<double>(count)));
  size_t held_out = count == 1 ? 0 : std::clamp<size_t>(wanted, 1, count - 1);
  for (size_t i = held_out; i > 0 && i < count && hashes[order[i]] == hashes[order[i - 1]];) {
    if (++i < count) held_out = i;
  }
  const auto middle = order.begin() + static_cast<std::ptrdiff_t>(held_out);
  std::vector<size_t> validation(order.begin(), middle), train(middle, order.end());
  std::ranges::sort(validation);
  std::ranges::sort(train);
  splits_[static_cast<size_t>(Split::kTrain)] = pack(train);
  splits_[static_cast<size_t>(Split::kValidation)] = pack(validation);
  counts_.conversations = {std::ssize(train), std::ssize(validation)};

  ContentHash hash;
  hash.add_bytes(std::as_bytes(std::span(ids_)));
  hash.add_bytes(std::as_bytes(std::span(begins_)));
  hash.add_bytes(std::as_bytes(std::span(validation)));
  hash_ = hash.digest();
}

void ChatData::read(Context& ctx, const ChatTemplate& chat, const Tokenizer& tokenizer,
                    const ChatDataOptions& options) {
  SkipLog skips(options.log);
  const auto skip = [&](const std::string& fault) {
    TWELL_REQUIRE(options.skip_bad_lines, "{}", fault);
    skips.skipped(fault);
    ++counts_.skipped;
  };
  DocumentOptions documents{.json_field = ""};
  documents.piece_bytes = documents.max_json_line + 1;  // a line is one piece
  if (options.skip_bad_lines) documents.on_bad_row = skip;
  const std::unique_ptr<DocumentReader> reader = DocumentReader::open(options.file, documents);
  begins_ = {0};
  std::vector<Line> lines;
  size_t bytes = 0;
  const auto finish = [&] {
    ctx.parallel_for(std::ssize(lines), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) encode(chat, tokenizer, lines[static_cast<size_t>(i)]);
    });
    for (const Line& line : lines) {
      if (line.fault.empty()) {
        take(line);
      } else {
        skip(line.fault);
      }
    }
    lines.clear();
    bytes = 0;
    if (options.check) options.check();
  };
  for (TextPiece piece; reader->next(piece);) {
    bytes += piece.text.size();
    lines.push_back({.text = std::move(piece.text), .number = piece.line});
    if (lines.size() == kLinesAtOnce || bytes > kBytesAtOnce) finish();
  }
  finish();
  skips.end();
}

// Renders and encodes a line. A fault is kept in it, because lines are encoded in parallel.
void ChatData::encode(const ChatTemplate& chat, const Tokenizer& tokenizer, Line& line) const {
  try {
    const Conversation talk = conversation_of(line.text);
    const auto render = [&](size_t messages, bool asks) {
      ordered_json part = ordered_json::array();
      for (size_t i = 0; i < messages; ++i) part.push_back(talk.messages[i]);
      const std::string text = part.dump();
      return chat.render({.messages = text,
                          .tools = talk.tools,
                          .documents = {},
                          .variables = {},
                          .add_generation_prompt = asks});
    };
    const std::string full = render(talk.messages.size(), false);
    PrefixEncoder encoder(tokenizer, full);
    std::vector<std::pair<size_t, size_t>> answers;  // message, first token
    for (size_t i = talk.learned_from; i < talk.messages.size(); ++i) {
      if (!is_answer(talk.messages[i])) continue;
      const std::string before = render(i, true);
      const auto [here, there] = std::ranges::mismatch(before, full);
      const auto at = static_cast<size_t>(here - before.begin());
      TWELL_REQUIRE(
          here == before.end(),
          "the template renders the conversation before message {} in two ways: from byte "
          "{} on as {} where the answer is asked for, as {} where it is there",
          i + 1, at, around(before, at), around(full, at));
      encoder.advance(before.size());
      answers.emplace_back(i, encoder.ids().size());
    }
    encoder.advance(full.size());
    std::vector<int32_t> ids = encoder.ids();
    // The last answer ends with the last special token, which also ends the others.
    size_t end = ids.size();
    while (end > answers.back().second && !tokenizer.is_special(ids[end - 1])) --end;
    TWELL_REQUIRE(
        end > answers.back().second,
        "the template ends an answer with no special token of the tokenizer, but with {}: "
        "the model would not learn where an answer ends",
        around(full, full.size() - std::min<size_t>(full.size(), 12)));
    const int32_t last = ids[end - 1];
    ids.resize(end);
    for (size_t a = 0; a < answers.size(); ++a) {
      const auto [message, first] = answers[a];
      const size_t limit = a + 1 < answers.size() ? answers[a + 1].second : end;
      const auto from = ids.begin() + static_cast<std::ptrdiff_t>(first);
      const auto to = ids.begin() + static_cast<std::ptrdiff_t>(limit);
      const auto stop = a + 1 < answers.size() ? std::find(from, to, last) : to - 1;
      TWELL_REQUIRE(stop != to, "message {} does not end with {}, as the last answer does",
                    message + 1, ordered_json(tokenizer.token_bytes(last)).dump());
      std::for_each(from, stop + 1, [](int32_t& id) { id = ~id; });
    }
    line.ids = std::move(ids);
  } catch (const InputError& error) {
    line.fault = fmt::format("{}: line {}: {}", source_, line.number, error.what());
  }
}

void ChatData::take(const Line& line) {
  // The last token is a target alone.
  const std::span<const int32_t> ids =
      std::span(line.ids).first(std::min(line.ids.size(), static_cast<size_t>(length_) + 1));
  if (std::ranges::none_of(ids.subspan(1), [](int32_t id) { return id < 0; })) {
    ++counts_.too_long;
    return;
  }
  if (ids.size() < line.ids.size()) ++counts_.cut;
  end_tokens_.insert(token_of(line.ids.back()));
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  begins_.push_back(std::ssize(ids_));
}

// Best fit: the longest conversations first, each into the sequence whose rest it fills best.
ChatData::Sequences ChatData::pack(const std::vector<size_t>& conversations) const {
  const auto length_of = [&](size_t i) { return begins_[i + 1] - begins_[i] - 1; };
  std::vector<size_t> longest = conversations;
  std::ranges::stable_sort(longest, std::greater(), length_of);
  std::vector<std::vector<size_t>> bins;
  std::map<int64_t, std::vector<size_t>> by_rest;
  for (const size_t i : longest) {
    const int64_t length = length_of(i);
    const auto found = by_rest.lower_bound(length);
    size_t bin = bins.size();
    int64_t rest = length_;
    if (found == by_rest.end()) {
      bins.emplace_back();
    } else {
      rest = found->first;
      bin = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) by_rest.erase(found);
    }
    bins[bin].push_back(i);
    if (rest > length) by_rest[rest - length].push_back(bin);
  }
  Sequences out;
  out.first = {0};
  size_t filler = 0;
  for (const std::vector<size_t>& bin : bins) {
    int64_t rest = length_;
    int32_t targets = 0;
    for (const size_t i : bin) {
      out.pieces.push_back({begins_[i], static_cast<int32_t>(length_of(i)), true});
      rest -= length_of(i);
      targets += static_cast<int32_t>(std::count_if(ids_.begin() + begins_[i] + 1,
                                                    ids_.begin() + begins_[i + 1],
                                                    [](int32_t id) { return id < 0; }));
    }
    while (rest > 0) {
      const size_t i = conversations[filler++ % conversations.size()];
      const int64_t length = std::min(rest, length_of(i));
      out.pieces.push_back({begins_[i], static_cast<int32_t>(length), false});
      rest -= length;
    }
    out.first.push_back(out.pieces.size());
    out.targets.push_back(targets);
  }
  return out;
}

int64_t ChatData::bytes() const {
  int64_t bytes = std::ssize(ids_) * 4 + std::ssize(begins_) * 8;
  for (const Sequences& split : splits_) {
    bytes += std::ssize(split.pieces) * static_cast<int64_t>(sizeof(Piece));
  }
  return bytes;
}

int64_t ChatData::sequences(Split split, int64_t length) const {
  TWELL_CHECK(length == length_, "sequences of {} out of conversations packed by {}", length,
              length_);
  return std::ssize(of(split).targets);
}

void ChatData::read_sequence(Split split, int64_t index, std::span<int32_t> inputs,
                             std::span<int32_t> targets) const {
  const Sequences& sequences = of(split);
  const auto at = static_cast<size_t>(index);
  size_t token = 0;
  for (size_t p = sequences.first[at]; p < sequences.first[at + 1]; ++p) {
    const Piece& piece = sequences.pieces[p];
    const int32_t* const ids = ids_.data() + piece.begin;
    for (int32_t i = 0; i < piece.length; ++i, ++token) {
      inputs[token] = token_of(ids[i]);
      targets[token] = piece.learned && ids[i + 1] < 0 ? token_of(ids[i + 1]) : -1;
    }
  }
}

void ChatData::add_documents(Split split, int64_t index, std::span<const int32_t>,
                             std::vector<int64_t>& lengths) const {
  const Sequences& sequences = of(split);
  const auto at = static_cast<size_t>(index);
  for (size_t p = sequences.first[at]; p < sequences.first[at + 1]; ++p) {
    lengths.push_back(sequences.pieces[p].length);
  }
}

int64_t ChatData::targets(Split split, int64_t index, int64_t) const {
  return of(split).targets[static_cast<size_t>(index)];
}

std::string ChatData::identity() const {
  return fmt::format("{} + {} conversations {}", counts_.conversations[0], counts_.conversations[1],
                     hash_);
}

}  // namespace twell
