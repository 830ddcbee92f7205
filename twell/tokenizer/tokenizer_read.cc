// SPDX-License-Identifier: Apache-2.0
// tokenizer.json -> TokenizerSpec: the file as a whole, its vocabulary, merges and added tokens.
#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/tokenizer_json.h"
#include "twell/tokenizer/tokenizer_pipeline.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using nlohmann::json;
using IdsByName = std::unordered_map<std::string, int32_t>;

AddedToken read_added_token(const json& value, size_t index, const json& vocab) {
  const JsonPart part(value, fmt::format("added_tokens[{}]", index));
  AddedToken token{.id = part.id("id"),
                   .content = part.string("content"),
                   .special = part.boolean("special", false)};
  token.normalized = part.boolean("normalized", !token.special);
  TWELL_REQUIRE(!token.content.empty(), "{}: \"content\" is empty", part.where());
  for (const char* option : {"single_word", "lstrip", "rstrip"}) {
    TWELL_REQUIRE(!part.boolean(option, false), "{} ({}): \"{}\" is not supported", part.where(),
                  excerpt(token.content), option);
  }
  part.finish({"id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"});
  const auto entry = vocab.find(token.content);
  token.in_vocab = entry != vocab.end();
  TWELL_REQUIRE(!token.in_vocab || *entry == token.id,
                "{}: {} has the id {}, but another one in the vocabulary", part.where(),
                excerpt(token.content), token.id);
  return token;
}

std::vector<AddedToken> read_added_tokens(const JsonPart& file, const json& vocab) {
  std::vector<AddedToken> added;
  if (file.find("added_tokens") == nullptr) return added;
  const json& list = file.array("added_tokens");
  for (size_t i = 0; i < list.size(); ++i) added.push_back(read_added_token(list[i], i, vocab));
  const auto by_id = [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; };
  std::sort(added.begin(), added.end(), by_id);
  IdsByName seen;
  for (const AddedToken& token : added) {
    TWELL_REQUIRE(seen.emplace(token.content, token.id).second, "added_tokens lists {} twice",
                  excerpt(token.content));
  }
  return added;
}

// Puts a token at its id; ids must come out as 0, 1, ... V - 1, each once.
class TokenTable {
 public:
  explicit TokenTable(size_t size) : tokens_(size), taken_(size) {}

  void put(int32_t id, std::string bytes, std::string_view name) {
    const size_t index = static_cast<size_t>(id);
    TWELL_REQUIRE(index < tokens_.size(),
                  "token {} has the id {}, but there are only {} tokens: ids must have no gaps",
                  excerpt(name), id, tokens_.size());
    TWELL_REQUIRE(!taken_[index], "token {} has the id {} of another token", excerpt(name), id);
    taken_[index] = true;
    tokens_[index] = std::move(bytes);
  }
  std::vector<std::string> take() { return std::move(tokens_); }

 private:
  std::vector<std::string> tokens_;
  std::vector<bool> taken_;
};

void read_tokens(const json& vocab, TokenizerSpec& spec) {
  const auto outside_vocab = [](const AddedToken& token) { return !token.in_vocab; };
  TokenTable table(vocab.size() + static_cast<size_t>(std::count_if(
                                      spec.added.begin(), spec.added.end(), outside_vocab)));
  IdsByName added;
  for (const AddedToken& token : spec.added) {
    added.emplace(token.content, token.id);
    table.put(token.id, token.content, token.content);
  }
  std::string bytes;
  for (const auto& [name, value] : vocab.items()) {
    if (added.count(name) != 0) continue;
    const int32_t id =
        json_to_id(value, fmt::format("model.vocab: the value of {}", excerpt(name)));
    TWELL_REQUIRE(!name.empty() && alphabet_to_bytes(name, bytes),
                  "model.vocab: {} is not spelled in the byte alphabet; only byte-level "
                  "vocabularies are supported",
                  excerpt(name));
    table.put(id, bytes, name);
  }
  spec.tokens = table.take();
}

