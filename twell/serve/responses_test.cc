// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/responses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

ResponseRequest request_of(const std::string& fields) {
  return parse_response(R"({"model": "m", )" + fields + "}", 8);
}

std::string fault_of(const std::string& fields) {
  try {
    request_of(fields);
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_NE(std::string(error.what()), "");
    return error.param;
  }
  return "no error";
}

TEST(Responses, InputIsATextOrItems) {
  EXPECT_EQ(request_of(R"("input": "Hi")").messages_json, R"([{"role":"user","content":"Hi"}])");
  EXPECT_EQ(request_of(R"("instructions": "Be brief", "input": [
      {"role": "developer", "content": "a"},
      {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
      {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
       "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]}])")
                .messages_json,
            R"([{"role":"system","content":"Be brief"},{"role":"system","content":"a"},)"
            R"({"role":"user","content":"b"},{"role":"assistant","content":"c"}])");
}

TEST(Responses, Fields) {
  const ResponseRequest request = request_of(
      R"("input": "a", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25, "stream": true,
         "metadata": {"k": "v"}, "store": false, "text": {"format": {"type": "text"}},
         "include": ["message.output_text.logprobs"], "top_logprobs": 3, "user": "u")");
  EXPECT_EQ(request.options.max_tokens, 7);
  EXPECT_EQ(request.options.sampler.temperature, 0.5f);
  EXPECT_EQ(request.options.log_probs, 3);
  EXPECT_TRUE(request.options.stream);
  const nlohmann::json settings = nlohmann::json::parse(request.settings_json);
  EXPECT_EQ(settings["metadata"]["k"], "v");
  EXPECT_EQ(settings["max_output_tokens"], 7);
  // Log-probabilities are asked for by either field.
  const auto log_probs = [](const char* fields) {
    return request_of(std::string(R"("input": "a")") + fields).options.log_probs;
  };
  EXPECT_EQ(log_probs(""), std::nullopt);
  EXPECT_EQ(log_probs(R"(, "top_logprobs": 0)"), std::nullopt);
  EXPECT_EQ(log_probs(R"(, "top_logprobs": 2)"), 2);
  EXPECT_EQ(log_probs(R"(, "include": ["message.output_text.logprobs"])"), 0);
}

// The schema stands in the format itself, in the client's order of keys.
TEST(Responses, SchemasOfAnswers) {
  const std::string schema = R"({"type":"object","properties":{"b":{},"a":{}}})";
  const ResponseRequest request = request_of(
      R"("input": "a", "text": {"format": {"type": "json_schema", "name": "n", "strict": true,
         "schema": )" +
      schema + "}}");
  ASSERT_TRUE(request.options.grammar);
  EXPECT_EQ(request.options.grammar->kind, GrammarText::Kind::kJsonSchema);
  EXPECT_EQ(request.options.grammar->text, schema);
  EXPECT_EQ(request.options.grammar_field, "text.format");
  const auto settings = nlohmann::ordered_json::parse(request.settings_json);
  EXPECT_EQ(settings["text"]["format"]["name"], "n");
  EXPECT_EQ(settings["text"]["format"]["schema"].dump(), schema);
  EXPECT_EQ(request_of(R"("input": "a", "text": {"format": {"type": "json_object"}})")
                .options.grammar->kind,
            GrammarText::Kind::kJson);
  EXPECT_FALSE(request_of(R"("input": "a", "text": {"format": {"type": "text"}})").options.grammar);
}

TEST(Responses, RefusesByName) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("store": true)", "store"},
      {R"("previous_response_id": "resp_1")", "previous_response_id"},
      {R"("conversation": "c")", "conversation"},
      {R"("background": true)", "background"},
      {R"("truncation": "auto")", "truncation"},
      {R"("n": 2)", "n"},
      {R"("include": ["reasoning.encrypted_content"])", "include"},
      {R"("reasoning": {"effort": "low"})", "reasoning"},
      {R"("text": {"format": {"type": "xml"}})", "text.format.type"},
      {R"("text": {"format": {"type": "json_schema", "name": "n"}})", "text.format.schema"},
      {R"("text": {"format": {"type": "json_object", "x": 1}})", "text.format.x"},
      {R"("text": {"format": {"type": "json_object"}}, "ignore_eos": true)", "ignore_eos"},
      {R"("tools": [{"type": "web_search"}])", "tools[0].type"},
      {R"("tools": [{"type": "function", "function": {"name": "f"}}])", "tools[0].name"},
      {R"("tools": [{"type": "function", "name": "f", "x": 1}])", "tools[0].x"},
      {R"("tool_choice": "required")", "tool_choice"},
      {R"("tools": [{"type": "function", "name": "f"}],
          "tool_choice": {"type": "function", "name": "g"})",
       "tool_choice.name"},
      {R"("max_tool_calls": 2)", "max_tool_calls"},
      {R"("max_output_tokens": 0)", "max_output_tokens"},
      {R"("temprature": 1)", "temprature"}};
  for (const auto& [fields, param] : cases) {
    EXPECT_EQ(fault_of(std::string(R"("input": "a", )") + fields), param);
  }
  EXPECT_EQ(fault_of(R"("instructions": "a")"), "input");
  EXPECT_EQ(fault_of(R"("input": [])"), "input");
  EXPECT_EQ(fault_of(R"("input": [{"type": "item_reference", "id": "a"}])"), "input[0].type");
  EXPECT_EQ(fault_of(R"("input": [{"type": "function_call", "name": "f"}])"), "input[0].call_id");
  EXPECT_EQ(fault_of(R"("input": [{"type": "function_call", "call_id": "a"}])"), "input[0].name");
  EXPECT_EQ(fault_of(R"("input": [{"type": "function_call_output", "call_id": "a"}])"),
            "input[0].output");
  EXPECT_EQ(fault_of(R"("input": [{"role": "user", "content": [{"type": "input_image"}]}])"),
            "input[0].content");
}

