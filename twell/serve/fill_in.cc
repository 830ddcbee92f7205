// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/fill_in.h"

#include <algorithm>
#include <array>

namespace twell {
namespace {

struct Names {
  const char *begin, *between, *end;  // end: null with the suffix first
  std::array<const char*, 5> stops;
};

constexpr Names kNames[] = {
    {"<|fim_prefix|>",
     "<|fim_suffix|>",
     "<|fim_middle|>",
     {"<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"}},
    {"<fim_prefix>",
     "<fim_suffix>",
     "<fim_middle>",
     {"<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", nullptr}},
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", {"<|endoftext|>", "<fim-pad>"}},
    {"\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", {"\u2581<EOT>"}},
    {"<PRE>", "<SUF>", "<MID>", {"<EOT>"}},
    {"<\uff5cfim\u2581begin\uff5c>",
     "<\uff5cfim\u2581hole\uff5c>",
     "<\uff5cfim\u2581end\uff5c>",
     {}},
    {"[SUFFIX]", "[PREFIX]", nullptr, {"[MIDDLE]"}},
};

}  // namespace

std::optional<FillInTokens> find_fill_in_tokens(const Tokenizer& tokenizer) {
  for (const Names& names : kNames) {
    FillInTokens found{.begin = tokenizer.find(names.begin),
                       .between = tokenizer.find(names.between),
                       .end = names.end == nullptr ? -1 : tokenizer.find(names.end),
                       .suffix_first = names.end == nullptr};
    if (found.begin < 0 || found.between < 0 || (found.end < 0 && !found.suffix_first)) continue;
    found.stops = {found.begin, found.between};
    if (found.end >= 0) found.stops.push_back(found.end);
    for (const char* name : names.stops) {
      const int32_t id = name == nullptr ? -1 : tokenizer.find(name);
      if (id >= 0) found.stops.push_back(id);
    }
    return found;
  }
  return std::nullopt;
}

std::vector<int32_t> fill_in_prompt(const FillInTokens& tokens, int32_t begin_token,
                                    std::span<const int32_t> prefix,
                                    std::span<const int32_t> suffix) {
  std::vector<int32_t> ids;
  const auto add = [&](std::span<const int32_t> some) {
    ids.insert(ids.end(), some.begin(), some.end());
  };
  if (begin_token >= 0 && !prefix.empty() && prefix[0] == begin_token) {
    ids.push_back(begin_token);
    prefix = prefix.subspan(1);
  }
  ids.push_back(tokens.begin);
  add(tokens.suffix_first ? suffix : prefix);
  ids.push_back(tokens.between);
  add(tokens.suffix_first ? prefix : suffix);
  if (tokens.end >= 0) ids.push_back(tokens.end);
  return ids;
}

}  // namespace twell
