// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/openai.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

constexpr int64_t kMost = 64;

// Calls parse(body) and returns the error; its status is 0 when there is none.
template <typename Parse>
ApiError error_of(const Parse& parse) {
  try {
    parse();
  } catch (const ApiError& error) {
    return error;
  }
  return {0, "no error"};
}

ApiError completion_error(const std::string& body) {
  return error_of([&] { parse_completion(body, kMost); });
}
ApiError chat_error(const std::string& body) {
  return error_of([&] { parse_chat(body, kMost); });
}

TEST(OpenAi, CompletionDefaults) {
  const CompletionRequest request = parse_completion(R"({"prompt": "Once"})", kMost);
  ASSERT_EQ(request.prompts.size(), 1u);
  EXPECT_EQ(std::get<std::string>(request.prompts[0]), "Once");
  EXPECT_FALSE(request.echo);
  EXPECT_TRUE(request.begin_token);
  const AnswerOptions& options = request.options;
  EXPECT_EQ(options.sampler.temperature, 1.0f);
  EXPECT_EQ(options.sampler.top_p, 1.0f);
  EXPECT_EQ(options.sampler.top_k, 0);
  EXPECT_EQ(options.choices, 1);
  EXPECT_FALSE(options.seeded || options.stream || options.max_tokens || options.log_probs);
}

TEST(OpenAi, CompletionFields) {
  const CompletionRequest request = parse_completion(
      R"({"model": "m", "prompt": ["a", "b"], "max_tokens": 0, "echo": true, "logprobs": 20,
          "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -1, "n": 2,
          "stop": "end", "stream": true, "stream_options": {"include_usage": true},
          "ignore_eos": true, "add_special_tokens": false, "best_of": 2, "suffix": null,
          "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {}, "user": "someone"})",
      kMost);
  EXPECT_EQ(request.options.sampler.presence_penalty, 0.5f);
  EXPECT_EQ(request.options.sampler.frequency_penalty, -1.0f);
  EXPECT_EQ(request.options.sampler.repetition_penalty, 1.25f);
  EXPECT_EQ(request.prompts.size(), 2u);
  EXPECT_TRUE(request.echo);
  EXPECT_FALSE(request.begin_token);
  const AnswerOptions& options = request.options;
  EXPECT_EQ(options.model, "m");
  EXPECT_EQ(options.max_tokens, 0);
  EXPECT_EQ(options.log_probs, 20);
  EXPECT_EQ(options.sampler.top_k, 0);
  EXPECT_EQ(options.sampler.min_p, 0.1f);
  EXPECT_EQ(options.sampler.seed, std::numeric_limits<uint64_t>::max());
  // A top_p of 0 leaves only the most likely token, which is what temperature 0 draws.
  const SamplerOptions least =
      parse_completion(R"({"prompt": "a", "top_p": 0})", kMost).options.sampler;
  EXPECT_EQ(least.temperature, 0.0f);
  EXPECT_EQ(least.top_p, 1.0f);
  EXPECT_TRUE(options.seeded && options.stream && options.stream_usage);
  EXPECT_TRUE(options.ignore_end_of_text);
  EXPECT_EQ(options.stop, std::vector<std::string>{"end"});
  EXPECT_EQ(options.choices, 2);
}

// What the openai client makes of an answer, put back into the history, has a null in every field
// that was not used.
TEST(OpenAi, ANullIsNoField) {
  const ChatRequest request = parse_chat(
      R"({"messages": [{"role": "user", "content": "a", "name": null, "tool_call_id": null},
                       {"role": "assistant", "content": "b", "refusal": null, "annotations": null,
                        "audio": null, "function_call": null, "tool_calls": null, "x": null}],
          "function_call": null, "audio": null, "prediction": null, "web_search_options": null,
          "reasoning_effort": null, "temperature": null, "stream": true,
          "stream_options": {"include_usage": null, "x": null}, "verbosity": null})",
      kMost);
  EXPECT_EQ(request.messages_json,
            R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  EXPECT_FALSE(request.options.stream_usage);
  EXPECT_EQ(parse_completion(R"({"prompt": "a", "x": null})", kMost).prompts.size(), 1u);
  EXPECT_EQ(parse_tokenize(R"({"prompt": "a", "messages": null, "x": null})").prompt, "a");
  EXPECT_EQ(parse_detokenize(R"({"tokens": [1], "x": null})").size(), 1u);
}