// The template sees tools in the chat's form, and calls in the message that they belong to.
TEST(Responses, ToolsAndTheirCallsAsInChats) {
  const ResponseRequest request = request_of(R"("tools": [
      {"type": "function", "name": "f", "strict": true, "description": "d",
       "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
      {"type": "function", "name": "g"}],
      "tool_choice": {"type": "function", "name": "g"}, "parallel_tool_calls": true, "input": [
      {"role": "user", "content": "a"},
      {"role": "assistant", "content": "b"},
      {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1", "name": "f",
       "arguments": "{\"y\": 1, \"x\": 2}"},
      {"type": "function_call", "call_id": "2", "name": "g", "arguments": "no JSON"},
      {"type": "function_call_output", "call_id": "1", "output": "c"},
      {"type": "function_call_output", "call_id": "2",
       "output": [{"type": "input_text", "text": "d"}]},
      {"type": "function_call", "call_id": "3", "name": "g", "arguments": ""}])");
  EXPECT_EQ(request.messages_json,
            R"([{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":[)"
            R"({"id":"1","type":"function","function":{"name":"f","arguments":{"y":1,"x":2}}},)"
            R"({"id":"2","type":"function","function":{"name":"g","arguments":"no JSON"}}]},)"
            R"({"role":"tool","content":"c","tool_call_id":"1"},)"
            R"({"role":"tool","content":"d","tool_call_id":"2"},)"
            R"({"role":"assistant","content":"","tool_calls":[)"
            R"({"id":"3","type":"function","function":{"name":"g","arguments":{}}}]}])");
  EXPECT_EQ(request.tools_json,
            R"([{"type":"function","function":{"name":"f","strict":true,"description":"d",)"
            R"("parameters":{"type":"object","properties":{"b":{},"a":{}}}}},)"
            R"({"type":"function","function":{"name":"g"}}])");
  ASSERT_EQ(request.tools.size(), 1u);
  EXPECT_EQ(request.tools[0].name, "g");
  EXPECT_EQ(request.calls.choice, ToolChoice::kRequired);
  EXPECT_FALSE(request.calls.parallel);
  const auto settings = nlohmann::json::parse(request.settings_json);
  EXPECT_EQ(settings["tools"][0]["name"], "f");
  EXPECT_EQ(settings["tool_choice"]["name"], "g");
}