// The two tokens of a merge: "a b", or ["a", "b"] as newer files have it.
std::pair<std::string, std::string> merge_names(const json& value, size_t rank) {
  if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  }
  TWELL_REQUIRE(value.is_string(), "model.merges[{}] is neither \"a b\" nor [\"a\", \"b\"]", rank);
  const std::string& text = value.get_ref<const std::string&>();
  const size_t space = text.find(' ');
  TWELL_REQUIRE(space != std::string::npos && text.find(' ', space + 1) == std::string::npos,
                "model.merges[{}] ({}) is not two tokens with a space between", rank,
                excerpt(text));
  return {text.substr(0, space), text.substr(space + 1)};
}

std::vector<BpeMerge> read_merges(const json& list, const TokenizerSpec& spec) {
  const IdsByName ids = mergeable_ids(spec);
  const auto id_of = [&](const std::string& bytes, const std::string& name, size_t rank) {
    const auto entry = ids.find(bytes);
    TWELL_REQUIRE(entry != ids.end(), "model.merges[{}]: {} is not in the vocabulary", rank,
                  excerpt(name));
    return entry->second;
  };
  std::vector<BpeMerge> merges;
  merges.reserve(list.size());
  BpePairMap seen(list.size());
  std::string left, right;
  for (size_t rank = 0; rank < list.size(); ++rank) {
    const auto [left_name, right_name] = merge_names(list[rank], rank);
    for (const auto& [name, bytes] : {std::pair(&left_name, &left), std::pair(&right_name, &right)})
      TWELL_REQUIRE(!name->empty() && alphabet_to_bytes(*name, *bytes),
                    "model.merges[{}]: {} is not spelled in the byte alphabet", rank,
                    excerpt(*name));
    const BpeMerge merge{id_of(left, left_name, rank), id_of(right, right_name, rank),
                         id_of(left + right, left_name + right_name, rank)};
    const int32_t index = static_cast<int32_t>(rank);
    const int32_t earlier = seen.find_or_insert(merge.left, merge.right, index);
    TWELL_REQUIRE(earlier == index, "model.merges[{}] repeats merge {}", rank, earlier);
    merges.push_back(merge);
  }
  return merges;
}

void read_model(const JsonPart& model, TokenizerSpec& spec) {
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                             "fuse_unk", "byte_fallback"}) {
    model.must_be_off(option);
  }
  spec.ignore_merges = model.boolean("ignore_merges", false);
  const json& vocab = model.object("vocab");
  read_tokens(vocab, spec);
  spec.merges = read_merges(model.array("merges"), spec);
  const std::string unknown = model.string_or_empty("unk_token");
  if (!unknown.empty()) {
    const auto entry = vocab.find(unknown);
    TWELL_REQUIRE(entry != vocab.end(), "model: \"unk_token\" {} is not in the vocabulary",
                  excerpt(unknown));
    spec.unknown_id = entry->get<int32_t>();
  }
  model.finish({"type", "unk_token", "ignore_merges", "vocab", "merges"});
}

TokenizerSpec read_file_object(const json& root) {
  const JsonPart file(root, "the file");
  const std::string version = file.string_or_empty("version");
  TWELL_REQUIRE(version.empty() || version == "1.0", "version {} is not supported (only 1.0)",
                excerpt(version));
  file.must_be_off("truncation");
  file.must_be_off("padding");
  const JsonPart model(file.object("model"), "model");
  const std::string type = model.string_or_empty("type");
  TWELL_REQUIRE(type.empty() || type == "BPE", "model type {} is not supported (only BPE)",
                excerpt(type));

  TokenizerSpec spec;
  spec.nfc = read_normalizer(file.find("normalizer"));
  spec.pre_tokenizer = read_pre_tokenizer(file.find("pre_tokenizer"));
  read_decoder(file.find("decoder"));
  spec.added = read_added_tokens(file, model.object("vocab"));
  read_model(model, spec);
  spec.bos_id = read_post_processor(file.find("post_processor"), spec);
  file.finish({"version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
               "decoder", "model"});
  return spec;
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source) {
  try {
    return read_file_object(json::parse(text.begin(), text.end()));
  } catch (const json::exception& error) {
    const std::string_view what = error.what();  // "[json.exception.parse_error.101] parse ..."
    throw InputError(fmt::format("{} is not a tokenizer.json: {}", source,
                                 excerpt(what.substr(std::min(what.find(']') + 2, what.size())))));
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", source, error.what()));
  }
}

}  // namespace twell
