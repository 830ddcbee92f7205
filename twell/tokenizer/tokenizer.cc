// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/tokenizer/normalizer.h"
#include "twell/tokenizer/tokenizer_added.h"
#include "twell/tokenizer/tokenizer_pipeline.h"
#include "twell/tokenizer/tokenizer_spec.h"
#include "twell/tokenizer/tokenizer_workspace.h"

namespace twell {
namespace {

using IdsByName = std::unordered_map<std::string, int32_t>;

constexpr std::array<std::string_view, 7> kEosNames = {
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"};

std::array<int32_t, 256> byte_ids(const TokenizerSpec& spec, const IdsByName& mergeable) {
  std::array<int32_t, 256> ids;
  for (size_t byte = 0; byte < ids.size(); ++byte) {
    const auto entry = mergeable.find(std::string(1, static_cast<char>(byte)));
    ids[byte] = entry == mergeable.end() ? spec.unknown_id : entry->second;
  }
  return ids;
}

// Appends the ids of the added tokens in text and calls encode(piece) for what is between them.
template <typename Encode>
void split_at_added(const AddedTokenMatcher& matcher, std::string_view text,
                    std::vector<int32_t>& out, const Encode& encode) {
  size_t done = 0;
  AddedTokenMatcher::Match match;
  while (!matcher.empty() && matcher.find(text, done, match)) {
    if (match.begin > done) encode(text.substr(done, match.begin - done));
    out.push_back(match.id);
    done = match.end;
  }
  if (done < text.size()) encode(text.substr(done));
}

}  // namespace

std::span<const std::string_view> eos_names() { return kEosNames; }

struct Tokenizer::Impl {
  explicit Impl(TokenizerSpec spec_in);

  void encode_piece(std::string_view text, TokenizerWorkspace& workspace,
                    std::vector<int32_t>& out) const;
  void encode_word(std::string_view word, TokenizerWorkspace& workspace,
                   std::vector<int32_t>& out) const;
  void encode_long_word(std::string_view word, TokenizerWorkspace& workspace,
                        std::vector<int32_t>& out) const;
  void merge_word(std::string_view word, TokenizerWorkspace& workspace,
                  std::vector<int32_t>& out) const;

  enum class Kind : uint8_t { kPlain, kAdded, kSpecial };

  TokenizerSpec spec;
  IdsByName mergeable;         // plain tokens by their bytes
  IdsByName added;             // added tokens by their content
  std::vector<Kind> kinds;     // by id
  AddedTokenMatcher as_given;  // added tokens looked for in the text as given
  AddedTokenMatcher in_nfc;    // and those looked for in the normalized text
  Bpe bpe;
  PreTokenizer pre_tokenizer;
  mutable TokenizerWorkspacePool workspaces;
};

Tokenizer::Impl::Impl(TokenizerSpec spec_in)
    : spec(std::move(spec_in)),
      mergeable(mergeable_ids(spec)),
      kinds(spec.tokens.size(), Kind::kPlain),
      bpe(byte_ids(spec, mergeable), spec.merges),
      pre_tokenizer(spec.pre_tokenizer) {
  std::string buffer;
  for (const AddedToken& token : spec.added) {
    added.emplace(token.content, token.id);
    kinds[static_cast<size_t>(token.id)] = token.special ? Kind::kSpecial : Kind::kAdded;
    if (token.normalized && spec.nfc) {
      in_nfc.add(normalize_nfc(token.content, buffer), token.id);
    } else {
      as_given.add(token.content, token.id);
    }
  }
}

void Tokenizer::Impl::encode_piece(std::string_view text, TokenizerWorkspace& workspace,
                                   std::vector<int32_t>& out) const {
  pre_tokenizer.split(text, workspace.regex,
                      [&](std::string_view word) { encode_word(word, workspace, out); });
}

void Tokenizer::Impl::encode_word(std::string_view word, TokenizerWorkspace& workspace,
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

void Tokenizer::Impl::encode_long_word(std::string_view word, TokenizerWorkspace& workspace,
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

void Tokenizer::Impl::merge_word(std::string_view word, TokenizerWorkspace& workspace,
                                 std::vector<int32_t>& out) const {
  if (spec.ignore_merges) {
    const auto whole = mergeable.find(std::string(word));
    if (whole != mergeable.end() && kinds[static_cast<size_t>(whole->second)] == Kind::kPlain) {
      out.push_back(whole->second);
      return;
    }
  }
  bpe.encode(word, workspace.bpe, out);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer TokenizerAccess::make(TokenizerSpec spec) {
  return Tokenizer(std::make_unique<Tokenizer::Impl>(std::move(spec)));
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  return parse(read_file(path), path.string());
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& source) {
  return TokenizerAccess::make(parse_tokenizer_json(json, source));
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
  const TokenizerWorkspacePool::Lease lease(impl.workspaces);
  TokenizerWorkspace& workspace = *lease;
  const auto encode_piece = [&](std::string_view piece) {
    impl.encode_piece(piece, workspace, out);
  };
  split_at_added(allow_special ? impl.as_given : kNone, text, out, [&](std::string_view piece) {
    if (impl.spec.nfc) piece = normalize_nfc(piece, workspace.normalized);
    split_at_added(allow_special ? impl.in_nfc : kNone, piece, out, encode_piece);
  });
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string text;
  for (const int32_t id : ids) {
    const std::string_view bytes = token_bytes(id);
    if (!skip_special || !is_special(id)) text += bytes;
  }
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  TWELL_REQUIRE(id >= 0 && id < vocab_size(), "there is no token {}; ids go from 0 to {}", id,
                vocab_size() - 1);
  return impl_->spec.tokens[static_cast<size_t>(id)];
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
  const auto plain = impl_->mergeable.find(name);
  return plain == impl_->mergeable.end() ? -1 : plain->second;
}

int32_t Tokenizer::eos_token() const {
  for (const std::string_view name : eos_names()) {
    const auto added = impl_->added.find(std::string(name));
    if (added != impl_->added.end()) return added->second;
  }
  return -1;
}

int32_t Tokenizer::bos_token() const { return impl_->spec.bos_id; }

bool Tokenizer::lossless() const {
  const std::array<int32_t, 256> ids = byte_ids(impl_->spec, impl_->mergeable);
  return !impl_->spec.nfc && std::none_of(ids.begin(), ids.end(), [&](int32_t id) {
    return id < 0 || id == impl_->spec.unknown_id;
  });
}

std::string Tokenizer::hash() const { return hash_tokenizer(impl_->spec); }

}  // namespace twell