TEST(OpenAi, BiasesAsAnObjectOrAList) {
  const auto biases = [](const std::string& value) {
    return parse_completion(R"({"prompt": "a", "logit_bias": )" + value + "}", kMost)
        .options.logit_bias;
  };
  const auto object = biases(R"({"12": -100, " the": 1.5})");
  ASSERT_EQ(object.size(), 2u);
  EXPECT_EQ(std::get<std::string>(object[0].token), " the");
  EXPECT_EQ(object[0].bias, 1.5f);
  EXPECT_EQ(std::get<int32_t>(object[1].token), 12);
  EXPECT_EQ(object[1].bias, -100.0f);
  const auto list = biases(R"([[12, 100], ["12", -1]])");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(std::get<int32_t>(list[0].token), 12);
  EXPECT_EQ(std::get<std::string>(list[1].token), "12");
  for (const char* wrong : {"1", R"("a")", R"({"1": 101})", R"({"1": "2"})", R"({"1": null})",
                            R"({"": 1})", R"({"-1": 1})", "[1]", "[[1]]", "[[-1, 2]]", "[[1.5, 2]]",
                            R"({"9999999999": 1})", "[[1, -100.1]]"}) {
    const ApiError error =
        completion_error(R"({"prompt": "a", "logit_bias": )" + std::string(wrong) + "}");
    EXPECT_EQ(error.status, 400) << wrong;
    EXPECT_EQ(error.param, "logit_bias") << wrong;
  }
}

TEST(OpenAi, AMinPOfOneKeepsTheMostLikelyToken) {
  for (const auto& [text, most] : {std::pair("0.5", 0.5f), std::pair("1", 1.0f)}) {
    const auto body = fmt::format(R"({{"prompt": "a", "min_p": {}}})", text);
    const SamplerOptions sampler = parse_completion(body, kMost).options.sampler;
    EXPECT_NO_THROW(sampler.validate());
    EXPECT_GE(sampler.min_p, most - 1e-6f);
  }
  EXPECT_EQ(completion_error(R"({"prompt": "a", "min_p": 1.01})").param, "min_p");
}

TEST(OpenAi, PromptsOfTokenIds) {
  using Ids = std::vector<int32_t>;
  const auto one = parse_completion(R"({"prompt": [1, 2]})", kMost).prompts;
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(std::get<Ids>(one[0]), (Ids{1, 2}));
  const auto two = parse_completion(R"({"prompt": [[1], [2, 3]]})", kMost).prompts;
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(std::get<Ids>(two[1]), (Ids{2, 3}));
}

TEST(OpenAi, RefusedFieldsAreNamedWithTheirValue) {
  const struct {
    const char *body, *param, *message;
  } cases[] = {
      {R"({"prompt": "a", "temperature": -0.5})", "temperature", "-0.5"},
      {R"({"prompt": "a", "temperature": "hot"})", "temperature", "hot"},
      {R"({"prompt": "a", "max_tokens": 0})", "max_tokens", "from 1"},
      {R"({"prompt": "a", "max_tokens": 1.5})", "max_tokens", "1.5"},
      {R"({"prompt": "a", "max_tokens": 18446744073709551615})", "max_tokens", "whole number"},
      {R"({"prompt": "a", "n": 65})", "n", "64"},
      {R"({"prompt": "a", "logprobs": 21})", "logprobs", "21"},
      {R"({"prompt": "a", "suffix": 1})", "suffix", "suffix"},
      {R"({"prompt": "a", "suffix": "b", "echo": true})", "suffix", "echo"},
      {R"({"prompt": "a", "stop": [1]})", "stop", "1"},
      {R"({"prompt": "a", "stop": ""})", "stop", "bytes"},
      {R"({"prompt": "a", "echo": 1})", "echo", "true or false"},
      {R"({"prompt": "a", "temprature": 1})", "temprature", "no such field"},
      {R"({"prompt": "a", "stream_options": {}})", "stream_options", "stream"},
      {R"({"prompt": "a", "stream": true, "stream_options": {"x": 1}})", "stream_options.x", "x"},
      {R"({"prompt": "a", "frequency_penalty": 2.1})", "frequency_penalty", "2.1"},
      {R"({"prompt": "a", "repetition_penalty": 0})", "repetition_penalty", "0"},
      {R"({"prompt": {}})", "prompt", "expected"},
      {R"({"prompt": []})", "prompt", "expected"},
      {R"({"prompt": ["a", 1]})", "prompt", "expected"},
      {R"({"prompt": [1, "a"]})", "prompt", "token ids"},
      {R"({"prompt": [1, -1]})", "prompt", "-1"},
      {R"({"prompt": [[]]})", "prompt", "expected"},
      {"{}", "prompt", "missing"},
  };
  for (const auto& one : cases) {
    const ApiError error = completion_error(one.body);
    EXPECT_EQ(error.status, 400) << one.body;
    EXPECT_EQ(error.param, one.param) << one.body;
    EXPECT_THAT(error.what(), HasSubstr(one.message)) << one.body;
  }
}

