// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/utf8.h"
#include "twell/tokenizer/bpe.h"
#include "twell/tokenizer/end_token.h"
#include "twell/tokenizer/normalizer.h"
#include "twell/tokenizer/pre_tokenizer.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

// ---- Caches of the ids of recent pre-tokens: text repeats its words, ruled lines and indents.

// Caches short words in a direct-mapped table of cache lines: no allocation per word, and a
// colliding word replaces the older one.
class WordCache {
 public:
  static constexpr size_t kLongestWord = 30;
  static constexpr size_t kMostIds = 8;

  WordCache() : slots_(kSlots) {}

  struct Slot {
    uint8_t length = 0;  // bytes of the word; 0 for an empty slot
    uint8_t count = 0;   // number of its ids
    std::array<char, kLongestWord> word;
    std::array<int32_t, kMostIds> ids;

    bool holds(std::string_view text) const {
      return length == text.size() && std::memcmp(word.data(), text.data(), text.size()) == 0;
    }
    void set(std::string_view text, std::span<const int32_t> values) {
      length = static_cast<uint8_t>(text.size());
      count = static_cast<uint8_t>(values.size());
      std::copy(text.begin(), text.end(), word.begin());
      std::copy(values.begin(), values.end(), ids.begin());
    }
  };
  static_assert(sizeof(Slot) == 64);

  // The slot for this word of 1 to kLongestWord bytes, which may hold another word.
  Slot& slot_of(std::string_view word) { return slots_[hash(word) % kSlots]; }

 private:
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB, to stay in a core's private cache

  template <typename T>
  static uint64_t load(const char* data) {
    T value;
    std::memcpy(&value, data, sizeof(value));
    return value;
  }
  static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
    return hash ^ hash >> 32;
  }
  static uint64_t hash(std::string_view word) {
    const char* data = word.data();
    const size_t size = word.size();
    const uint64_t seed = size;
    if (size >= 8) {
      uint64_t h = mix(seed, load<uint64_t>(data));
      for (size_t i = 8; i + 8 < size; i += 8) h = mix(h, load<uint64_t>(data + i));
      return mix(h, load<uint64_t>(data + size - 8));
    }
    if (size >= 4) {
      return mix(seed, load<uint32_t>(data) << 32 | load<uint32_t>(data + size - 4));
    }
    const auto byte = [&](size_t i) {
      return static_cast<uint64_t>(static_cast<uint8_t>(data[i]));
    };
    return mix(seed, byte(0) << 16 | byte(size / 2) << 8 | byte(size - 1));
  }

  std::vector<Slot> slots_;
};

// Caches long words: runs of spaces, dashes and the like. A text has few distinct ones.
class LongWordCache {
 public:
  static constexpr size_t kLongestWord = 512;

  // Returns nullptr when the word is not cached.
  const std::vector<int32_t>* find(std::string_view word) const {
    const auto entry = ids_.find(word);
    return entry == ids_.end() ? nullptr : &entry->second;
  }
  void set(std::string_view word, std::span<const int32_t> ids) {
    if (ids_.size() == kMostWords) ids_.clear();
    ids_.emplace(word, std::vector<int32_t>(ids.begin(), ids.end()));
  }

 private:
  static constexpr size_t kMostWords = 4096;  // at most 10 MiB of ids
  std::unordered_map<std::string, std::vector<int32_t>, WordHash, std::equal_to<>> ids_;
};

// Working memory and word caches of one encode() call, kept for later calls.
struct TokenizerWorkspace {
  WordCache words;
  LongWordCache long_words;
  Bpe::Scratch bpe;
  PreTokenizer::Scratch regex;
  std::string normalized, spaced, marked;  // after NFC, normalizer's, pre-tokenizer's marks
  std::vector<int32_t> symbols;            // of a word, for SentencePiece tokenizers
};

// Lends each caller a separate workspace, so that encode() can run on many threads at once.
class TokenizerWorkspacePool {
 public:
  // Destroying the pointer gives the workspace back.
  auto take() {
    const auto give_back = [this](TokenizerWorkspace* workspace) {
      const std::lock_guard lock(mutex_);
      idle_.emplace_back(workspace);
    };
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) idle_.push_back(std::make_unique<TokenizerWorkspace>());
    std::unique_ptr<TokenizerWorkspace, decltype(give_back)> taken(idle_.back().release(),
                                                                   give_back);
    idle_.pop_back();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<TokenizerWorkspace>> idle_;
};