struct Events {
  std::vector<std::string> types;
  std::vector<nlohmann::json> all;
};

Events events_of(const std::string& stream) {
  Events events;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = stream.find("\n\n", at);
    const std::string one = stream.substr(at, end - at);
    const size_t data = one.find("\ndata: ");
    events.all.push_back(nlohmann::json::parse(one.substr(data + 7)));
    EXPECT_EQ(one.substr(7, data - 7), events.all.back()["type"]);
    EXPECT_EQ(events.all.back()["sequence_number"], events.types.size());
    events.types.push_back(events.all.back()["type"]);
    at = end + 2;
  }
  return events;
}

TEST(Responses, EventsComeInTheirOrder) {
  const Tokenizer tokenizer = byte_tokenizer();
  ResponseFormat format(tokenizer, request_of(R"("input": "a")"), "1", "m", 5);
  std::string all = format.begin();
  all += format.next({.token = 1, .text = "Hel"});
  all += format.next({.token = 2});  // a part of a character
  all += format.next({.token = 3,
                      .text = "lo",
                      .stop = StopReason::kMaxTokens,
                      .usage = {.prompt_tokens = 4, .tokens = 3}});
  const auto [types, events] = events_of(all);
  EXPECT_THAT(types,
              testing::ElementsAre("response.created", "response.in_progress",
                                   "response.output_item.added", "response.content_part.added",
                                   "response.output_text.delta", "response.output_text.delta",
                                   "response.output_text.done", "response.content_part.done",
                                   "response.output_item.done", "response.incomplete"));
  const nlohmann::json response = events.back()["response"];
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "Hello");
  EXPECT_EQ(response["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(response["usage"]["total_tokens"], 7);
  EXPECT_EQ(response["id"], "resp_1");
}

// Also the last tokens, whose bytes are no whole character.
TEST(Responses, EveryTokenHasItsLogProbability) {
  const Tokenizer tokenizer = byte_tokenizer();
  const ToolCallReader reader(ToolForm::kHermes, {"f"}, 9);
  const TokenLogProbs one{.token = {.id = 1}};
  for (const ToolCallReader* tools : {static_cast<const ToolCallReader*>(nullptr), &reader}) {
    ResponseFormat format(tokenizer, request_of(R"("input": "a", "top_logprobs": 1)"), "1", "m", 5,
                          tools);
    std::string all = format.next({.token = 1, .text = "a", .log_probs = one});
    all += format.next({.token = 1, .log_probs = one});
    all += format.next({.token = 1, .log_probs = one, .stop = StopReason::kMaxTokens});
    size_t sent = 0;
    for (const nlohmann::json& event : events_of(all).all) {
      if (event["type"] == "response.output_text.delta") sent += event["logprobs"].size();
    }
    EXPECT_EQ(sent, 3u);
    EXPECT_EQ(format.response()["output"][0]["content"][0]["logprobs"].size(), 3u);
  }
}

// Text, two calls, of which one piece of the answer ends the first and begins the second, and text;
// each in an item of its own, as events and as a whole.
TEST(Responses, CallsAreItems) {
  const Tokenizer tokenizer = byte_tokenizer();
  const ToolCallReader reader(ToolForm::kHermes, {"f", "g"}, 9);
  const ResponseRequest request = request_of(
      R"("input": "a", "top_logprobs": 1, "tools": [{"type": "function", "name": "f"}])");
  const std::string answer =
      "Well.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>\n"
      "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
  for (const size_t size : {1u, 7u, 30u, 1000u}) {
    ResponseFormat streamed(tokenizer, request, "1", "m", 5, &reader);
    ResponseFormat whole(tokenizer, request, "1", "m", 5, &reader);
    std::string all = streamed.begin();
    for (size_t at = 0; at < answer.size(); at += size) {
      AnswerEvent event{.token = 1,
                        .text = answer.substr(at, size),
                        .log_probs = TokenLogProbs{.token = {.id = 1}}};
      if (at + size >= answer.size()) event.stop = StopReason::kEndOfText;
      all += streamed.next(event);
      whole.add(event);
    }
    const auto [types, events] = events_of(all);
    std::string arguments;
    std::vector<std::string> added, done;
    for (const nlohmann::json& event : events) {
      if (event["type"] == "response.output_item.added") added.push_back(event["item"]["type"]);
      if (event["type"] == "response.output_item.done") done.push_back(event["item"]["type"]);
      EXPECT_EQ(
          added.size() - done.size(),
          event.contains("output_index") && event["type"] != "response.output_item.done" ? 1u : 0u);
      if (event["type"] == "response.function_call_arguments.delta") {
        EXPECT_EQ(event["output_index"], added.size() - 1);
        arguments += event["delta"];
      }
      if (event["type"] == "response.function_call_arguments.done") {
        EXPECT_EQ(event["arguments"], std::exchange(arguments, {}));
      }
    }
    EXPECT_THAT(added, testing::ElementsAre("message", "function_call", "function_call"));
    EXPECT_EQ(done, added);
    EXPECT_EQ(types.back(), "response.completed");
    const nlohmann::json output = events.back()["response"]["output"];
    ASSERT_EQ(output.size(), 3u);
    EXPECT_EQ(output[0]["content"][0]["text"], "Well.");
    EXPECT_EQ(output[1]["name"], "f");
    EXPECT_EQ(output[1]["arguments"], R"({"a": [1, 2]})");
    EXPECT_EQ(output[1]["status"], "completed");
    EXPECT_EQ(output[2]["name"], "g");
    EXPECT_EQ(output[2]["arguments"], "{}");
    EXPECT_NE(output[1]["call_id"], output[2]["call_id"]);
    const nlohmann::json at_once = whole.response()["output"];
    EXPECT_EQ(at_once[0], output[0]);
    EXPECT_EQ(at_once[1]["arguments"], output[1]["arguments"]);
    EXPECT_EQ(at_once.size(), 3u);
  }
  // A call that is cut off keeps what there is of it.
  ResponseFormat cut(tokenizer, request, "1", "m", 5, &reader);
  cut.add(
      {.token = 1, .text = answer.substr(0, answer.find("2]")), .stop = StopReason::kMaxTokens});
  EXPECT_EQ(cut.response()["status"], "incomplete");
  EXPECT_EQ(cut.response()["output"][0]["status"], "completed");
  EXPECT_EQ(cut.response()["output"][1]["status"], "incomplete");
  EXPECT_EQ(cut.response()["output"][1]["arguments"], R"({"a": [1, )");
}

// A stop text within the arguments leaves a call that nobody can make.
TEST(Responses, ACallThatWasCutIsIncomplete) {
  const Tokenizer tokenizer = byte_tokenizer();
  const ToolCallReader reader(ToolForm::kHermes, {"f"}, 9);
  const ResponseRequest request = request_of(
      R"("input": "a", "reasoning": {"effort": null}, "tools": [{"type": "function", "name": "f"}])");
  for (const auto& [arguments, status] :
       {std::pair("{\"a\": 1}", "completed"), {"{\"a\": ", "incomplete"}}) {
    ResponseFormat format(tokenizer, request, "1", "m", 5, &reader);
    format.add({.text = std::string(R"(<tool_call>{"name": "f", "arguments": )") + arguments,
                .stop = StopReason::kStopString});
    EXPECT_EQ(format.response()["output"][0]["status"], status);
  }
}

TEST(Responses, AFailureEndsTheStream) {
  const Tokenizer tokenizer = byte_tokenizer();
  ResponseFormat format(tokenizer, request_of(R"("input": "a")"), "1", "m", 5);
  format.begin();
  format.next({.token = 1, .text = "Hel"});
  EXPECT_THAT(
      format.failed(ApiError(500, "the model failed")),
      testing::HasSubstr(R"("error":{"code":"server_error","message":"the model failed"})"));
  EXPECT_EQ(format.response()["status"], "failed");
}

}  // namespace
}  // namespace twell