TEST(OpenAi, BodiesThatAreNoObjects) {
  for (const std::string& body :
       {std::string(), std::string("[]"), std::string("{"), std::string("{\"a\": 1, \"a\": 2}"),
        std::string("{\"prompt\": \"\xff\"}"), std::string(100000, '['),
        std::string("{\"temperature\": 1e999}")}) {
    EXPECT_EQ(completion_error(body).status, 400) << body.substr(0, 40);
    EXPECT_EQ(chat_error(body).status, 400) << body.substr(0, 40);
    EXPECT_EQ(error_of([&] { parse_tokenize(body); }).status, 400);
    EXPECT_EQ(error_of([&] { parse_detokenize(body); }).status, 400);
  }
}

TEST(OpenAi, ChatMessagesBecomeTexts) {
  const ChatRequest request = parse_chat(
      R"({"messages": [{"role": "system", "content": "s"},
                       {"role": "user", "name": "u", "content": [{"type": "text", "text": "a"},
                                                                 {"type": "text", "text": "b"}]}],
          "max_tokens": 3, "max_completion_tokens": 4, "logprobs": true, "tools": []})",
      kMost);
  EXPECT_EQ(request.messages_json,
            R"([{"role":"system","content":"s"},{"role":"user","content":"ab","name":"u"}])");
  EXPECT_EQ(request.options.max_tokens, 4);
  EXPECT_EQ(request.options.log_probs, 0);
}

TEST(OpenAi, RefusedChats) {
  const std::string user = R"("messages": [{"role": "user", "content": "a"}])";
  const struct {
    std::string body, param;
  } cases[] = {
      {"{}", "messages"},
      {R"({"messages": []})", "messages"},
      {R"({"messages": ["a"]})", "messages[0]"},
      {R"({"messages": [{"content": "a"}]})", "messages[0].role"},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": "a", "extra": 1}]})", "messages[0].extra"},
      {"{" + user + R"(, "top_logprobs": 2})", "top_logprobs"},
      {"{" + user + R"(, "tools": [{}]})", "tools[0].type"},
      {"{" + user + R"(, "tools": {}})", "tools"},
      {"{" + user + R"(, "tools": [{"type": "function", "function": {"name": "a b"}}]})",
       "tools[0].function.name"},
      {"{" + user + R"(, "tools": [{"type": "function", "function": {"name": "a"}},
                                   {"type": "function", "function": {"name": "a"}}]})",
       "tools[1].function.name"},
      {"{" + user +
           R"(, "tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]})",
       "tools[0].function.parameters"},
      {"{" + user + R"(, "tools": [{"type": "function", "function": {"name": "a"}}],
          "tool_choice": {"type": "function", "function": {"name": "b"}}})",
       "tool_choice.function.name"},
      {"{" + user +
           R"(, "tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "any"})",
       "tool_choice"},
      {"{" + user + R"(, "tool_choice": "required"})", "tool_choice"},
      {"{" + user + R"(, "tools": [{"type": "function", "function": {"name": "a"}}], "grammar": "x",
          "tool_choice": "required"})",
       "tool_choice"},
      {"{" + user + R"(, "response_format": {"type": "xml"}})", "response_format.type"},
      {"{" + user + R"(, "response_format": {"type": "json_schema"}})",
       "response_format.json_schema"},
      {"{" + user +
           R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}})",
       "response_format.json_schema.schema"},
      {"{" + user + R"(, "response_format": {"type": "json_object", "x": 1}})",
       "response_format.x"},
      {"{" + user + R"(, "response_format": {"type": "json_object"}, "grammar": "x"})", "grammar"},
      {"{" + user + R"(, "response_format": {"type": "json_object"}, "json_schema": {}})",
       "json_schema"},
      {"{" + user + R"(, "response_format": {"type": "json_object"}, "ignore_eos": true})",
       "ignore_eos"},
      {R"({"messages": [{"role": "tool", "content": "a"}]})", "messages[0].tool_call_id"},
      {R"({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]})",
       "messages[0].tool_calls"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]})",
       "messages[0].tool_calls[0].function.name"},
      {"{" + user + R"(, "echo": true})", "echo"},
  };
  for (const auto& one : cases) {
    const ApiError error = chat_error(one.body);
    EXPECT_EQ(error.status, 400) << one.body;
    EXPECT_EQ(error.param, one.param) << one.body;
  }
}

