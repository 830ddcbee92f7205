// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generate.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/base/json_fields.h"
#include "twell/infer/sampler.h"

namespace twell {

std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token) {
  std::vector<int32_t> ids;
  tokenizer.encode_sequence(prompt, ids, begin_token);
  if (ids.empty()) {
    TWELL_REQUIRE(tokenizer.eos_token() >= 0,
                  "the prompt is empty and the tokenizer has no end-of-text token to start from");
    ids.push_back(tokenizer.eos_token());
  }
  for (const int32_t id : ids) {
    TWELL_REQUIRE(id < config.vocab_size,
                  "the tokenizer gives token {}, but the model has {} tokens", id,
                  config.vocab_size);
  }
  return ids;
}

std::vector<int32_t> stop_tokens(const std::filesystem::path& checkpoint, const ModelConfig& config,
                                 const Tokenizer& tokenizer,
                                 const std::vector<std::string>& named) {
  std::set<int64_t> tokens(config.more_eos_tokens.begin(), config.more_eos_tokens.end());
  tokens.insert(config.eos_token);
  const auto field = [&](const char* file, const char* name) -> nlohmann::json {
    const std::filesystem::path path = checkpoint / file;
    if (!std::filesystem::exists(path)) return {};
    return parse_json_field(read_file(path), name, path.string(), {.keys = JsonKeys::kLast});
  };
  const nlohmann::json ids = field("generation_config.json", "eos_token_id");
  for (const nlohmann::json& id :
       ids.is_array() || ids.is_null() ? ids : nlohmann::json::array({ids})) {
    TWELL_REQUIRE(id.is_number_integer(),
                  "{}: eos_token_id must be the id of a token or a list of them, got {}",
                  (checkpoint / "generation_config.json").string(), show(ids));
    tokens.insert(id.get<int64_t>());
  }
  nlohmann::json end = field("tokenizer_config.json", "eos_token");
  if (end.is_object()) end = end.value("content", nlohmann::json());
  if (end.is_string()) tokens.insert(tokenizer.find(end.get<std::string>()));
  for (const std::string& name : named) {
    const int32_t id = tokenizer.find(name);
    TWELL_REQUIRE(id >= 0, "{} is no token of the tokenizer, so no text can end at it",
                  excerpt(name));
    tokens.insert(id);
  }
  std::vector<int32_t> out;
  for (const int64_t id : tokens) {
    if (id >= 0 && id < config.vocab_size) out.push_back(static_cast<int32_t>(id));
  }
  return out;
}

namespace {

std::shared_ptr<TokenFilter> filter_of(const Grammar& grammar, const Tokenizer& tokenizer,
                                       const GenerateOptions& options) {
  std::vector<int32_t> ends = options.stop_tokens;
  if (tokenizer.eos_token() >= 0) ends.push_back(tokenizer.eos_token());
  return grammar.filter(ends);
}

}  // namespace

GenerationRequest text_request(const ModelConfig& config, const Tokenizer& tokenizer,
                               std::string_view prompt, const GenerateOptions& options,
                               OnDone on_done) {
  TWELL_REQUIRE(options.max_tokens > 0, "the number of tokens to generate must be positive, got {}",
                options.max_tokens);
  const auto collect = [result = std::make_shared<Generation>(), on_text = options.on_text,
                        on_done = std::move(on_done)](const GenerationEvent& event) {
    if (event.token >= 0) {
      result->ids.push_back(event.token);
      if (event.log_probs) result->log_probs.push_back(event.log_probs->token.log_prob);
    }
    result->text += event.text;
    if (on_text && !event.text.empty()) on_text(event.text);
    if (!event.stop) return;
    result->reason = *event.stop;
    result->prompt_tokens = event.usage.prompt_tokens;
    result->prefill_seconds = event.usage.prefill_seconds;
    result->decode_seconds = event.usage.decode_seconds;
    result->drafted = event.usage.drafted;
    result->accepted = event.usage.accepted;
    if (on_done) on_done(event.request, std::move(*result));
  };
  return {.prompt = prompt_ids(config, tokenizer, prompt, options.begin_token),
          .sampler = options.sampler,
          .logit_bias = options.logit_bias,
          .max_tokens = options.max_tokens,
          .stop_tokens = options.stop_tokens,
          .stop_strings = options.stop_strings,
          .filter = options.grammar ? filter_of(*options.grammar, tokenizer, options) : nullptr,
          .log_probs = options.log_probs ? std::optional<int64_t>(0) : std::nullopt,
          .share_beginning = options.share_beginning,
          .on_event = collect,
          .cancel = options.cancel};
}

Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options) {
  Generation result;
  Scheduler scheduler(session, tokenizer, {.speculate = options.speculate});
  scheduler.submit(
      text_request(session.config(), tokenizer, prompt, options,
                   [&](int64_t, Generation generation) { result = std::move(generation); }));
  while (scheduler.step()) {
  }
  TWELL_REQUIRE(result.reason != StopReason::kNotFinite, "{}", kNoTokenReason);
  TWELL_REQUIRE(result.reason != StopReason::kNoneFits, "{}", kNoneFitsReason);
  return result;
}

}  // namespace twell
