// SPDX-License-Identifier: Apache-2.0
// Converts tokenizer.json to a TokenizerSpec and back: first a reader and a writer for each part
// around the model (normalizer, pre-tokenizer, post-processor, decoder), then vocabulary, merges
// and added tokens, then the whole file.
#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/base/json_fields.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using Kind = PreTokenizerStep::Kind;
using IdsByName = std::unordered_map<std::string, int32_t>;

// ---- normalizer, pre-tokenizer, post-processor, decoder. A reader takes the part's JSON, or
// nullptr when it is null or missing, and refuses unsupported parts by name.

// The members that a Sequence has under `list`; the part itself when it is of another type.
std::vector<JsonFields> members_of(const json& part, const char* name, const char* list) {
  const JsonFields object(part, name);
  if (object.text("type") != "Sequence") return {object};
  object.finish({"type", list});
  std::vector<JsonFields> members;
  for (const json& member : object.array(list)) {
    members.emplace_back(member, fmt::format("{}.{}[{}]", name, list, members.size()));
  }
  return members;
}

// Refuses a member that is not equal to `only`, the one of its type that is supported.
void require_only(const JsonFields& part, const ordered_json& only) {
  TWELL_REQUIRE(part.value() == json(only), "{}: a {} other than {} is not supported", part.where(),
                only["type"].get<std::string>(), show(only));
}

ordered_json replace(std::string_view from, std::string_view to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

PreTokenizerStep read_split(const JsonFields& part) {
  const JsonFields pattern(part.object("pattern"), part.where() + ".pattern");
  TWELL_REQUIRE(pattern.find("Regex") != nullptr,
                "{}: a Split by other than a \"Regex\" is not supported", part.where());
  const std::string behavior = part.text("behavior");
  TWELL_REQUIRE(behavior == "Isolated", "{}: Split behavior {} is not supported (only Isolated)",
                part.where(), excerpt(behavior));
  part.must_be_off("invert");
  part.finish({"type", "pattern", "behavior"});
  pattern.finish({"Regex"});
  PreTokenizerStep step{Kind::kSplit, pattern.text("Regex")};
  try {
    const PreTokenizerRegex compiles(step.pattern);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}: {}", part.where(), excerpt(step.pattern), error.what()));
  }
  return step;
}

constexpr std::array<const char*, 4> kPrependSchemes = {"", "never", "first", "always"};