// A schema keeps the client's order of properties, in which a model writes them.
TEST(OpenAi, ResponseFormatsBecomeGrammars) {
  using Kind = GrammarText::Kind;
  const std::string user = R"("messages": [{"role": "user", "content": "a"}])";
  const auto grammar_of = [&](const std::string& fields) {
    return parse_chat("{" + user + fields + "}", kMost).options.grammar;
  };
  EXPECT_FALSE(grammar_of(""));
  EXPECT_FALSE(grammar_of(R"(, "response_format": {"type": "text"})"));
  EXPECT_EQ(grammar_of(R"(, "response_format": {"type": "json_object"})"),
            (GrammarText{Kind::kJson, ""}));
  EXPECT_EQ(grammar_of(R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "n",
                "strict": true, "schema": {"type": "object", "properties": {"b": {}, "a": {}}}}})"),
            (GrammarText{Kind::kJsonSchema, R"({"type":"object","properties":{"b":{},"a":{}}})"}));
  // The llama.cpp server takes these forms too.
  const GrammarText schema{Kind::kJsonSchema, R"({"b":{},"a":{}})"};
  EXPECT_EQ(grammar_of(R"(, "json_schema": {"b": {}, "a": {}})"), schema);
  EXPECT_EQ(grammar_of(R"(, "response_format": {"type": "json_object",
                            "schema": {"b": {}, "a": {}}})"),
            schema);
  EXPECT_EQ(grammar_of(R"(, "grammar": "root ::= \"a\"")"),
            (GrammarText{Kind::kEbnf, R"(root ::= "a")"}));
  EXPECT_EQ(
      parse_completion(R"({"prompt": "a", "response_format": {"type": "json_object"}})", kMost)
          .options.grammar_field,
      "response_format");
}

TEST(OpenAi, ToolsAndTheirHistory) {
  const std::string tools = R"("tools": [
      {"type": "function", "function": {"name": "b", "description": "d", "strict": true,
       "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}},
      {"type": "function", "function": {"name": "a"}}])";
  const std::string messages = R"("messages": [{"role": "user", "content": "q"},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "b", "arguments": "{\"z\": 1, \"a\": []}"}},
        {"id": "c2", "type": "function", "function": {"name": "a", "arguments": "{bad"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "42"}])";
  const auto of = [&](const std::string& more) {
    return parse_chat("{" + messages + ", " + tools + more + "}", kMost);
  };
  const ChatRequest request = of("");
  EXPECT_EQ(request.messages_json,
            R"([{"role":"user","content":"q"},{"role":"assistant","content":"","tool_calls":[)"
            R"({"id":"c1","type":"function","function":{"name":"b","arguments":{"z":1,"a":[]}}},)"
            R"({"id":"c2","type":"function","function":{"name":"a","arguments":"{bad"}}]},)"
            R"({"role":"tool","content":"42","tool_call_id":"c1"}])");
  EXPECT_EQ(request.calls.choice, ToolChoice::kAuto);
  EXPECT_TRUE(request.calls.parallel);
  ASSERT_EQ(request.tools.size(), 2u);
  EXPECT_TRUE(request.tools[0].strict);
  EXPECT_EQ(request.tools[0].parameters, R"({"type":"object","properties":{"z":{},"a":{}}})");
  EXPECT_EQ(nlohmann::json::parse(request.tools_json).size(), 2u);
  EXPECT_FALSE(of(R"(, "parallel_tool_calls": false)").calls.parallel);
  EXPECT_EQ(of(R"(, "tool_choice": "required")").calls.choice, ToolChoice::kRequired);
  const ChatRequest none = of(R"(, "tool_choice": "none")");
  EXPECT_TRUE(none.tools.empty() && none.tools_json.empty());
  const ChatRequest named =
      of(R"(, "tool_choice": {"type": "function", "function": {"name": "a"}})");
  EXPECT_EQ(named.calls.choice, ToolChoice::kRequired);
  EXPECT_FALSE(named.calls.parallel);
  ASSERT_EQ(named.tools.size(), 1u);
  EXPECT_EQ(named.tools[0].name, "a");
  EXPECT_EQ(named.tools_json, request.tools_json);
}