// ---- Added tokens.

// Finds added tokens in a text: the leftmost match, and the longest of those that start there. Of
// equal contents the one added first is found.
class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin = 0, end = 0;
    int32_t id = -1;
  };

  bool empty() const { return nodes_.size() == 1; }
  void add(std::string_view content, int32_t id) {
    uint32_t node = 0;
    for (const char c : content) {
      const auto [child, is_new] =
          nodes_[node].children.try_emplace(c, static_cast<uint32_t>(nodes_.size()));
      node = child->second;
      if (is_new) nodes_.emplace_back();
    }
    if (nodes_[node].id < 0) nodes_[node].id = id;
    starts_[static_cast<uint8_t>(content[0])] = true;
  }
  // Finds the first match at or after `from`; returns false when there is none.
  bool find(std::string_view text, size_t from, Match& match) const {
    for (size_t begin = from; begin < text.size(); ++begin) {
      if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
      match.id = -1;
      uint32_t node = 0;
      for (size_t i = begin; i < text.size(); ++i) {
        const auto child = nodes_[node].children.find(text[i]);
        if (child == nodes_[node].children.end()) break;
        node = child->second;
        if (nodes_[node].id >= 0) match = {begin, i + 1, nodes_[node].id};
      }
      if (match.id >= 0) return true;
    }
    return false;
  }

 private:
  // A trie over bytes; node 0 is the root.
  struct Node {
    int32_t id = -1;                    // id of the token that ends here, or -1
    std::map<char, uint32_t> children;  // node by byte
  };

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> starts_{};  // whether some token begins with the byte
};

// ---- Ids and decoded bytes of a vocabulary.

using IdsByName = std::unordered_map<std::string, int32_t>;

std::string byte_token_name(size_t byte) { return fmt::format("<0x{:02X}>", byte); }

std::array<int32_t, 256> byte_ids(const TokenizerSpec& spec, const IdsByName& mergeable) {
  std::array<int32_t, 256> ids;
  for (size_t byte = 0; byte < ids.size(); ++byte) {
    const auto entry = mergeable.find(
        spec.sentence_piece ? byte_token_name(byte) : std::string(1, static_cast<char>(byte)));
    ids[byte] = entry == mergeable.end() ? spec.unknown_id : entry->second;
  }
  return ids;
}

void replace_all(std::string_view text, std::string_view from, std::string_view to,
                 std::string& out) {
  size_t done = 0;
  for (size_t at; (at = text.find(from, done)) != std::string_view::npos; done = at + from.size()) {
    out.append(text, done, at - done).append(to);
  }
  out.append(text, done);
}

// The bytes of text that each token of a SentencePiece vocabulary decodes to.
std::vector<std::string> decoded_tokens(const TokenizerSpec& spec,
                                        const std::array<int32_t, 256>& bytes) {
  std::vector<std::string> decoded(spec.tokens.size());
  for (size_t id = 0; id < decoded.size(); ++id) {
    replace_all(spec.tokens[id], kSpaceMark, " ", decoded[id]);
  }
  for (size_t byte = 0; byte < bytes.size(); ++byte) {
    decoded[static_cast<size_t>(bytes[byte])] = std::string(1, static_cast<char>(byte));
  }
  return decoded;
}

// Bytes of white space that the text starts or ends with.
size_t white_space_at_start(std::string_view text) {
  size_t size = 0;
  while (size < text.size()) {
    const Character next = first_character(text.substr(size));
    if (!is_white_space(next.code)) break;
    size += next.size;
  }
  return size;
}

size_t white_space_at_end(std::string_view text) {
  size_t begin = text.size();
  for (size_t i = begin; i > 0 && begin - i < 4; --i) {
    const size_t size = begin - i + 1;
    const Character last = first_character(text.substr(i - 1, size));
    if (last.size == size && is_white_space(last.code)) begin = i - 1;
  }
  return text.size() - begin;
}

// Whether the text starts, or ends, with a character of a word.
bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_character(first_character(text).code);
}

bool ends_with_word(std::string_view text) {
  for (size_t size = 1; size <= std::min<size_t>(text.size(), 4); ++size) {
    const Character last = first_character(text.substr(text.size() - size));
    if (last.code >= 0 && last.size == size) return is_word_character(last.code);
  }
  return false;
}

