// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/responses.h"

#include <fmt/core.h>

#include <utility>

namespace twell {

using nlohmann::ordered_json;

ResponseFormat::ResponseFormat(const Tokenizer& tokenizer, const ResponseRequest& request,
                               std::string number, std::string model, int64_t created)
    : tokenizer_(tokenizer),
      settings_(ordered_json::parse(request.settings_json)),
      log_probs_(request.options.log_probs.has_value()),
      number_(std::move(number)),
      model_(std::move(model)),
      created_(created) {}

ordered_json ResponseFormat::part() const {
  return {{"type", "output_text"},
          {"text", text_},
          {"annotations", ordered_json::array()},
          {"logprobs", all_log_probs_}};
}

ordered_json ResponseFormat::item() const {
  return {{"id", "msg_" + number_},
          {"type", "message"},
          {"status", status_ == "failed" ? "incomplete" : status_},
          {"role", "assistant"},
          {"content", ordered_json::array({part()})}};
}

ordered_json ResponseFormat::response() const {
  ordered_json out = {{"id", "resp_" + number_},
                      {"object", "response"},
                      {"created_at", created_},
                      {"status", status_},
                      {"background", false},
                      {"error", error_},
                      {"incomplete_details", nullptr},
                      {"model", model_},
                      {"output", ordered_json::array()},
                      {"previous_response_id", nullptr},
                      {"store", false},
                      {"usage", nullptr}};
  if (status_ == "incomplete") out["incomplete_details"] = {{"reason", "max_output_tokens"}};
  for (const auto& [name, value] : settings_.items()) out[name] = value;
  if (!ended()) return out;
  if (status_ != "failed") out["output"].push_back(item());
  out["usage"] = {{"input_tokens", usage_.prompt_tokens},
                  {"input_tokens_details", {{"cached_tokens", usage_.cached_tokens}}},
                  {"output_tokens", usage_.tokens},
                  {"output_tokens_details", {{"reasoning_tokens", 0}}},
                  {"total_tokens", usage_.prompt_tokens + usage_.tokens}};
  return out;
}

void ResponseFormat::add(const AnswerEvent& event) {
  text_ += event.text;
  usage_ = event.usage;
  if (log_probs_ && event.log_probs) {
    all_log_probs_.push_back(chat_log_prob(tokenizer_, *event.log_probs));
  }
  if (event.stop) status_ = finish_reason(event.stop) == "stop" ? "completed" : "incomplete";
}

void ResponseFormat::fail(const ApiError& error) {
  status_ = "failed";
  error_ = {{"code", "server_error"}, {"message", error.what()}};
}

std::string ResponseFormat::event(std::string_view type, ordered_json fields) {
  ordered_json out = {{"type", type}};
  out.update(fields);
  out["sequence_number"] = events_++;
  return fmt::format("event: {}\ndata: {}\n\n", type, to_text(out));
}

std::string ResponseFormat::begin() {
  std::string out = event("response.created", {{"response", response()}});
  out += event("response.in_progress", {{"response", response()}});
  ordered_json empty = item();
  empty["content"] = ordered_json::array();
  out += event("response.output_item.added", {{"output_index", 0}, {"item", empty}});
  out += event(
      "response.content_part.added",
      {{"item_id", "msg_" + number_}, {"output_index", 0}, {"content_index", 0}, {"part", part()}});
  return out;
}

std::string ResponseFormat::next(const AnswerEvent& happened) {
  const size_t before = all_log_probs_.size();
  add(happened);
  const ordered_json place = {
      {"item_id", "msg_" + number_}, {"output_index", 0}, {"content_index", 0}};
  const auto at_place = [&](ordered_json fields) {
    ordered_json out = place;
    out.update(fields);
    return out;
  };
  std::string out;
  if (!happened.text.empty() || all_log_probs_.size() > before) {
    ordered_json log_probs = ordered_json::array();
    for (size_t i = before; i < all_log_probs_.size(); ++i) log_probs.push_back(all_log_probs_[i]);
    out += event("response.output_text.delta",
                 at_place({{"delta", happened.text}, {"logprobs", std::move(log_probs)}}));
  }
  if (!ended()) return out;
  out +=
      event("response.output_text.done", at_place({{"text", text_}, {"logprobs", all_log_probs_}}));
  out += event("response.content_part.done", at_place({{"part", part()}}));
  out += event("response.output_item.done", {{"output_index", 0}, {"item", item()}});
  return out + event("response." + status_, {{"response", response()}});
}

std::string ResponseFormat::failed(const ApiError& error) {
  fail(error);
  return event("response.failed", {{"response", response()}});
}

}  // namespace twell
