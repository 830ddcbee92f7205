#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`twell serve` as its clients see it: the openai client, raw sockets, hostile requests.

Run: serve_client_test.py TWELL [unittest arguments]. Exits with 77 (skipped) where the openai client is
not installed; scripts/setup.sh --test installs it into .cache/openai-client. TWELL_MUTATIONS is the
number of hostile bodies."""

import json
import os
import pathlib
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing
import unittest

from serve_testing import Connection, ROOT, Served, in_threads, needs_clients, request_bytes

needs_clients("openai", "pydantic")
import openai
import pydantic

BINARY = sys.argv.pop(1)
MUTATIONS = int(os.environ.get("TWELL_MUTATIONS", "1000"))


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.served = Served(BINARY, "--request-seconds", "2", "--write-seconds", "2",
                            "--max-body", "100000", "--batch", "8", "--max-waiting", "64")
        cls.openai = openai.OpenAI(base_url=cls.served.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.openai.close()
        assert cls.served.stop() == 0, "the server did not end with exit code 0"

    def setUp(self):
        self.connection = Connection(self.served)

    def tearDown(self):
        self.connection.close()
        self.assertIsNone(self.served.process.poll(), "the server has ended")

    def post(self, path, body):
        return self.connection.post(path, body)

    def metric(self, name):
        text = self.connection.get("/metrics")[1]
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE).group(1))

    def wait_for_metric(self, name, value, seconds=60.0):
        """value: a number, or a condition."""
        deadline = time.monotonic() + seconds
        reached = value if callable(value) else lambda number: number == value
        while not reached(self.metric(name)):
            self.assertLess(time.monotonic(), deadline, f"{name} stays {self.metric(name)}")
            time.sleep(0.005)

    def wait_until_idle(self):
        # In this order, because the running sequences are those of the last step.
        self.wait_for_metric("twell_requests_waiting", 0)
        self.wait_for_metric("twell_requests_running", 0)

    # The openai client.

    def test_completion_equals_generate(self):
        for temperature in (0.0, 0.9):
            expected = self.served.generate("The cork", "--max-tokens", 24, "--seed", 7,
                                            "--temperature", temperature)
            answer = self.openai.completions.create(
                model="model", prompt="The cork", max_tokens=24, seed=7, temperature=temperature)
            self.assertEqual(answer.choices[0].text, expected["text"])
            self.assertEqual(answer.object, "text_completion")
            self.assertEqual(answer.usage.prompt_tokens, expected["prompt_tokens"])
            self.assertEqual(answer.usage.completion_tokens, expected["tokens"])
            self.assertEqual(answer.choices[0].finish_reason,
                             "stop" if expected["stop"] == "end of text" else "length")
            stream = self.openai.completions.create(
                model="model", prompt="The cork", max_tokens=24, seed=7, temperature=temperature,
                stream=True, stream_options={"include_usage": True})
            chunks = list(stream)
            text = "".join(c.text for chunk in chunks for c in chunk.choices)
            self.assertEqual(text, expected["text"])
            self.assertEqual(chunks[-1].usage, answer.usage)
            self.assertEqual(chunks[-1].choices, [])
            self.assertEqual(len({chunk.id for chunk in chunks}), 1)

    def test_prompts_and_choices_keep_their_order(self):
        prompts = ["One", "Two stones", "A river"]
        answer = self.openai.completions.create(model="model", prompt=prompts, n=2, seed=3,
                                                max_tokens=8, temperature=1.0)
        self.assertEqual([c.index for c in answer.choices], list(range(6)))
        for i, choice in enumerate(answer.choices):
            expected = self.served.generate(prompts[i // 2], "--max-tokens", 8,
                                            "--seed", 3 + i % 2)
            self.assertEqual(choice.text, expected["text"])
        chunks = self.openai.completions.create(model="model", prompt=prompts, n=2, seed=3,
                                                max_tokens=8, temperature=1.0, stream=True)
        texts, ends = [""] * 6, [None] * 6
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        self.assertEqual(texts, [c.text for c in answer.choices])
        self.assertEqual(ends, [c.finish_reason for c in answer.choices])

    def test_seeds_are_not_answered_from_the_cache(self):
        """What another request left in the cache may differ in rounding, so a seed's text would depend on it."""
        prompt = "The cork of a bottle floats on the river, " * 3
        cached = []
        for options in ({}, {}, {"seed": 5}, {"seed": 5}):
            for path, body in (("/v1/completions", {"prompt": prompt}),
                               ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]})):
                status, answer = self.post(path, {**body, **options, "max_tokens": 2})
                self.assertEqual(status, 200)
                usage = answer["usage"]
                self.assertGreater(usage["prompt_tokens"], 64)  # more than a block
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        self.assertEqual([n > 0 for n in cached[2:4]], [True, True])
        self.assertEqual(cached[4:], [0] * 4)

    def test_token_ids_as_prompts(self):
        ids = self.post("/tokenize", {"prompt": "A river"})[1]["tokens"]
        by_text, by_ids, by_list = (self.post("/v1/completions", {
            "prompt": prompt, "temperature": 0, "max_tokens": 6})[1]["choices"][0]
            for prompt in ("A river", ids, [ids]))
        self.assertEqual(by_text, by_ids)
        self.assertEqual(by_text, by_list)

    def test_stop_strings(self):
        whole = self.served.generate("Where", "--max-tokens", 30, "--temperature", 0)["text"]
        stop = whole[4:7]
        for stream in (False, True):
            answer = self.openai.completions.create(model="model", prompt="Where", max_tokens=30,
                                                    temperature=0, stop=[stop], stream=stream)
            chunks = list(answer) if stream else [answer]
            self.assertEqual("".join(c.choices[0].text for c in chunks), whole.split(stop)[0])
            self.assertEqual(chunks[-1].choices[0].finish_reason, "stop")

    def test_chat(self):
        messages = [{"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        expected = self.served.generate("s:s\nu:Hi\na:", "--no-bos", "--max-tokens", 12,
                                        "--seed", 5)
        answer = self.openai.chat.completions.create(
            model="model", messages=messages, seed=5, max_completion_tokens=12, logprobs=True,
            top_logprobs=3)
        choice = answer.choices[0]
        self.assertEqual(choice.message.content, expected["text"])
        self.assertEqual(choice.message.role, "assistant")
        self.assertEqual(answer.usage.prompt_tokens, expected["prompt_tokens"])
        for token in choice.logprobs.content:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertLessEqual(token.logprob, token.top_logprobs[0].logprob)
            self.assertGreaterEqual(token.top_logprobs[0].logprob, token.top_logprobs[1].logprob)
        stream = self.openai.chat.completions.create(
            model="model", messages=messages, seed=5, max_completion_tokens=12, logprobs=True,
            top_logprobs=3, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks[:-1]),
                         expected["text"])
        self.assertEqual([t for c in chunks[:-1] for t in c.choices[0].logprobs.content],
                         choice.logprobs.content)
        self.assertEqual(chunks[-1].usage, answer.usage)

    def test_responses(self):
        create = self.openai.responses.create
        chat = self.openai.chat.completions.create(
            model="model", temperature=0, max_tokens=12,
            messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}])
        whole = create(model="model", instructions="Be brief", input="Hi", max_output_tokens=12, temperature=0)
        self.assertEqual(whole.output_text, chat.choices[0].message.content)
        self.assertEqual(whole.usage.input_tokens, chat.usage.prompt_tokens)
        self.assertEqual(whole.usage.output_tokens, chat.usage.completion_tokens)
        self.assertEqual(whole.status, "completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
        events = list(create(model="model", instructions="Be brief", input=[{"role": "user", "content": "Hi"}],
                             max_output_tokens=12, temperature=0, stream=True))
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        types = [event.type for event in events]
        self.assertEqual(types[:4], ["response.created", "response.in_progress", "response.output_item.added",
                                     "response.content_part.added"])
        self.assertEqual(set(types[4:-4]), {"response.output_text.delta"})
        self.assertEqual(types[-4:], ["response.output_text.done", "response.content_part.done",
                                      "response.output_item.done", "response." + whole.status])
        self.assertEqual("".join(e.delta for e in events if e.type == "response.output_text.delta"),
                         whole.output_text)
        self.assertEqual(events[-1].response.output_text, whole.output_text)
        self.assertEqual(events[-1].response.usage.output_tokens, whole.usage.output_tokens)
        with self.openai.responses.stream(model="model", input="Hi", max_output_tokens=3) as stream:
            self.assertIn([event.type for event in stream][-1], ("response.completed", "response.incomplete"))
        # An answer goes back into the history as it came.
        again = create(model="model", max_output_tokens=4, input=[
            {"role": "user", "content": "Hi"}, *[item.model_dump() for item in whole.output],
            {"role": "user", "content": "And?"}])
        self.assertGreater(again.usage.input_tokens, whole.usage.input_tokens)
        logged = create(model="model", input="Hi", max_output_tokens=4, top_logprobs=2,
                        include=["message.output_text.logprobs"])
        self.assertEqual(len(logged.output[0].content[0].logprobs[0].top_logprobs), 2)
        for fields, param in (({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
                              ({"input": []}, "input"), ({"input": "a " * 200}, "input")):
            with self.assertRaises(openai.BadRequestError) as raised:
                create(**{"model": "model", "input": "Hi", **fields})
            self.assertEqual(raised.exception.param, param)

    def test_answers_go_back_into_the_history(self):
        """With a null in every field that was not used."""
        history = [{"role": "user", "content": "a"}]
        for _ in range(2):
            answer = self.openai.chat.completions.create(model="model", messages=history, max_tokens=4)
            message = answer.choices[0].message.model_dump()
            self.assertIn("refusal", answer.choices[0].message.model_fields_set)
            history += [message, {"role": "user", "content": "b", "name": None}]
        status, _ = self.post("/v1/chat/completions", {
            "messages": history, "max_tokens": 1, "function_call": None, "audio": None, "unknown": None})
        self.assertEqual(status, 200)
        chunks = list(self.openai.chat.completions.create(model="model", messages=history,
                                                          max_tokens=2, stream=True))
        self.assertIn("refusal", chunks[0].choices[0].delta.model_fields_set)

    def test_no_text_exceeds_the_context(self):
        for count in (1, 60, 94, 95):
            ids = self.post("/tokenize", {"prompt": "a" * 200})[1]["tokens"][:count]
            status, answer = self.post("/v1/completions", {
                "prompt": ids, "max_tokens": 1000, "ignore_eos": True, "min_p": 1})
            self.assertEqual(status, 200)
            self.assertEqual(answer["usage"]["total_tokens"], 96)
            self.assertEqual(answer["choices"][0]["finish_reason"], "length")

    def test_errors_of_the_client(self):
        create = self.openai.completions.create
        with self.assertRaises(openai.NotFoundError) as raised:
            create(model="other", prompt="a")
        self.assertEqual(raised.exception.code, "model_not_found")
        for fields, word in (({"temperature": -1}, "temperature"), ({"n": 0}, "n"),
                             ({"suffix": "end"}, "suffix"), ({"logprobs": 21}, "logprobs"),
                             ({"presence_penalty": 3}, "presence_penalty"), ({"best_of": 3}, "best_of"),
                             ({"extra_body": {"temprature": 1}}, "temprature"),
                             ({"prompt": [1, 400]}, "token 400"), ({"prompt": []}, "prompt"),
                             ({"prompt": "a " * 100}, "too long"), ({"n": 65}, "64"),
                             ({"stop": [""]}, "stop"), ({"max_tokens": 0}, "max_tokens")):
            with self.assertRaises(openai.BadRequestError) as raised:
                create(**{"model": "model", "prompt": "a", **fields})
            self.assertIn(word, raised.exception.message)
            self.assertEqual(raised.exception.type, "invalid_request_error")
        for fields, param, word in (
                ({"response_format": {"type": "json_schema", "json_schema": {
                    "name": "n", "schema": {"type": "object", "properties": {"a": {"not": {"const": 1}}}}}}},
                 "response_format", '"not" is not supported at "/properties/a/not"'),
                ({"extra_body": {"grammar": "root ::= missing"}}, "grammar", "missing"),
                ({"tools": [tool("f", {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}})],
                  "tool_choice": "required"}, "tools", 'function "f"')):
            with self.assertRaises(openai.BadRequestError) as raised:
                self.openai.chat.completions.create(
                    model="model", messages=[{"role": "user", "content": "a"}], **fields)
            self.assertEqual(raised.exception.param, param)
            self.assertIn(word, raised.exception.message)

    # Structured output and tools. The test model is not trained, so an answer may be cut off.

    def until_ended(self, ask):
        """The first answer of several seeds that ended by itself."""
        for seed in range(40):
            choice = ask(seed).choices[0]
            if choice.finish_reason != "length":
                return choice
        self.fail("no answer has ended by itself")

    def test_structured_output(self):
        class Answer(pydantic.BaseModel):
            number: int = pydantic.Field(ge=0, le=9)
            color: typing.Literal["red", "blue"]

        messages = [{"role": "user", "content": "a"}]
        for seed in range(40):
            try:
                parsed = self.openai.chat.completions.parse(
                    model="model", messages=messages, response_format=Answer, seed=seed)
                break
            except openai.LengthFinishReasonError:
                continue
        self.assertIsInstance(parsed.choices[0].message.parsed, Answer)
        self.assertEqual(list(json.loads(parsed.choices[0].message.content)), ["number", "color"])
        choice = self.until_ended(lambda seed: self.openai.chat.completions.create(
            model="model", messages=messages, response_format={"type": "json_object"}, seed=seed,
            max_tokens=60))
        self.assertIsInstance(json.loads(choice.message.content), dict)
        for seed in range(20):  # a response of a model with random weights may be cut off
            response = self.openai.responses.parse(
                model="model", input="Hi", text_format=Answer, extra_body={"seed": seed}, max_output_tokens=200)
            if response.status == "completed":
                break
        self.assertIsInstance(response.output_parsed, Answer)
        self.assertEqual(response.text.format.type, "json_schema")
        # Every choice has a state of its own, and log-probabilities are those without a mask.
        grammar = {"grammar": 'root ::= ("ab" | "cd") [0-9]{2}'}
        answer = self.openai.completions.create(
            model="model", prompt=["x", "y"], n=4, max_tokens=10, logprobs=2, extra_body=grammar)
        for choice in answer.choices:
            self.assertRegex(choice.text, r"^(ab|cd)\d\d$")
            self.assertEqual(choice.finish_reason, "stop")
        first = answer.choices[0].logprobs
        free = self.openai.completions.create(
            model="model", prompt="x" + answer.choices[0].text, max_tokens=0, logprobs=2,
            extra_body={"echo": True}).choices[0].logprobs
        if free.tokens[-len(first.tokens) + 1:] == first.tokens[:-1]:
            for got, want in zip(first.token_logprobs, free.token_logprobs[-len(first.tokens) + 1:]):
                self.assertAlmostEqual(got, want, places=3)

    def test_a_slow_grammar_holds_nobody(self):
        """One that takes long to compile, and behind it more than the server has threads for requests."""
        self.wait_until_idle()
        for alternatives in (400, 1600, 2400):  # enough for one that is not compiled before the ordinary answer
            slow = "root ::= " + " | ".join(f'([a-z] | "b"? [c-x])* "{i}"' for i in range(alternatives))
            waiting = []
            for i, grammar in enumerate([slow] + [f'root ::= "{alternatives + i}"' for i in range(9)]):
                waiting.append(Connection(self.served, 60))
                self.addCleanup(waiting[-1].close)
                waiting[-1].send(request_bytes("POST", "/v1/completions", {
                    "prompt": "a", "max_tokens": 3, "stream": i % 2 == 1, "grammar": grammar}))
            self.assertEqual(self.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
            answered, _, _ = select.select([waiting[0].socket], [], [], 0)
            for one in waiting:
                status, _, text = one.reply()
                self.assertEqual(status, 200, text)
            if not answered:
                return
        self.fail("an ordinary request was never answered before a grammar that takes long to compile")

    def test_tools(self):
        tools = [tool("look", {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}),
                 tool("say", {"type": "object", "properties": {"t": {"enum": ["a", "b"]}}, "required": ["t"]})]
        messages = [{"role": "user", "content": "a"}]

        def ask(seed, **options):
            return self.openai.chat.completions.create(
                model="model", messages=messages, tools=tools, seed=seed, parallel_tool_calls=False, **options)

        choice = self.until_ended(lambda seed: ask(seed, tool_choice="required"))
        self.assertEqual(choice.finish_reason, "tool_calls")
        self.assertIsNone(choice.message.content)
        [call] = choice.message.tool_calls
        self.assertIn((call.function.name, *json.loads(call.function.arguments).items()),
                      [("look", ("n", 1)), ("look", ("n", 22)), ("say", ("t", "a")), ("say", ("t", "b"))])
        named = self.until_ended(lambda seed: ask(
            seed, tool_choice={"type": "function", "function": {"name": "say"}}))
        self.assertEqual(named.message.tool_calls[0].function.name, "say")
        # The same as a stream: the name first, then the arguments in pieces.
        for seed in range(40):
            chunks = list(ask(seed, tool_choice="required", stream=True))
            if chunks[-1].choices[0].finish_reason != "length":
                break
        self.assertEqual(chunks[-1].choices[0].finish_reason, "tool_calls")
        pieces = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
        self.assertTrue(pieces[0].id and pieces[0].function.name in ("look", "say"))
        self.assertGreater(len(pieces), 1)
        self.assertTrue(all(p.id is None and p.function.name is None and p.index == 0 for p in pieces[1:]))
        self.assertIn(json.loads("".join(p.function.arguments for p in pieces)),
                      ({"n": 1}, {"n": 22}, {"t": "a"}, {"t": "b"}))
        # The call and its result go back.
        messages += [choice.message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        ids = self.post("/tokenize", {"messages": messages})[1]["tokens"]
        text = self.post("/detokenize", {"tokens": ids})[1]["prompt"]
        self.assertIn(f"<tool_call>{call.function.name}", text)
        self.assertIn("t:7\n", text)
        self.assertIn(ask(1, max_tokens=4).choices[0].finish_reason, ("length", "stop"))

    def test_tools_beside_a_format(self):
        """An answer by a format may call a tool all the same, and one that must call has no text."""
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}
        tools = [tool("look", {"properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False})]
        seen = set()
        for seed in range(60):
            choice = self.openai.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "a"}], tools=tools, seed=seed,
                response_format=schema, parallel_tool_calls=False).choices[0]
            seen.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                self.assertIn(json.loads(choice.message.content), ("a", "b"))
            elif choice.finish_reason == "tool_calls":
                [call] = choice.message.tool_calls
                self.assertIsInstance(json.loads(call.function.arguments), dict)
            if {"stop", "tool_calls"} <= seen:
                break
        self.assertLessEqual({"stop", "tool_calls"}, seen)
        required = self.until_ended(lambda seed: self.openai.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "a"}], tools=tools, seed=seed,
            response_format=schema, tool_choice="required", parallel_tool_calls=False))
        self.assertEqual(json.loads(required.message.tool_calls[0].function.arguments), {"n": 1})
        for most in range(1, 12):  # cut off within the call
            cut = self.openai.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "a"}], tools=tools, tool_choice="required",
                seed=1, max_tokens=most).choices[0]
            self.assertEqual((cut.finish_reason, cut.message.content or ""), ("length", ""))
        # A stop text within the arguments ends the answer; the client is not told to make the call.
        text = '<tool_call>{"name": "look", "arguments": {"n": "abc"}}</tool_call>'
        for stop, reason in ((["bc"], "stop"), (["</tool"], "tool_calls")):
            cut = self.openai.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "a"}], tools=tools, stop=stop,
                extra_body={"grammar": f"root ::= {json.dumps(text)}"}).choices[0]
            self.assertEqual(cut.finish_reason, reason)
            self.assertEqual(cut.message.tool_calls[0].function.arguments[:8], '{"n": "a')

    def test_tools_in_responses(self):
        tools = [{"type": "function", "name": name, "strict": False, "parameters": {
            "type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}} for name in ("look", "say")]
        history = [{"role": "user", "content": "a"}]

        def ask(seed, **options):
            return self.openai.responses.create(**{
                "model": "model", "input": history, "tools": tools, "tool_choice": "required",
                "parallel_tool_calls": False, "extra_body": {"seed": seed}, **options})

        whole = next(found for found in map(ask, range(40)) if found.status == "completed")
        [call] = whole.output
        self.assertEqual((call.type, call.status), ("function_call", "completed"))
        self.assertIn(call.name, ("look", "say"))
        self.assertIn(json.loads(call.arguments), ({"n": 1}, {"n": 22}))
        named = ask(1, tool_choice={"type": "function", "name": "say"})
        self.assertEqual({item.name for item in named.output if item.type == "function_call"} - {"say"}, set())
        self.assertEqual(named.tool_choice.name, "say")
        for seed in range(40):
            with self.openai.responses.stream(model="model", input=history, tools=tools, tool_choice="required",
                                              parallel_tool_calls=False, extra_body={"seed": seed}) as stream:
                events = list(stream)
                last = stream.get_final_response()
            if last.status == "completed":
                break
        types = [event.type for event in events]
        self.assertEqual(types[:3], ["response.created", "response.in_progress", "response.output_item.added"])
        self.assertEqual(set(types[3:-3]), {"response.function_call_arguments.delta"})
        self.assertEqual(types[-3:], ["response.function_call_arguments.done", "response.output_item.done",
                                      "response.completed"])
        self.assertEqual("".join(event.delta for event in events[3:-3]), last.output[0].arguments)
        self.assertEqual(events[-3].arguments, last.output[0].arguments)
        # The call goes back as it came, with its result.
        history += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
        again = ask(1, tool_choice="none", max_output_tokens=4)
        self.assertEqual(again.output[0].type, "message")
        chat = self.openai.chat.completions.create(model="model", max_tokens=4, messages=[
            history[0], {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": {
                "name": call.name, "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "7"}])
        self.assertEqual(again.usage.input_tokens, chat.usage.prompt_tokens)

    def test_biases(self):
        plain = self.openai.completions.create(model="model", prompt="The cork", max_tokens=8,
                                               temperature=0, logprobs=2)
        tokens = self.post("/tokenize", {"prompt": plain.choices[0].text,
                                         "add_special_tokens": False})[1]["tokens"]
        for bias in ({str(tokens[0]): -100}, [[tokens[0], -100]],
                     [[plain.choices[0].logprobs.tokens[0], -100]]):
            answer = self.openai.completions.create(
                model="model", prompt="The cork", max_tokens=1, temperature=0, logprobs=2,
                extra_body={"logit_bias": bias})
            found = answer.choices[0].logprobs
            self.assertNotEqual(found.tokens[0], plain.choices[0].logprobs.tokens[0])
            # Log-probabilities stay the model's.
            self.assertEqual(found.top_logprobs[0][plain.choices[0].logprobs.tokens[0]],
                             plain.choices[0].logprobs.token_logprobs[0])
        answer = self.openai.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, seed=1,
            logit_bias={str(tokens[0]): 100})
        self.assertEqual(answer.choices[0].message.content,
                         4 * self.post("/detokenize", {"tokens": [tokens[0]]})[1]["prompt"])
        for bias, word in (({"400": 1}, "token 400"), ({"1": 101}, "101"), ({"x": "y"}, "y"),
                           ([[1, 1]] * 1025, "1024")):
            with self.assertRaises(openai.BadRequestError) as raised:
                self.openai.completions.create(model="model", prompt="a", extra_body={"logit_bias": bias})
            self.assertEqual(raised.exception.param, "logit_bias")
            self.assertIn(word, raised.exception.message)

    def test_penalties_equal_generate(self):
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            expected = self.served.generate("The cork", "--max-tokens", 24, "--temperature", 0,
                                            "--" + name.replace("_", "-"), 1.5)
            answer = self.post("/v1/completions", {"prompt": "The cork", "max_tokens": 24,
                                                   "temperature": 0, name: 1.5})[1]
            self.assertEqual(answer["choices"][0]["text"], expected["text"])

    def test_fingerprint(self):
        first = self.openai.completions.create(model="model", prompt="a", max_tokens=1)
        self.assertRegex(first.model_extra["system_fingerprint"]
                         if first.model_extra and "system_fingerprint" in first.model_extra
                         else first.system_fingerprint, "^fp_[0-9a-f]{12}$")
        chunks = self.openai.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, stream=True)
        self.assertEqual({chunk.system_fingerprint for chunk in chunks}, {first.system_fingerprint})
        for options, equal in (((), True), (("--ffn", "dense"), False), (("--cache-8bit",), False)):
            other = Served(BINARY, *options)
            with openai.OpenAI(base_url=other.url + "/v1", api_key="none") as client:
                found = client.completions.create(model="model", prompt="a", max_tokens=1)
            self.assertEqual(found.system_fingerprint == first.system_fingerprint, equal, options)
            self.assertEqual(other.stop(), 0)

    def test_models(self):
        self.assertEqual([m.id for m in self.openai.models.list()], ["model"])
        self.assertEqual(self.openai.models.retrieve("model").id, "model")
        with self.assertRaises(openai.NotFoundError):
            self.openai.models.retrieve("no/such")

    # Log-probabilities.

    def test_log_probabilities(self):
        generated = self.served.generate("The cork", "--max-tokens", 8, "--temperature", 0,
                                         "--log-probs")
        body = {"prompt": "The cork", "max_tokens": 8, "temperature": 0, "logprobs": 2}
        choice = self.post("/v1/completions", body)[1]["choices"][0]
        values = choice["logprobs"]
        for got, expected in zip(values["token_logprobs"], generated["log_probs"], strict=False):
            self.assertAlmostEqual(got, expected, delta=1e-3)
        names = values["tokens"][:len(generated["ids"])]
        text = b"".join(bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:")
                        else name.encode() for name in names)
        self.assertEqual(text.decode(errors="replace"), choice["text"])
        for top, token, value in zip(values["top_logprobs"], values["tokens"],
                                     values["token_logprobs"], strict=True):
            self.assertEqual(top[token], value)
            self.assertEqual(max(top.values()), value)
            self.assertGreaterEqual(len(top), 2)
        echoed = self.post("/v1/completions", {**body, "echo": True})[1]["choices"][0]
        self.assertEqual(echoed["text"], "The cork" + choice["text"])
        self.assertIsNone(echoed["logprobs"]["token_logprobs"][0])
        self.assertEqual(echoed["logprobs"]["tokens"][-len(values["tokens"]):], values["tokens"])
        offsets = echoed["logprobs"]["text_offset"]
        self.assertEqual(offsets, sorted(offsets))
        only_prompt = self.post("/v1/completions", {**body, "echo": True, "max_tokens": 0})[1]
        count = len(echoed["logprobs"]["tokens"]) - len(values["tokens"])
        self.assertEqual(only_prompt["choices"][0]["logprobs"]["tokens"],
                         echoed["logprobs"]["tokens"][:count])
        self.assertEqual(only_prompt["usage"]["completion_tokens"], 0)

    def test_log_likelihoods_equal_eval(self):
        """The requests of lm-evaluation-harness's local-completions."""
        scores = self.served.folder / "scores"
        subprocess.run([BINARY, "eval", "--checkpoint", self.served.checkpoint, "--tasks",
                        "arc_challenge", "--task-data", ROOT / "tests/golden/tasks/data", "--out",
                        scores, "--device", "cpu", "--threads", "1"], check=True,
                       capture_output=True)
        lines = (scores / "arc_challenge.jsonl").read_text().splitlines()[1:]
        items = (ROOT / "tests/golden/tasks/data/arc_challenge.jsonl").read_text().splitlines()
        compared = 0
        for line, item in zip(lines, map(json.loads, items), strict=True):
            expected = json.loads(line)["log_likelihoods"]
            context = f"Question: {item['question']}\nAnswer:"
            context_length = self.post("/tokenize", {"prompt": context})[1]["count"]
            prompts = [self.post("/tokenize", {"prompt": f"{context} {text}"})[1]["tokens"]
                       for text in item["choices"]["text"]]
            if max(map(len, prompts)) > 95:
                continue  # the harness and eval cut such a prompt differently
            for max_tokens in (0, 1):
                status, answer = self.post("/v1/completions", {
                    "model": "model", "prompt": prompts, "temperature": 0, "echo": True,
                    "max_tokens": max_tokens, "logprobs": 1, "seed": 1234})
                self.assertEqual(status, 200, answer)
                for choice, value in zip(answer["choices"], expected, strict=True):
                    values = choice["logprobs"]["token_logprobs"]
                    end = len(values) - max_tokens
                    self.assertAlmostEqual(sum(values[context_length:end]), value, delta=1e-3)
                    compared += 1
        self.assertGreaterEqual(compared, 16)

    # Other endpoints.

    def test_tokenize_and_back(self):
        text = "The river \u2013 4 \u00b0C\n"
        status, answer = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        self.assertEqual((status, answer["count"], answer["max_model_len"]),
                         (200, len(answer["tokens"]), 96))
        self.assertEqual(self.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"], text)
        with_begin = self.post("/tokenize", {"prompt": text})[1]["tokens"]
        self.assertEqual(with_begin[1:], answer["tokens"])
        chat = self.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]
        self.assertEqual(self.post("/detokenize", {"tokens": chat["tokens"]})[1]["prompt"],
                         "u:Hi\na:")
        tools = [{"type": "function", "function": {"name": "look"}}]
        for more, prompt in (({"tools": tools}, "u:Hi\nlook a:"), ({"tools": []}, "u:Hi\na:"),
                             ({"tools": tools, "tool_choice": "none"}, "u:Hi\na:"),
                             ({"add_generation_prompt": False}, "u:Hi\n"),
                             ({"chat_template_kwargs": {"mood": "calm ", "messages": []}}, "u:Hi\ncalm a:")):
            chat = {"messages": [{"role": "user", "content": "Hi"}], **more}
            tokens = self.post("/tokenize", chat)[1]["tokens"]
            self.assertEqual(self.post("/detokenize", {"tokens": tokens})[1]["prompt"], prompt)
            if "add_generation_prompt" not in more:
                answer = self.post("/v1/chat/completions", {**chat, "max_tokens": 1})[1]
                self.assertEqual(answer["usage"]["prompt_tokens"], len(tokens))
        self.assertEqual(self.post("/v1/chat/completions", {**chat, "chat_template_kwargs": "mood"})[0], 400)
        self.assertEqual(self.post("/tokenize", {"prompt": "a", "tools": tools})[0], 400)
        self.assertEqual(self.post("/detokenize", {"tokens": [-1]})[0], 400)
        self.assertEqual(self.post("/detokenize", {"tokens": [400]})[0], 400)

    def test_health_metrics_activity_page(self):
        self.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        self.assertEqual(self.connection.get("/health"), (200, '{"status":"ok"}'))
        text = self.connection.get("/metrics")[1]
        for line in text.splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) twell_\w+ .+|twell_\w+(\{.*\})? [-+0-9.e]+)$')
        self.assertGreaterEqual(self.metric("twell_generated_tokens_total"), 3)
        self.assertGreater(self.metric('twell_active_neurons{layer="1"}'), 0)
        self.assertGreater(self.metric('twell_time_to_first_token_seconds_bucket{le="+Inf"}'), 0)
        room = sum(self.metric(f'twell_cache_tokens{{use="{use}"}}')
                   for use in ("sequences", "prefixes", "free"))
        self.assertGreaterEqual(room, 8 * 96)
        activity = json.loads(self.connection.get("/activity")[1])
        self.assertEqual(len(activity["layers"]), 2)
        self.assertEqual(self.connection.get("/")[1],
                         (ROOT / "twell/serve/page.html").read_text())

    def test_other_paths_and_methods(self):
        for method, path, status in (("GET", "/nothing", 404), ("POST", "/health", 405),
                                     ("GET", "/v1/completions", 405), ("PUT", "/metrics", 405),
                                     ("OPTIONS", "/v1/completions", 405),
                                     ("GET", "/../../etc/passwd", 404)):
            connection = Connection(self.served)
            connection.send(request_bytes(method, path))
            got, headers, body = connection.reply()
            self.assertEqual(got, status, path)
            self.assertIn("message", json.loads(body)["error"])
            self.assertEqual(connection.head()[0], None)  # closed
            connection.close()
        self.connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                             b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}")
        self.assertEqual(self.connection.reply()[0], 415)

    # Limits.

    def test_limits_of_sizes(self):
        big = b'{"prompt": "' + b"a" * 200000 + b'"}'
        connection = Connection(self.served)
        connection.send(request_bytes("POST", "/v1/completions", big))
        self.assertEqual(connection.reply()[0], 413)
        connection.close()
        connection = Connection(self.served)  # the same without a length
        connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" %
                        (len(big), big))
        self.assertEqual(connection.reply()[0], 413)
        connection.close()
        connection = Connection(self.served)
        try:
            connection.send(b"GET /health HTTP/1.1\r\n" + b"X-Flood: 1\r\n" * 100000)
            self.assertIn(connection.head()[0], (400, None))
        except ConnectionError:
            pass  # closed before the flood's end
        connection.close()
        self.assertEqual(self.connection.get("/health")[0], 200)

    def test_compressed_bomb(self):
        import gzip
        bomb = gzip.compress(b'{"prompt": "' + b"a" * 50_000_000 + b'"}')
        self.assertLess(len(bomb), 100000)
        self.connection.send(request_bytes("POST", "/v1/completions", bomb,
                                           ["Content-Encoding: gzip"]))
        self.assertEqual(self.connection.reply()[0], 413)

    def test_slow_clients(self):
        """A request that comes byte by byte ends after --request-seconds."""
        slow = Connection(self.served)
        start = time.monotonic()
        try:
            for byte in request_bytes("GET", "/health") * 100:
                slow.send(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            pass
        self.assertLess(time.monotonic() - start, 15)
        slow.close()
        self.assertEqual(self.connection.get("/health")[0], 200)

    def test_clients_that_do_not_read(self):
        """The connection ends --write-seconds after the client stopped reading a long answer."""
        connection = Connection(self.served)
        # Buffers of the kernel that grow as they like can take all of the answer.
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.send(request_bytes("POST", "/v1/completions", {
            "prompt": ["a"] * 64, "max_tokens": 90, "ignore_eos": True, "stream": True,
            "logprobs": 20}, ["Connection: close"]))
        connection.head()
        self.wait_until_idle()
        time.sleep(3)
        data = b"".join(iter(lambda: connection.file.read1(1 << 20), b""))
        self.assertNotIn(b"[DONE]", data)
        connection.close()

    def test_too_many_sequences(self):
        status, answer = self.post("/v1/completions", {"prompt": ["a"] * 64, "n": 2})
        self.assertEqual(status, 400)
        statuses = []
        all_ready = threading.Barrier(8)

        def work(_):
            connection = Connection(self.served)
            all_ready.wait()
            statuses.append(connection.post("/v1/completions", {
                "prompt": ["a"] * 40, "max_tokens": 60, "ignore_eos": True})[0])
            connection.close()

        in_threads(8, work)
        # The queue has room for the sequences of one request, and never takes a part of them.
        self.assertEqual(set(statuses), {200, 503})
        self.wait_until_idle()

    # A closed connection.

    def test_closed_connections_cancel(self):
        for stream in (True, False):
            cancelled = self.metric('twell_requests_ended_total{reason="cancelled"}')
            connections = []
            for _ in range(8):
                connection = Connection(self.served)
                connection.send(request_bytes("POST", "/v1/completions", {
                    "prompt": ["a"] * 8, "max_tokens": 90, "ignore_eos": True,
                    "stream": stream}))
                connections.append(connection)
            if stream:
                connections[0].head()
                next(connections[0].pieces())
            else:
                self.wait_for_metric("twell_requests_waiting", lambda waiting: waiting > 0)
            for connection in connections:
                connection.close()
            ended = 'twell_requests_ended_total{reason="cancelled"}'
            self.wait_for_metric(ended, lambda count: count > cancelled)
            self.wait_until_idle()

    def test_random_cancellations_cross_no_answers(self):
        """Beside requests that are dropped, every other one gets its own answer."""
        seeds = range(6)
        expected = [self.served.generate("The", "--max-tokens", 20, "--seed", seed)["text"]
                    for seed in seeds]

        def work(i):
            rng = random.Random(i)
            for _ in range(12):
                seed = rng.choice(seeds)
                connection = Connection(self.served)
                body = {"prompt": "The", "max_tokens": 20, "seed": seed,
                        "stream": rng.random() < 0.5}
                connection.send(request_bytes("POST", "/v1/completions", body))
                if rng.random() < 0.4:
                    time.sleep(rng.random() * 0.02)
                    connection.close()
                    continue
                status, _, text = connection.reply()
                connection.close()
                self.assertEqual(status, 200)
                if body["stream"]:
                    events = [line[6:] for line in text.decode().split("\n\n") if line]
                    self.assertEqual(events.pop(), "[DONE]")
                    got = "".join(json.loads(event)["choices"][0]["text"] for event in events)
                else:
                    got = json.loads(text)["choices"][0]["text"]
                self.assertEqual(got, expected[seed])

        in_threads(8, work)

    # Hostile bodies.

    def test_load_client_counts_every_token(self):
        # One request at a time, so the rate of tokens is that of the server's own counter.
        with tempfile.TemporaryDirectory() as folder:
            rows = pathlib.Path(folder) / "rows.jsonl"
            command = [sys.executable, ROOT / "bench/serve_throughput.py", "--url",
                       self.served.url, "--seconds", "1.5", "--prompt-tokens", "8", "--new-tokens",
                       "16", "--first-id", "0", "--last-id", "90", "--json", rows]
            before = self.metric("twell_generated_tokens_total")
            for load in (["--concurrency", "1", "--label", "dense"],
                         ["--concurrency", "3", "--label", "auto", "--processes", "2"],
                         ["--rate", "20"]):
                subprocess.run([*command, *load], check=True, stdout=subprocess.DEVNULL)
            generated = self.metric("twell_generated_tokens_total") - before
            one, three, open_loop = map(json.loads, rows.read_text().splitlines())
            self.assertLessEqual(16 * (one["requests"] + three["requests"] + open_loop["requests"]),
                                 generated)
            self.assertAlmostEqual(one["tokens_per_s"] * one["seconds"] / 16, 0.8 * one["requests"],
                                   delta=0.5 * one["requests"] + 2)
            self.assertEqual(one["unit"], "requests at a time")
            self.assertLessEqual(three["first_token_ms_p50"], three["first_token_ms_p95"])
            self.assertGreater(open_loop["requests"], 0)
            shown = subprocess.run([sys.executable, ROOT / "bench/plot_serve.py", rows,
                                    rows.with_suffix(".svg")], check=True, capture_output=True,
                                   text=True).stdout
            self.assertIn("between tokens", shown)
            self.assertIn("<svg", rows.with_suffix(".svg").read_text())

    def test_mutated_bodies(self):
        """Every mutated body is answered with 4xx or a valid answer."""
        rng = random.Random(11)
        paths = {
            "/v1/completions": [
                {"prompt": "The river", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9,
                 "seed": 1, "stop": ["x"], "logprobs": 1, "echo": True, "n": 2, "stream": False},
                {"prompt": [[3, 4, 5], [6, 7]], "max_tokens": 1, "stream": True,
                 "stream_options": {"include_usage": True}, "top_k": 4, "min_p": 0.1}],
            "/v1/chat/completions": [
                {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2,
                 "logprobs": True, "top_logprobs": 2, "stream": False}],
            "/tokenize": [{"prompt": "abc", "add_special_tokens": True}],
            "/detokenize": [{"tokens": [1, 2, 3]}],
        }
        values = ["null", "-1", "1e999", "18446744073709551616", '"\\ud800"', "[]", "{}", "0.5",
                  "[[[[[[[[]]]]]]]]", "true", '"a"', "9" * 40, "[1e400]", "\"" + "z" * 3000 + "\""]
        pieces = [b"\x00", b"\xff", b"{", b"}", b"[" * 500, b'"', b",", b":", b"\\", b"e",
                  b"nan", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80"]
        statuses = {}
        connection = Connection(self.served)
        for _ in range(MUTATIONS):
            path = rng.choice(list(paths))
            body = dict(rng.choice(paths[path]))
            if rng.random() < 0.5:  # another value in a field
                field = rng.choice(list(body))
                text = json.dumps({**body, field: "@"}).replace('"@"', rng.choice(values))
                mutated = text.encode("utf-8", "surrogatepass")
            else:  # other bytes
                mutated = bytearray(json.dumps(body).encode())
                for _ in range(rng.randint(1, 4)):
                    at = rng.randrange(len(mutated) + 1)
                    kind = rng.random()
                    if kind < 0.4:
                        mutated[at:at + rng.randint(0, 9)] = rng.choice(pieces)
                    elif kind < 0.7:
                        del mutated[at:at + rng.randint(1, 9)]
                    elif at < len(mutated):
                        mutated[at] ^= 1 << rng.randrange(8)
                mutated = bytes(mutated)
            connection.send(request_bytes("POST", path, mutated))
            status, headers, reply = connection.reply()
            statuses[status] = statuses.get(status, 0) + 1
            self.assertTrue(status == 200 or status in (400, 404), (status, path, mutated, reply))
            if headers["content-type"].startswith("application/json"):
                answer = json.loads(reply)
                self.assertEqual("error" in answer, status != 200)
        connection.close()
        print(f"{MUTATIONS} mutated bodies, replies by status: {statuses}")
        self.wait_until_idle()

    def test_mutated_requests(self):
        """Every mutated request line or header is answered or the connection closed."""
        rng = random.Random(12)
        whole = request_bytes("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1},
                              ["Range: bytes=0-1", "Expect: 100-continue", "Accept: */*",
                               "Connection: keep-alive"])
        for _ in range(MUTATIONS // 5):
            mutated = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(whole.index(b"\r\n\r\n") + 4)
                mutated[at:at + rng.randint(0, 5)] = bytes(
                    rng.randrange(256) for _ in range(rng.randint(0, 5)))
            connection = Connection(self.served)
            connection.send(bytes(mutated))
            connection.socket.shutdown(1)
            self.assertIn(connection.head()[0], (None, 100, 200, 400, 403, 404, 405, 413, 414, 415, 416,
                                                 417, 499), mutated)
            connection.close()
        self.assertEqual(self.connection.get("/health")[0], 200)


class OtherServersTest(unittest.TestCase):
    def test_api_keys(self):
        keys = pathlib.Path(tempfile.mkdtemp(prefix="twell-keys-")) / "keys"
        keys.write_text("# of the tests\nfirst-key\nsecond-key\n")
        served = Served(BINARY, "--api-key-file", keys)
        connection = Connection(served)
        for key, status in ((None, 401), ("", 401), ("first", 401), ("first-keyy", 401),
                            ("second-key", 200)):
            scheme = "bEARER" if status == 200 else "Bearer"
            headers = [] if key is None else [f"Authorization: {scheme} {key}"]
            self.assertEqual(connection.get("/v1/models", headers)[0], status, key)
            if status != 200:
                connection.close()
                connection = Connection(served)
        for header, status in (("X-Api-Key: second-key", 200), ("x-api-key: second", 401),
                               ("X-Api-Key: Bearer second-key", 401)):
            self.assertEqual(connection.get("/v1/models", [header])[0], status, header)
            if status != 200:
                connection.close()
                connection = Connection(served)
        self.assertEqual(connection.get("/health")[0], 200)
        self.assertEqual(connection.get("/")[0], 200)
        self.assertEqual(connection.get("/metrics")[0], 401)
        connection.close()
        with openai.OpenAI(base_url=served.url + "/v1", api_key="wrong") as client:
            with self.assertRaises(openai.AuthenticationError):
                client.models.list()
        shutil.rmtree(keys.parent)
        self.assertEqual(served.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
