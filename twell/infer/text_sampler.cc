// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/text_sampler.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/infer/generate.h"
#include "twell/infer/session_cpu.h"

namespace twell {
namespace {

// Drawn texts show what the model knows; greedy ones of a young model repeat a few words.
constexpr float kTemperature = 0.8f;

std::string as_utf8(std::string_view bytes) {
  std::string text;
  while (true) {
    const size_t good = find_invalid_utf8(bytes);
    text.append(bytes.substr(0, good));
    if (good == bytes.size()) return text;
    text += "\uFFFD";
    bytes.remove_prefix(good + 1);
  }
}

}  // namespace

TextSampler::TextSampler(const ModelConfig& config, const Tokenizer& tokenizer,
                         const std::atomic<bool>& stop, TextSamplerOptions options)
    : tokenizer_(tokenizer), stop_(stop), options_(std::move(options)) {
  for (const std::string& prompt : options_.prompts) {
    TWELL_REQUIRE(find_invalid_utf8(prompt) == prompt.size(), "--sample-prompt '{}' is not UTF-8",
                  as_utf8(prompt));
    const int64_t tokens = std::ssize(prompt_ids(config, tokenizer, prompt));
    TWELL_REQUIRE(tokens < config.context,
                  "--sample-prompt '{}' has {} tokens; the context of {} leaves no room for a new "
                  "one",
                  prompt, tokens, config.context);
    capacity_ = std::max(capacity_, std::min(config.context, tokens + options_.tokens));
  }
}

std::vector<std::string> TextSampler::texts(Context& ctx, const ModelView& model) const {
  SessionCpu session(ctx, model, {.capacity = capacity_});
  std::vector<std::string> texts;
  for (const std::string& prompt : options_.prompts) {
    const Generation written =
        generate(session, tokenizer_, prompt,
                 {.max_tokens = options_.tokens,
                  .sampler = {.temperature = kTemperature, .seed = options_.seed},
                  .cancel = &stop_});
    texts.push_back(as_utf8(written.text));
  }
  return texts;
}

}  // namespace twell
