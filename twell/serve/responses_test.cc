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
      {R"("tools": [{"type": "web_search"}])", "tools"},
      {R"("max_output_tokens": 0)", "max_output_tokens"},
      {R"("temprature": 1)", "temprature"}};
  for (const auto& [fields, param] : cases) {
    EXPECT_EQ(fault_of(std::string(R"("input": "a", )") + fields), param);
  }
  EXPECT_EQ(fault_of(R"("instructions": "a")"), "input");
  EXPECT_EQ(fault_of(R"("input": [])"), "input");
  EXPECT_EQ(fault_of(R"("input": [{"type": "item_reference", "id": "a"}])"), "input[0].type");
  EXPECT_EQ(fault_of(R"("input": [{"role": "user", "content": [{"type": "input_image"}]}])"),
            "input[0].content");
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
  std::vector<std::string> types;
  int64_t number = 0;
  nlohmann::json last;
  for (size_t at = 0; at < all.size();) {
    const size_t end = all.find("\n\n", at);
    const std::string one = all.substr(at, end - at);
    const size_t data = one.find("\ndata: ");
    last = nlohmann::json::parse(one.substr(data + 7));
    EXPECT_EQ(one.substr(7, data - 7), last["type"]);
    EXPECT_EQ(last["sequence_number"], number++);
    types.push_back(last["type"]);
    at = end + 2;
  }
  EXPECT_THAT(types,
              testing::ElementsAre("response.created", "response.in_progress",
                                   "response.output_item.added", "response.content_part.added",
                                   "response.output_text.delta", "response.output_text.delta",
                                   "response.output_text.done", "response.content_part.done",
                                   "response.output_item.done", "response.incomplete"));
  const nlohmann::json response = last["response"];
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "Hello");
  EXPECT_EQ(response["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(response["usage"]["total_tokens"], 7);
  EXPECT_EQ(response["id"], "resp_1");
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