// The arguments of a call are an object, so other schemas are refused, and one without a type is of
// objects.
TEST(OpenAi, ParametersAreObjects) {
  const auto body = [](const std::string& parameters) {
    return R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function",
              "function": {"name": "f", "parameters": )" +
           parameters + "}}]}";
  };
  for (const auto& [given, read] :
       {std::pair(R"({})", R"({"type":"object"})"),
        {R"({"properties":{"b":{},"a":{}}})", R"({"type":"object","properties":{"b":{},"a":{}}})"},
        {R"({"$ref":"#/$defs/a"})", R"({"$ref":"#/$defs/a"})"}}) {
    EXPECT_EQ(parse_chat(body(given), kMost).tools[0].parameters, read);
  }
  for (const char* type : {R"("array")", R"(["object", "null"])", "1"}) {
    const ApiError error = chat_error(body(std::string(R"({"type": )") + type + "}"));
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.param, "tools[0].function.parameters");
    EXPECT_THAT(error.what(), HasSubstr("object"));
  }
}

// A format holds for texts, so it may stand beside a call that must be made; a grammar may not.
TEST(OpenAi, FormatsBesideRequiredCalls) {
  const std::string begin =
      R"({"messages": [{"role": "user", "content": "a"}], "tool_choice": "required",
      "tools": [{"type": "function", "function": {"name": "f"}}], )";
  EXPECT_NO_THROW(parse_chat(begin + R"("response_format": {"type": "json_object"}})", kMost));
  EXPECT_EQ(chat_error(begin + R"("grammar": "root ::= \"a\""})").param, "tool_choice");
}

TEST(OpenAi, WhatOtherServersAnswerGoesBackIntoTheHistory) {
  EXPECT_EQ(parse_chat(R"({"messages": [{"role": "developer", "content": "s"},
                           {"role": "assistant", "content": "b", "annotations": []}]})",
                       kMost)
                .messages_json,
            R"([{"role":"system","content":"s"},{"role":"assistant","content":"b"}])");
  EXPECT_EQ(
      chat_error(R"({"messages": [{"role": "assistant", "content": "b", "annotations": [1]}]})")
          .param,
      "messages[0].annotations");
}

TEST(OpenAi, ErrorsHaveOpenAisForm) {
  EXPECT_EQ(to_text(error_json(ApiError(404, "no \"m\"", "model", "model_not_found"))),
            R"({"error":{"message":"no \"m\"","type":"not_found_error","param":"model",)"
            R"("code":"model_not_found"}})");
  EXPECT_EQ(error_json(ApiError(400, "bad"))["error"]["param"], nullptr);
}

// A token can have the text by which another one is named.
TEST(OpenAi, LogProbsOfTokensWithEqualTexts) {
  const Tokenizer tokenizer = Tokenizer::parse(R"({"model": {"type": "BPE", "merges": [],
      "vocab": {"\u00c3": 0, "b": 1}}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
      "decoder": {"type": "ByteLevel"}, "added_tokens": [
      {"id": 2, "content": "bytes:\\xc3", "special": true}]})",
                                               "the test");
  CompletionLogProbs log_probs(tokenizer);
  log_probs.add({.token = {0, -1.0f}, .top = {{2, -0.5f}, {0, -1.0f}, {1, -2.0f}}});
  EXPECT_EQ(to_text(log_probs.take()["top_logprobs"][0]),
            R"({"bytes:\\xc3":-1.0,"token:2":-0.5,"b":-2.0})");
}

TEST(OpenAi, LogProbsOfTokensThatAreNotUtf8) {
  const Tokenizer tokenizer = byte_tokenizer();
  const int32_t letter = tokenizer.find("a"), byte = tokenizer.find("\xc3");
  ASSERT_GE(letter, 0);
  ASSERT_GE(byte, 0);
  CompletionLogProbs log_probs(tokenizer);
  log_probs.add_first(letter);
  const float never = -std::numeric_limits<float>::infinity();
  log_probs.add({.token = {byte, never}, .top = {{letter, -0.5f}}});
  log_probs.add({.token = {letter, -1.0f}, .top = {}});
  EXPECT_EQ(to_text(log_probs.take()),
            R"({"tokens":["a","bytes:\\xc3","a"],"token_logprobs":[null,-9999.0,-1.0],)"
            R"("top_logprobs":[null,{"bytes:\\xc3":-9999.0,"a":-0.5},{"a":-1.0}],)"
            R"("text_offset":[0,1,2]})");
  log_probs.add({.token = {letter, -1.0f}, .top = {}});
  EXPECT_EQ(log_probs.take()["text_offset"][0], 3);
  EXPECT_EQ(to_text(chat_log_prob(tokenizer, {.token = {byte, -1.0f}, .top = {{letter, 0.0f}}})),
            R"({"token":"bytes:\\xc3","logprob":-1.0,"bytes":[195],)"
            R"("top_logprobs":[{"token":"a","logprob":0.0,"bytes":[97]}]})");
}

}  // namespace
}  // namespace twell