// How an added token is found, as a bit mask by id.
constexpr uint8_t kLeftStrip = 1, kRightStrip = 2, kSingleWord = 4;

// Appends the ids of the added tokens in text and calls encode(piece) for the text between them.
// The search goes on at a token's end, in the white space that it absorbs too: `tokenizers` finds
// tokens of white space there although they overlap.
template <typename Encode>
void split_at_added(const AddedTokenMatcher& matcher, const std::vector<uint8_t>& flags,
                    std::string_view text, std::vector<int32_t>& out, const Encode& encode) {
  size_t done = 0;
  size_t space_end = 0;  // end of the white space last absorbed, which is one stretch
  AddedTokenMatcher::Match match;
  for (size_t from = 0; !matcher.empty() && matcher.find(text, from, match);) {
    from = match.end;
    const uint8_t found = flags[static_cast<size_t>(match.id)];
    if ((found & kSingleWord) != 0 &&
        (ends_with_word(text.substr(0, match.begin)) || starts_with_word(text.substr(match.end)))) {
      continue;
    }
    if ((found & kLeftStrip) != 0) {
      match.begin = std::max(match.begin, done);
      match.begin -= white_space_at_end(text.substr(done, match.begin - done));
    }
    if ((found & kRightStrip) != 0) {
      if (match.end >= space_end) {
        space_end = match.end + white_space_at_start(text.substr(match.end));
      }
      match.end = space_end;
    }
    if (match.begin > match.end) continue;  // `tokenizers` itself fails there
    if (match.begin > done) encode(text.substr(done, match.begin - done));
    if (match.begin < match.end) out.push_back(match.id);  // else all of it was absorbed before
    done = match.end;
  }
  if (done < text.size()) encode(text.substr(done));
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerSpec spec_in)
      : spec(std::move(spec_in)),
        mergeable(mergeable_ids(spec)),
        kinds(spec.tokens.size(), Kind::kPlain),
        flags(spec.tokens.size(), 0),
        bytes(byte_ids(spec, mergeable)),
        bpe(bytes, spec.merges),
        pre_tokenizer(spec.pre_tokenizer) {
    TokenizerWorkspace workspace;
    for (const AddedToken& token : spec.added) {
      added.emplace(token.content, token.id);
      kinds[static_cast<size_t>(token.id)] = token.special ? Kind::kSpecial : Kind::kAdded;
      flags[static_cast<size_t>(token.id)] =
          static_cast<uint8_t>((token.lstrip ? kLeftStrip : 0) | (token.rstrip ? kRightStrip : 0) |
                               (token.single_word ? kSingleWord : 0));
    }
    for (const bool special : {true, false}) {  // special tokens have precedence
      for (const AddedToken& token : spec.added) {
        if (token.special != special) continue;
        if (token.normalized) {
          in_normalized.add(normalized(token.content, workspace), token.id);
        } else {
          as_given.add(token.content, token.id);
        }
      }
    }
    if (!spec.sentence_piece) return;
    decoded = decoded_tokens(spec, bytes);
    for (const AddedToken& token : spec.added) {
      if (!token.normalized) continue;
      std::string& text = decoded[static_cast<size_t>(token.id)];
      text.clear();
      replace_all(normalized(token.content, workspace), kSpaceMark, " ", text);
    }
    characters.assign(0x110000, -1);
    for (const auto& [name, id] : mergeable) {
      if (name.empty()) continue;
      const auto [code, size] = first_character(name);
      if (code >= 0 && size == name.size()) characters[static_cast<size_t>(code)] = id;
    }
  }

  // Normalizes the text between added tokens.
  std::string_view normalized(std::string_view text, TokenizerWorkspace& workspace) const {
    if (spec.nfc) text = normalize_nfc(text, workspace.normalized);
    if (!spec.sentence_piece || text.empty()) return text;
    const SentencePieceSpec& marks = *spec.sentence_piece;
    if (!marks.prepend && !marks.replace) return text;
    workspace.spaced = marks.prepend ? kSpaceMark : "";
    if (marks.replace) {
      replace_all(text, " ", kSpaceMark, workspace.spaced);
    } else {
      workspace.spaced += text;
    }
    return workspace.spaced;
  }

  // at_start: whether the piece starts the whole text.
  void encode_marked(std::string_view text, bool at_start, TokenizerWorkspace& workspace,
                     std::vector<int32_t>& out) const {
    using Metaspace = SentencePieceSpec::Metaspace;
    const SentencePieceSpec& marks = *spec.sentence_piece;
    if (marks.metaspace != Metaspace::kNone) {
      const bool begins_with_mark = text.starts_with(' ') || text.starts_with(kSpaceMark);
      const bool prepend = marks.metaspace == Metaspace::kAlways ||
                           (marks.metaspace == Metaspace::kFirst && at_start);
      workspace.marked = prepend && !begins_with_mark ? kSpaceMark : "";
      replace_all(text, " ", kSpaceMark, workspace.marked);
      text = workspace.marked;
    }
    while (marks.split && !text.empty()) {
      const size_t end = std::min(text.find(kSpaceMark, 1), text.size());
      encode_word(text.substr(0, end), workspace, out);
      text.remove_prefix(end);
    }
    if (!text.empty()) encode_word(text, workspace, out);
  }

  // Characters without a token, and bytes that are not UTF-8, become byte tokens.
  void append_symbols(std::string_view word, std::vector<int32_t>& symbols) const {
    while (!word.empty()) {
      const Utf8Stretch stretch = next_utf8_stretch(word);
      for (size_t i = 0; i < stretch.size;) {
        const auto [code, size] = first_character(word.substr(i));
        const int32_t id = code >= 0 ? characters[static_cast<size_t>(code)] : int32_t{-1};
        if (id >= 0) symbols.push_back(id);
        for (size_t end = i + size; i < end; ++i) {
          if (id < 0) symbols.push_back(bytes[static_cast<uint8_t>(word[i])]);
        }
      }
      word.remove_prefix(stretch.size);
    }
  }

  void encode_piece(std::string_view text, bool at_start, TokenizerWorkspace& workspace,
                    std::vector<int32_t>& out) const {
    if (spec.sentence_piece) return encode_marked(text, at_start, workspace, out);
    pre_tokenizer.split(text, workspace.regex,
                        [&](std::string_view word) { encode_word(word, workspace, out); });
  }

  void encode_word(std::string_view word, TokenizerWorkspace& workspace,
                   std::vector<int32_t>& out) const {
    if (word.size() > WordCache::kLongestWord) return encode_long_word(word, workspace, out);
    WordCache::Slot& slot = workspace.words.slot_of(word);
    if (slot.holds(word)) {
      out.insert(out.end(), slot.ids.begin(), slot.ids.begin() + slot.count);
      return;
    }
    const size_t before = out.size();
    merge_word(word, workspace, out);
    const std::span<const int32_t> ids = std::span<const int32_t>(out).subspan(before);
    if (ids.size() <= WordCache::kMostIds) slot.set(word, ids);
  }

  void encode_long_word(std::string_view word, TokenizerWorkspace& workspace,
                        std::vector<int32_t>& out) const {
    if (word.size() > LongWordCache::kLongestWord) return merge_word(word, workspace, out);
    const std::vector<int32_t>* known = workspace.long_words.find(word);
    if (known != nullptr) {
      out.insert(out.end(), known->begin(), known->end());
      return;
    }
    const size_t before = out.size();
    merge_word(word, workspace, out);
    workspace.long_words.set(word, std::span<const int32_t>(out).subspan(before));
  }

  void merge_word(std::string_view word, TokenizerWorkspace& workspace,
                  std::vector<int32_t>& out) const {
    if (spec.ignore_merges) {
      const auto whole = mergeable.find(std::string(word));
      if (whole != mergeable.end() && kinds[static_cast<size_t>(whole->second)] == Kind::kPlain) {
        out.push_back(whole->second);
        return;
      }
    }
    if (!spec.sentence_piece) return bpe.encode(word, workspace.bpe, out);
    workspace.symbols.clear();
    append_symbols(word, workspace.symbols);
    bpe.merge(workspace.symbols, workspace.bpe, out);
  }

  enum class Kind : uint8_t { kPlain, kAdded, kSpecial };

  TokenizerSpec spec;
  IdsByName mergeable;              // ids of plain tokens by TokenizerSpec::tokens
  IdsByName added;                  // ids of added tokens by their content
  std::vector<Kind> kinds;          // by id
  std::vector<uint8_t> flags;       // by id, for split_at_added
  AddedTokenMatcher as_given;       // finds added tokens in the text as given
  AddedTokenMatcher in_normalized;  // finds added tokens in the normalized text
  std::array<int32_t, 256> bytes;   // ids of single bytes
  Bpe bpe;
  // The following are used by SentencePiece tokenizers only.
  std::vector<int32_t> characters;   // id by code point; -1: none
  std::vector<std::string> decoded;  // bytes of text by id
  PreTokenizer pre_tokenizer;
  mutable TokenizerWorkspacePool workspaces;
};

