// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/responses.h"

#include <fmt/core.h>

#include <utility>

namespace twell {

using nlohmann::ordered_json;

ResponseFormat::ResponseFormat(const Tokenizer& tokenizer, const ResponseRequest& request,
                               std::string number, std::string model, int64_t created,
                               const ToolCallReader* tools)
    : tokenizer_(tokenizer),
      settings_(ordered_json::parse(request.settings_json)),
      log_probs_(request.options.log_probs.has_value()),
      number_(std::move(number)),
      model_(std::move(model)),
      created_(created) {
  if (tools == nullptr) return;
  tools_.emplace(*tools);
  call_ids_.emplace(tools->form());
}

ordered_json ResponseFormat::part(const Item& item) {
  return {{"type", "output_text"},
          {"text", item.text},
          {"annotations", ordered_json::array()},
          {"logprobs", item.log_probs}};
}

ordered_json ResponseFormat::json(const Item& item) {
  if (!item.name.empty()) {
    return {{"id", item.id},           {"type", "function_call"}, {"status", item.status},
            {"call_id", item.call_id}, {"name", item.name},       {"arguments", item.text}};
  }
  return {{"id", item.id},
          {"type", "message"},
          {"status", item.status},
          {"role", "assistant"},
          {"content", ordered_json::array({part(item)})}};
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
  if (status_ != "failed") {
    for (const Item& item : items_) out["output"].push_back(json(item));
  }
  out["usage"] = {{"input_tokens", usage_.prompt_tokens},
                  {"input_tokens_details", {{"cached_tokens", usage_.cached_tokens}}},
                  {"output_tokens", usage_.tokens},
                  {"output_tokens_details", {{"reasoning_tokens", 0}}},
                  {"total_tokens", usage_.prompt_tokens + usage_.tokens}};
  return out;
}

void ResponseFormat::take(const AnswerEvent& event, std::string* stream) {
  usage_ = event.usage;
  if (log_probs_ && event.log_probs) {
    waiting_log_probs_.push_back(chat_log_prob(tokenizer_, *event.log_probs));
  }
  if (!tools_) {
    add_text(event.text, stream);
  } else {
    const ToolCallReader::Found found = tools_->push(event.text, event.stop.has_value());
    // What belongs to a call that has begun stands in front of the text.
    auto piece = found.pieces.begin();
    while (piece != found.pieces.end() && piece->name.empty()) add_piece(*piece++, stream);
    if (!found.text.empty()) add_text(found.text, stream);
    while (piece != found.pieces.end()) add_piece(*piece++, stream);
  }
  if (!event.stop) return;
  // An answer has an item, if an empty one.
  if (items_.empty() || (in_message() && !waiting_log_probs_.empty())) add_text("", stream);
  if (items_.empty()) open({.id = "msg_" + number_ + "_0"}, stream);
  const char* status = finish_reason(event.stop) == "stop" ? "completed" : "incomplete";
  if (is_open_) close(tools_ && tools_->is_cut() ? "incomplete" : status, stream);
  status_ = status;
}

void ResponseFormat::add_text(std::string_view text, std::string* stream) {
  if (text.empty() && waiting_log_probs_.empty()) return;
  if (!in_message()) {
    open({.id = fmt::format("msg_{}_{}", number_, items_.size())}, stream);
  }
  Item& item = items_.back();
  item.text += text;
  for (const ordered_json& token : waiting_log_probs_) item.log_probs.push_back(token);
  if (stream != nullptr) {
    ordered_json fields = place(true);
    fields.update({{"delta", text}, {"logprobs", waiting_log_probs_}});
    write(stream, "response.output_text.delta", std::move(fields));
  }
  waiting_log_probs_ = ordered_json::array();
}

void ResponseFormat::add_piece(const ToolCallPiece& piece, std::string* stream) {
  waiting_log_probs_ = ordered_json::array();
  if (!piece.name.empty()) {
    open({.id = fmt::format("fc_{}_{}", number_, items_.size()),
          .call_id = call_ids_->id(0, piece.call),
          .name = piece.name},
         stream);
  }
  if (piece.arguments.empty()) return;
  items_.back().text += piece.arguments;
  if (stream == nullptr) return;
  ordered_json fields = place(false);
  fields["delta"] = piece.arguments;
  write(stream, "response.function_call_arguments.delta", std::move(fields));
}

// Begins an item; the one before it is complete.
void ResponseFormat::open(Item item, std::string* stream) {
  if (is_open_) close("completed", stream);
  items_.push_back(std::move(item));
  is_open_ = true;
  if (stream == nullptr) return;
  ordered_json empty = json(items_.back());
  if (in_message()) empty["content"] = ordered_json::array();
  write(stream, "response.output_item.added",
        {{"output_index", items_.size() - 1}, {"item", std::move(empty)}});
  if (!in_message()) return;
  ordered_json fields = place(true);
  fields["part"] = part(items_.back());
  write(stream, "response.content_part.added", std::move(fields));
}

void ResponseFormat::close(const char* status, std::string* stream) {
  Item& item = items_.back();
  item.status = status;
  if (stream != nullptr && in_message()) {
    ordered_json fields = place(true);
    fields.update({{"text", item.text}, {"logprobs", item.log_probs}});
    write(stream, "response.output_text.done", std::move(fields));
    fields = place(true);
    fields["part"] = part(item);
    write(stream, "response.content_part.done", std::move(fields));
  } else if (stream != nullptr) {
    ordered_json fields = place(false);
    fields.update({{"name", item.name}, {"arguments", item.text}});
    write(stream, "response.function_call_arguments.done", std::move(fields));
  }
  write(stream, "response.output_item.done",
        {{"output_index", items_.size() - 1}, {"item", json(item)}});
  is_open_ = false;
}

void ResponseFormat::fail(const ApiError& error) {
  status_ = "failed";
  error_ = {{"code", "server_error"}, {"message", error.what()}};
}

ordered_json ResponseFormat::place(bool content) const {
  ordered_json out = {{"item_id", items_.back().id}, {"output_index", items_.size() - 1}};
  if (content) out["content_index"] = 0;
  return out;
}

void ResponseFormat::write(std::string* stream, std::string_view type, ordered_json fields) {
  if (stream == nullptr) return;
  ordered_json out = {{"type", type}};
  out.update(fields);
  out["sequence_number"] = events_++;
  *stream += fmt::format("event: {}\ndata: {}\n\n", type, to_text(out));
}

std::string ResponseFormat::begin() {
  std::string out;
  write(&out, "response.created", {{"response", response()}});
  write(&out, "response.in_progress", {{"response", response()}});
  return out;
}

std::string ResponseFormat::next(const AnswerEvent& event) {
  std::string out;
  take(event, &out);
  if (ended()) write(&out, "response." + status_, {{"response", response()}});
  return out;
}

std::string ResponseFormat::failed(const ApiError& error) {
  fail(error);
  std::string out;
  write(&out, "response.failed", {{"response", response()}});
  return out;
}

}  // namespace twell
