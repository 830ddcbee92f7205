// SPDX-License-Identifier: Apache-2.0
// Any bytes as the body of a request, to each of the server's paths: an ApiError, or a request
// whose fields lie within what the scheduler and the sampler take.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twell/base/error.h"
#include "twell/serve/openai.h"

namespace twell {
namespace {

constexpr int64_t kMostSequences = 64;

void check(const AnswerOptions& options, int64_t prompts) {
  const SamplerOptions& sampler = options.sampler;
  TWELL_CHECK(sampler.temperature >= 0 && sampler.temperature <= 100, "{}", sampler.temperature);
  TWELL_CHECK(sampler.top_p > 0 && sampler.top_p <= 1, "{}", sampler.top_p);
  TWELL_CHECK(sampler.min_p >= 0 && sampler.min_p <= 1, "{}", sampler.min_p);
  TWELL_CHECK(sampler.top_k >= 0, "{}", sampler.top_k);
  TWELL_CHECK(options.choices >= 1 && options.choices * prompts <= kMostSequences, "{} x {}",
              prompts, options.choices);
  TWELL_CHECK(!options.max_tokens || *options.max_tokens >= 0, "{}", *options.max_tokens);
  TWELL_CHECK(!options.log_probs || (*options.log_probs >= 0 && *options.log_probs <= 20), "{}",
              *options.log_probs);
  for (const std::string& stop : options.stop) TWELL_CHECK(!stop.empty(), "empty stop text");
}

void check_messages(const std::string& text) {
  const auto messages = nlohmann::json::parse(text);
  TWELL_CHECK(messages.is_array() && !messages.empty(), "{}", text);
  for (const auto& message : messages) {
    TWELL_CHECK(message.at("role").is_string() && message.at("content").is_string(), "{}", text);
  }
}

// Parses, and renders the error as the server sends it.
template <typename Parse>
void answer(const Parse& parse) {
  try {
    parse();
  } catch (const ApiError& error) {
    TWELL_CHECK(error.status == 400, "status {}", error.status);
    TWELL_CHECK(nlohmann::json::parse(to_text(error_json(error))).contains("error"), "no error");
  }
}

void run(std::string_view body) {
  answer([&] {
    const CompletionRequest request = parse_completion(body, kMostSequences);
    check(request.options, std::ssize(request.prompts));
    for (const auto& prompt : request.prompts) {
      if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
        for (const int32_t id : *ids) TWELL_CHECK(id >= 0, "id {}", id);
      }
    }
  });
  answer([&] {
    const ChatRequest request = parse_chat(body, kMostSequences);
    check(request.options, 1);
    check_messages(request.messages_json);
  });
  answer([&] {
    const TokenizeRequest request = parse_tokenize(body);
    TWELL_CHECK(request.prompt.has_value() != request.messages_json.has_value(), "both or none");
    if (request.messages_json) check_messages(*request.messages_json);
  });
  answer([&] {
    for (const int32_t id : parse_detokenize(body)) TWELL_CHECK(id >= 0, "id {}", id);
  });
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  twell::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