// Reads one member; returns whether it was ByteLevel, which must come last.
bool read_step(const JsonFields& part, std::vector<PreTokenizerStep>& steps) {
  const std::string type = part.text("type");
  if (type == "Split") {
    steps.push_back(read_split(part));
    return false;
  }
  if (type == "Digits") {
    const bool individual = part.boolean("individual_digits", false);
    steps.push_back({individual ? Kind::kDigits : Kind::kDigitRuns});
    part.finish({"type", "individual_digits"});
    return false;
  }
  TWELL_REQUIRE(type == "ByteLevel",
                "{}: type {} is not supported (only Sequence, Split, Digits and ByteLevel)",
                part.where(), excerpt(type));
  TWELL_REQUIRE(!part.boolean("add_prefix_space", true),
                "{}: ByteLevel with \"add_prefix_space\" is not supported", part.where());
  if (part.boolean("use_regex", true)) steps.push_back({Kind::kGpt2});
  part.finish({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  return true;
}

ordered_json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

ordered_json write_step(const PreTokenizerStep& step) {
  if (step.kind == Kind::kSplit) {
    return {{"type", "Split"},
            {"pattern", {{"Regex", step.pattern}}},
            {"behavior", "Isolated"},
            {"invert", false}};
  }
  return {{"type", "Digits"}, {"individual_digits", step.kind == Kind::kDigits}};
}

// Reads one list of a template, e.g. [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}].
int32_t read_template(const JsonFields& part, const TokenizerSpec& spec) {
  part.finish({"type", "single", "pair", "special_tokens"});
  const json& pieces = part.array("single");
  const auto refuse = [&] {
    throw InputError(fmt::format(
        "{}: a template other than the text, or one token and the text, is not supported",
        part.where()));
  };
  if (pieces.empty() || pieces.size() > 2) refuse();
  const JsonFields text(pieces.back(), part.where() + ".single");
  if (text.find("Sequence") == nullptr) refuse();
  if (pieces.size() == 1) return -1;
  const JsonFields first(pieces.front(), part.where() + ".single[0]");
  if (first.find("SpecialToken") == nullptr) refuse();
  const std::string name =
      JsonFields(first.object("SpecialToken"), first.where() + ".SpecialToken").text("id");
  const auto token = std::find_if(spec.added.begin(), spec.added.end(),
                                  [&](const AddedToken& added) { return added.content == name; });
  TWELL_REQUIRE(token != spec.added.end(), "{}: {} is not an added token", first.where(),
                excerpt(name));
  return token->id;
}

// Reads NFC and, for SentencePiece tokenizers, members that set the marks for spaces.
void read_normalizer(const json* normalizer, TokenizerSpec& spec) {
  if (normalizer == nullptr) return;
  for (const JsonFields& part : members_of(*normalizer, "normalizer", "normalizers")) {
    const std::string type = part.text("type");
    if (type == "NFC") {
      part.finish({"type"});
      spec.nfc = true;
    } else if (type == "Prepend" && spec.sentence_piece) {
      TWELL_REQUIRE(part.text("prepend") == kSpaceMark, "{}: Prepend of {} is not supported",
                    part.where(), excerpt(part.text("prepend")));
      part.finish({"type", "prepend"});
      spec.sentence_piece->prepend = true;
    } else if (type == "Replace" && spec.sentence_piece) {
      require_only(part, replace(" ", kSpaceMark));
      spec.sentence_piece->replace = true;
    } else {
      throw InputError(
          fmt::format("normalizer {} is not supported (only null, NFC, and with byte_fallback "
                      "Prepend and Replace)",
                      excerpt(type)));
    }
  }
}

ordered_json write_normalizer(const TokenizerSpec& spec) {
  ordered_json members = ordered_json::array();
  if (spec.nfc) members.push_back({{"type", "NFC"}});
  if (spec.sentence_piece && spec.sentence_piece->prepend) {
    members.push_back({{"type", "Prepend"}, {"prepend", kSpaceMark}});
  }
  if (spec.sentence_piece && spec.sentence_piece->replace) {
    members.push_back(replace(" ", kSpaceMark));
  }
  if (members.empty()) return nullptr;
  if (members.size() == 1) return members[0];
  return {{"type", "Sequence"}, {"normalizers", members}};
}

// Reads Metaspace; the part may be missing.
void read_sentence_piece_pre_tokenizer(const json* part, SentencePieceSpec& out) {
  using Metaspace = SentencePieceSpec::Metaspace;
  if (part == nullptr) return;
  const JsonFields object(*part, "pre_tokenizer");
  const std::string type = object.text("type");
  TWELL_REQUIRE(type == "Metaspace",
                "pre_tokenizer: type {} is not supported with byte_fallback (only Metaspace)",
                excerpt(type));
  TWELL_REQUIRE(object.text("replacement") == kSpaceMark,
                "pre_tokenizer: Metaspace with another replacement than U+2581 is not supported");
  // Files from before "prepend_scheme" have "add_prefix_space".
  const bool prepend = object.boolean("add_prefix_space", true);
  const std::string scheme = object.text("prepend_scheme", prepend ? "always" : "never");
  const auto known = std::find(kPrependSchemes.begin(), kPrependSchemes.end(), scheme);
  TWELL_REQUIRE(known != kPrependSchemes.end() && !scheme.empty(),
                "pre_tokenizer: the prepend_scheme {} is not supported", excerpt(scheme));
  out.metaspace = static_cast<Metaspace>(known - kPrependSchemes.begin());
  out.split = object.boolean("split", true);
  object.finish({"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
}

ordered_json write_sentence_piece_pre_tokenizer(const SentencePieceSpec& spec) {
  if (spec.metaspace == SentencePieceSpec::Metaspace::kNone) return nullptr;
  return {{"type", "Metaspace"},
          {"replacement", kSpaceMark},
          {"prepend_scheme", kPrependSchemes[static_cast<size_t>(spec.metaspace)]},
          {"split", spec.split}};
}

std::vector<PreTokenizerStep> read_pre_tokenizer(const json* part) {
  TWELL_REQUIRE(part != nullptr, "there is no pre_tokenizer; only byte-level ones are supported");
  const std::vector<JsonFields> members = members_of(*part, "pre_tokenizer", "pretokenizers");
  TWELL_REQUIRE(!members.empty(), "pre_tokenizer: without ByteLevel it is not supported");
  std::vector<PreTokenizerStep> steps;
  for (const JsonFields& member : members) {
    const bool ends = read_step(member, steps);
    TWELL_REQUIRE(ends || members.size() > 1, "{}: without ByteLevel it is not supported",
                  member.where());
    TWELL_REQUIRE(ends == (&member == &members.back()),
                  "{}: a Sequence is only supported with one ByteLevel, at its end",
                  member.where());
  }
  return steps;
}

ordered_json write_pre_tokenizer(const std::vector<PreTokenizerStep>& steps) {
  const bool use_regex = !steps.empty() && steps.back().kind == Kind::kGpt2;
  ordered_json members = ordered_json::array();
  for (size_t i = 0; i + use_regex < steps.size(); ++i) members.push_back(write_step(steps[i]));
  members.push_back(byte_level(use_regex));
  if (members.size() == 1) return members[0];
  return {{"type", "Sequence"}, {"pretokenizers", members}};
}

int32_t read_post_processor(const json* part, const TokenizerSpec& spec) {
  if (part == nullptr) return -1;
  int32_t bos = -1;
  for (const JsonFields& member : members_of(*part, "post_processor", "processors")) {
    const std::string inner = member.text("type");
    if (inner == "ByteLevel") {
      member.finish({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      continue;
    }
    TWELL_REQUIRE(inner == "TemplateProcessing",
                  "{}: type {} is not supported (only ByteLevel and TemplateProcessing)",
                  member.where(), excerpt(inner));
    TWELL_REQUIRE(bos < 0, "{}: a second template is not supported", member.where());
    bos = read_template(member, spec);
  }
  return bos;
}

ordered_json write_post_processor(const TokenizerSpec& spec) {
  if (spec.bos_id < 0) return nullptr;
  const std::string name = token_name(spec, spec.bos_id);
  const auto piece = [](const char* kind, const std::string& id, int type_id) {
    return ordered_json{{kind, {{"id", id}, {"type_id", type_id}}}};
  };
  const ordered_json bos = piece("SpecialToken", name, 0);
  return {
      {"type", "TemplateProcessing"},
      {"single", ordered_json::array({bos, piece("Sequence", "A", 0)})},
      {"pair", ordered_json::array({bos, piece("Sequence", "A", 0), piece("SpecialToken", name, 1),
                                    piece("Sequence", "B", 1)})},
      {"special_tokens",
       {{name,
         {{"id", name},
          {"ids", ordered_json::array({spec.bos_id})},
          {"tokens", ordered_json::array({name})}}}}}};
}

void read_decoder(const json* part) {
  TWELL_REQUIRE(part != nullptr, "there is no decoder; only ByteLevel is supported");
  const JsonFields object(*part, "decoder");
  const std::string type = object.text("type");
  TWELL_REQUIRE(type == "ByteLevel", "decoder {} is not supported (only ByteLevel)", excerpt(type));
  object.finish({"type", "add_prefix_space", "trim_offsets", "use_regex"});
}

// The members of this Sequence are the only ones that are supported; Strip removes a leading space.
ordered_json write_sentence_piece_decoder(bool strip_space) {
  ordered_json members = ordered_json::array(
      {replace(kSpaceMark, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  if (strip_space) {
    members.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  return {{"type", "Sequence"}, {"decoders", members}};
}

void read_sentence_piece_decoder(const json* part, SentencePieceSpec& out) {
  TWELL_REQUIRE(part != nullptr, "there is no decoder; with byte_fallback a Sequence is needed");
  const std::string type = JsonFields(*part, "decoder").text("type");
  TWELL_REQUIRE(type == "Sequence",
                "decoder {} is not supported with byte_fallback (only a Sequence)", excerpt(type));
  const std::vector<JsonFields> members = members_of(*part, "decoder", "decoders");
  out.strip_space = members.size() == 4;
  const ordered_json supported = write_sentence_piece_decoder(out.strip_space)["decoders"];
  TWELL_REQUIRE(members.size() == supported.size(), "decoder: a Sequence of {} is not supported",
                members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    const auto only = supported[i]["type"].get<std::string>();
    TWELL_REQUIRE(members[i].text("type") == only, "{}: {} is not supported there (only {})",
                  members[i].where(), excerpt(members[i].text("type")), only);
    require_only(members[i], supported[i]);
  }
}

// ---- vocabulary, merges, added tokens

// Reads an id: a non-negative integer below 2^31 - 1.
int32_t read_id(const json& value, const std::string& where) {
  const bool usable = value.is_number_unsigned() &&
                      value.get<uint64_t>() < uint64_t{std::numeric_limits<int32_t>::max()};
  TWELL_REQUIRE(usable, "{} is not a token id (an integer from 0 to 2^31 - 2)", where);
  return value.get<int32_t>();
}

AddedToken read_added_token(const json& value, size_t index, const json& vocab) {
  const JsonFields part(value, fmt::format("added_tokens[{}]", index));
  AddedToken token{.id = read_id(part.unsigned_integer("id"), part.where() + ": \"id\""),
                   .content = part.text("content"),
                   .special = part.boolean("special", false)};
  token.normalized = part.boolean("normalized", !token.special);
  TWELL_REQUIRE(!token.content.empty(), "{}: \"content\" is empty", part.where());
  token.lstrip = part.boolean("lstrip", false);
  token.rstrip = part.boolean("rstrip", false);
  token.single_word = part.boolean("single_word", false);
  part.finish({"id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"});
  const auto entry = vocab.find(token.content);
  token.in_vocab = entry != vocab.end();
  TWELL_REQUIRE(!token.in_vocab || *entry == token.id,
                "{}: {} has the id {}, but another one in the vocabulary", part.where(),
                excerpt(token.content), token.id);
  return token;
}

// Tokens outside the vocabulary get the ids behind it in the order of the list, as `tokenizers`
// numbers them, whatever their ids in the file.
std::vector<AddedToken> read_added_tokens(const JsonFields& file, const json& vocab) {
  std::vector<AddedToken> added;
  if (file.find("added_tokens") == nullptr) return added;
  const json& list = file.array("added_tokens");
  auto next_id = static_cast<int32_t>(vocab.size());
  IdsByName seen;
  for (size_t i = 0; i < list.size(); ++i) {
    AddedToken& token = added.emplace_back(read_added_token(list[i], i, vocab));
    if (!token.in_vocab) token.id = next_id++;
    TWELL_REQUIRE(seen.emplace(token.content, token.id).second, "added_tokens lists {} twice",
                  excerpt(token.content));
  }
  return added;
}

// Converts a name of the file to its form in TokenizerSpec::tokens; false when it has none.
bool spell(const TokenizerSpec& spec, const std::string& name, std::string& out) {
  if (!spec.sentence_piece) return !name.empty() && alphabet_to_bytes(name, out);
  out = name;
  return !name.empty();
}

void read_tokens(const json& vocab, TokenizerSpec& spec) {
  const auto outside_vocab = [](const AddedToken& token) { return !token.in_vocab; };
  const size_t size = vocab.size() + static_cast<size_t>(std::count_if(
                                         spec.added.begin(), spec.added.end(), outside_vocab));
  spec.tokens.resize(size);
  std::vector<bool> taken(size);
  const auto put = [&](int32_t id, const std::string& bytes, std::string_view name) {
    const size_t index = static_cast<size_t>(id);
    TWELL_REQUIRE(index < size,
                  "token {} has the id {}, but there are only {} tokens: ids must have no gaps",
                  excerpt(name), id, size);
    TWELL_REQUIRE(!taken[index], "token {} has the id {} of another token", excerpt(name), id);
    taken[index] = true;
    spec.tokens[index] = bytes;
  };
  IdsByName added;
  for (const AddedToken& token : spec.added) {
    added.emplace(token.content, token.id);
    put(token.id, token.content, token.content);
  }
  std::string bytes;
  for (const auto& [name, value] : vocab.items()) {
    if (added.count(name) != 0) continue;
    const int32_t id = read_id(value, fmt::format("model.vocab: the value of {}", excerpt(name)));
    if (!spell(spec, name, bytes)) {
      throw InputError(
          fmt::format("model.vocab: {} is not spelled in the byte alphabet; only byte-level "
                      "vocabularies and those with byte_fallback are supported",
                      excerpt(name)));
    }
    put(id, bytes, name);
  }
}

// The two tokens of a merge, written "a b" or, in newer files, ["a", "b"].
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
      TWELL_REQUIRE(spell(spec, *name, *bytes),
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

void read_model(const JsonFields& model, TokenizerSpec& spec) {
  for (const char* option :
       {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"}) {
    // With byte_fallback no character is unknown, so fuse_unk has no effect.
    if (spec.sentence_piece && std::string_view(option) == "fuse_unk") continue;
    model.must_be_off(option);
  }
  spec.ignore_merges = model.boolean("ignore_merges", false);
  const json& vocab = model.object("vocab");
  read_tokens(vocab, spec);
  for (int byte = 0; spec.sentence_piece && byte < 256; ++byte) {
    const std::string name = fmt::format("<0x{:02X}>", byte);
    TWELL_REQUIRE(vocab.contains(name), "model: \"byte_fallback\" without the token {}", name);
  }
  spec.merges = read_merges(model.array("merges"), spec);
  const std::string unknown = model.text("unk_token", "");
  if (!unknown.empty()) {
    const auto entry = vocab.find(unknown);
    TWELL_REQUIRE(entry != vocab.end(), "model: \"unk_token\" {} is not in the vocabulary",
                  excerpt(unknown));
    spec.unknown_id = entry->get<int32_t>();
  }
  model.finish(
      {"type", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
}

TokenizerSpec read_file_object(const json& root) {
  const JsonFields file(root, "the file");
  const std::string version = file.text("version", "");
  TWELL_REQUIRE(version.empty() || version == "1.0", "version {} is not supported (only 1.0)",
                excerpt(version));
  file.must_be_off("truncation");
  file.must_be_off("padding");
  const JsonFields model(file.object("model"), "model");
  const std::string type = model.text("type", "");
  TWELL_REQUIRE(type.empty() || type == "BPE", "model type {} is not supported (only BPE)",
                excerpt(type));

  TokenizerSpec spec;
  if (model.boolean("byte_fallback", false)) spec.sentence_piece.emplace();
  read_normalizer(file.find("normalizer"), spec);
  if (spec.sentence_piece) {
    read_sentence_piece_pre_tokenizer(file.find("pre_tokenizer"), *spec.sentence_piece);
    read_sentence_piece_decoder(file.find("decoder"), *spec.sentence_piece);
  } else {
    spec.pre_tokenizer = read_pre_tokenizer(file.find("pre_tokenizer"));
    read_decoder(file.find("decoder"));
  }
  spec.added = read_added_tokens(file, model.object("vocab"));
  read_model(model, spec);
  spec.bos_id = read_post_processor(file.find("post_processor"), spec);
  file.finish({"version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
               "decoder", "model"});
  return spec;
}

std::string json_string(const std::string& text) { return ordered_json(text).dump(); }

ordered_json added_tokens(const TokenizerSpec& spec) {
  ordered_json list = ordered_json::array();
  for (const AddedToken& token : spec.added) {
    list.push_back({{"id", token.id},
                    {"content", token.content},
                    {"single_word", token.single_word},
                    {"lstrip", token.lstrip},
                    {"rstrip", token.rstrip},
                    {"normalized", token.normalized},
                    {"special", token.special}});
  }
  return list;
}

// The vocabulary's names by id; empty for added tokens outside the vocabulary.
std::vector<std::string> vocabulary_names(const TokenizerSpec& spec) {
  std::vector<std::string> names;
  names.reserve(spec.tokens.size());
  for (const std::string& bytes : spec.tokens) {
    names.push_back(spec.sentence_piece ? bytes : bytes_to_alphabet(bytes));
  }
  for (const AddedToken& token : spec.added) {
    names[static_cast<size_t>(token.id)] = token.in_vocab ? token.content : std::string();
  }
  return names;
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source) {
  const json file = parse_json(text, source);
  try {
    return read_file_object(file);
  } catch (const json::exception& error) {
    const std::string_view what = error.what();  // "[json.exception.parse_error.101] parse ..."
    throw InputError(fmt::format("{} is not a tokenizer.json: {}", source,
                                 excerpt(what.substr(std::min(what.find(']') + 2, what.size())))));
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", source, error.what()));
  }
}

std::string write_tokenizer_json(const TokenizerSpec& spec) {
  const std::vector<std::string> names = vocabulary_names(spec);
  const auto name_of = [&](int32_t id) -> const std::string& {
    return names[static_cast<size_t>(id)];
  };
  const auto field = [](const char* name, const ordered_json& value) {
    return fmt::format("  \"{}\": {},\n", name, value.dump());
  };
  const ordered_json unknown =
      spec.unknown_id < 0 ? ordered_json() : ordered_json(token_name(spec, spec.unknown_id));
  std::string out = "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  out += field("added_tokens", added_tokens(spec));
  out += field("normalizer", write_normalizer(spec));
  const bool marks = spec.sentence_piece.has_value();
  out += field("pre_tokenizer", marks ? write_sentence_piece_pre_tokenizer(*spec.sentence_piece)
                                      : write_pre_tokenizer(spec.pre_tokenizer));
  out += field("post_processor", write_post_processor(spec));
  out += field("decoder", marks ? write_sentence_piece_decoder(spec.sentence_piece->strip_space)
                                : byte_level(true));
  out += "  \"model\": {\n  \"type\": \"BPE\",\n";
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    out += field(option, nullptr);
  }
  out += field("unk_token", unknown);
  out += field("fuse_unk", marks);
  out += field("byte_fallback", marks);
  out += field("ignore_merges", spec.ignore_merges);

  // Writes the names one by one: inserting into an ordered_json object searches all earlier names.
  out += "  \"vocab\": {";
  const char* separator = "\n";
  for (size_t id = 0; id < names.size(); ++id) {
    if (names[id].empty()) continue;
    out += fmt::format("{}    {}: {}", separator, json_string(names[id]), id);
    separator = ",\n";
  }
  out += "\n  },\n  \"merges\": [";
  separator = "\n";
  for (const BpeMerge& merge : spec.merges) {
    const std::string pair = name_of(merge.left) + " " + name_of(merge.right);
    out += fmt::format("{}    {}", separator, json_string(pair));
    separator = ",\n";
  }
  out += "\n  ]\n  }\n}\n";
  return out;
}

}  // namespace twell