Tokenizer::Tokenizer(TokenizerSpec spec) : impl_(std::make_shared<Impl>(std::move(spec))) {}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  return load_with_end_token(path, {});
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& source) {
  return Tokenizer(parse_tokenizer_json(json, source));
}

std::string Tokenizer::to_json() const { return write_tokenizer_json(impl_->spec); }

void Tokenizer::save(const std::filesystem::path& path) const {
  write_file_atomic(path, to_json());
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool allow_special) const {
  std::vector<int32_t> ids;
  encode(text, ids, allow_special);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& out, bool allow_special) const {
  static const AddedTokenMatcher kNone;
  const Impl& impl = *impl_;
  const auto lent = impl.workspaces.take();
  TokenizerWorkspace& workspace = *lent;
  const AddedTokenMatcher& as_given = allow_special ? impl.as_given : kNone;
  const AddedTokenMatcher& in_normalized = allow_special ? impl.in_normalized : kNone;
  split_at_added(as_given, impl.flags, text, out, [&](std::string_view piece) {
    const bool at_start = piece.data() == text.data();
    const std::string_view normalized = impl.normalized(piece, workspace);
    split_at_added(in_normalized, impl.flags, normalized, out, [&](std::string_view part) {
      impl.encode_piece(part, at_start && part.data() == normalized.data(), workspace, out);
    });
  });
}

