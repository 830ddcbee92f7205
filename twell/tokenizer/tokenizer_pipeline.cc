// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer_pipeline.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/tokenizer_json.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using Kind = PreTokenizerStep::Kind;

std::string part_name(std::string_view list, size_t index) {
  return fmt::format("{}[{}]", list, index);
}

PreTokenizerStep read_split(const JsonPart& part) {
  const JsonPart pattern(part.object("pattern"), part.where() + ".pattern");
  TWELL_REQUIRE(pattern.find("Regex") != nullptr,
                "{}: a Split by other than a \"Regex\" is not supported", part.where());
  const std::string behavior = part.string("behavior");
  TWELL_REQUIRE(behavior == "Isolated", "{}: Split behavior {} is not supported (only Isolated)",
                part.where(), excerpt(behavior));
  part.must_be_off("invert");
  part.finish({"type", "pattern", "behavior"});
  pattern.finish({"Regex"});
  PreTokenizerStep step{Kind::kSplit, pattern.string("Regex")};
  try {
    const PreTokenizerRegex compiles(step.pattern);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}: {}", part.where(), excerpt(step.pattern), error.what()));
  }
  return step;
}

// Reads one member; returns whether it was the ByteLevel that has to come last.
bool read_step(const json& value, const std::string& where, std::vector<PreTokenizerStep>& steps) {
  const JsonPart part(value, where);
  const std::string type = part.string("type");
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
                "{}: type {} is not supported (only Sequence, Split, Digits and ByteLevel)", where,
                excerpt(type));
  TWELL_REQUIRE(!part.boolean("add_prefix_space", true),
                "{}: ByteLevel with \"add_prefix_space\" is not supported", where);
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

// One list of a template, e.g. [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}].
int32_t read_template(const JsonPart& part, const TokenizerSpec& spec) {
  part.finish({"type", "single", "pair", "special_tokens"});
  const json& pieces = part.array("single");
  const auto refuse = [&] {
    throw InputError(fmt::format(
        "{}: a template other than the text, or one token and the text, is not supported",
        part.where()));
  };
  if (pieces.empty() || pieces.size() > 2) refuse();
  const JsonPart text(pieces.back(), part.where() + ".single");
  if (text.find("Sequence") == nullptr) refuse();
  if (pieces.size() == 1) return -1;
  const JsonPart first(pieces.front(), part.where() + ".single[0]");
  if (first.find("SpecialToken") == nullptr) refuse();
  const std::string name =
      JsonPart(first.object("SpecialToken"), first.where() + ".SpecialToken").string("id");
  const auto token = std::find_if(spec.added.begin(), spec.added.end(),
                                  [&](const AddedToken& added) { return added.content == name; });
  TWELL_REQUIRE(token != spec.added.end(), "{}: {} is not an added token", first.where(),
                excerpt(name));
  return token->id;
}

}  // namespace

bool read_normalizer(const json* part) {
  if (part == nullptr) return false;
  const JsonPart object(*part, "normalizer");
  const std::string type = object.string("type");
  if (type == "NFC") {
    object.finish({"type"});
    return true;
  }
  TWELL_REQUIRE(type == "Sequence", "normalizer {} is not supported (only null and NFC)",
                excerpt(type));
  object.finish({"type", "normalizers"});
  bool nfc = false;
  for (const json& member : object.array("normalizers")) {
    const std::string inner = JsonPart(member, "normalizer.normalizers").string("type");
    TWELL_REQUIRE(inner == "NFC", "normalizer {} is not supported (only null and NFC)",
                  excerpt(inner));
    nfc = true;
  }
  return nfc;
}

ordered_json write_normalizer(bool nfc) {
  if (nfc) return {{"type", "NFC"}};
  return nullptr;
}

std::vector<PreTokenizerStep> read_pre_tokenizer(const json* part) {
  TWELL_REQUIRE(part != nullptr, "there is no pre_tokenizer; only byte-level ones are supported");
  const JsonPart object(*part, "pre_tokenizer");
  std::vector<PreTokenizerStep> steps;
  if (object.string("type") != "Sequence") {
    TWELL_REQUIRE(read_step(*part, object.where(), steps),
                  "pre_tokenizer: without ByteLevel it is not supported");
    return steps;
  }
  object.finish({"type", "pretokenizers"});
  const json& members = object.array("pretokenizers");
  for (size_t i = 0; i < members.size(); ++i) {
    const std::string where = part_name("pre_tokenizer.pretokenizers", i);
    TWELL_REQUIRE(read_step(members[i], where, steps) == (i + 1 == members.size()),
                  "{}: a Sequence is only supported with one ByteLevel, at its end", where);
  }
  TWELL_REQUIRE(!members.empty(), "pre_tokenizer: without ByteLevel it is not supported");
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
  const JsonPart object(*part, "post_processor");
  const std::string type = object.string("type");
  json members = json::array({*part});
  if (type == "Sequence") {
    object.finish({"type", "processors"});
    members = object.array("processors");
  }
  int32_t bos = -1;
  for (size_t i = 0; i < members.size(); ++i) {
    const JsonPart member(members[i], type == "Sequence" ? part_name("post_processor.processors", i)
                                                         : "post_processor");
    const std::string inner = member.string("type");
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
  const JsonPart object(*part, "decoder");
  const std::string type = object.string("type");
  TWELL_REQUIRE(type == "ByteLevel", "decoder {} is not supported (only ByteLevel)", excerpt(type));
  object.finish({"type", "add_prefix_space", "trim_offsets", "use_regex"});
}

ordered_json write_decoder() { return byte_level(true); }

std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec) {
  std::vector<bool> left_out(spec.tokens.size(), false);
  std::string bytes;
  for (const AddedToken& token : spec.added) {
    const bool reads_the_same =
        token.in_vocab && alphabet_to_bytes(token.content, bytes) && bytes == token.content;
    if (!reads_the_same) left_out[static_cast<size_t>(token.id)] = true;
  }
  std::unordered_map<std::string, int32_t> ids;
  ids.reserve(spec.tokens.size());
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!left_out[id]) ids.emplace(spec.tokens[id], static_cast<int32_t>(id));
  }
  return ids;
}

std::string token_name(const TokenizerSpec& spec, int32_t id) {
  const std::string& bytes = spec.tokens[static_cast<size_t>(id)];
  const bool added = std::any_of(spec.added.begin(), spec.added.end(),
                                 [&](const AddedToken& token) { return token.id == id; });
  return added ? bytes : bytes_to_alphabet(bytes);
}

}  // namespace twell