void Tokenizer::encode_sequence(std::string_view text, std::vector<int32_t>& out, bool begin_token,
                                bool allow_special) const {
  if (begin_token && bos_token() >= 0) out.push_back(bos_token());
  encode(text, out, allow_special);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string text;
  for (const int32_t id : ids) {
    const std::string_view bytes = token_bytes(id);
    if (!skip_special || !is_special(id)) text += bytes;
  }
  const auto& marks = impl_->spec.sentence_piece;
  if (marks && marks->strip_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  TWELL_REQUIRE(id >= 0 && id < vocab_size(), "there is no token {}; ids go from 0 to {}", id,
                vocab_size() - 1);
  return (impl_->spec.sentence_piece ? impl_->decoded
                                     : impl_->spec.tokens)[static_cast<size_t>(id)];
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() &&
         impl_->kinds[static_cast<size_t>(id)] == Impl::Kind::kSpecial;
}

int64_t Tokenizer::vocab_size() const { return std::ssize(impl_->spec.tokens); }

int32_t Tokenizer::find(std::string_view token) const {
  const std::string name(token);
  const auto added = impl_->added.find(name);
  if (added != impl_->added.end()) return added->second;
  std::string spelled = name;
  if (impl_->spec.sentence_piece) {
    spelled.clear();
    replace_all(name, " ", kSpaceMark, spelled);
  }
  const auto plain = impl_->mergeable.find(spelled);
  if (plain != impl_->mergeable.end()) return plain->second;
  const bool one_byte = impl_->spec.sentence_piece && name.size() == 1;
  return one_byte ? impl_->bytes[static_cast<uint8_t>(name[0])] : -1;
}

int32_t Tokenizer::eos_token() const {
  if (impl_->spec.eos_id >= 0) return impl_->spec.eos_id;
  for (const std::string_view name : kEosNames) {
    const auto added = impl_->added.find(std::string(name));
    if (added != impl_->added.end()) return added->second;
  }
  return -1;
}

int32_t Tokenizer::bos_token() const { return impl_->spec.bos_id; }

bool Tokenizer::lossless() const {
  const auto& ids = impl_->bytes;
  return !impl_->spec.nfc && !impl_->spec.sentence_piece &&
         std::none_of(ids.begin(), ids.end(),
                      [&](int32_t id) { return id < 0 || id == impl_->spec.unknown_id; });
}

std::string Tokenizer::hash() const { return hash_tokenizer(impl_->spec); }

}  // namespace twell
