#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LangChain against `twell serve`: structured output, tools, streams, through chats and responses.

Run: serve_langchain_test.py TWELL [unittest arguments]. Exits with 77 (skipped) where langchain-openai is not
installed; scripts/setup.sh --test installs it into .cache/openai-client. The test model is not trained, so an
answer may be cut off: each question is asked with several seeds."""

import os
import sys
import typing
import unittest

from serve_testing import Served, needs_clients

needs_clients("langchain_openai")
os.environ["LANGSMITH_TRACING"] = "false"
import openai
import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

BINARY = sys.argv.pop(1)


class Answer(pydantic.BaseModel):
    """What is asked for."""
    number: typing.Literal[1, 22]
    color: typing.Literal["red", "blue"]


def look(n: typing.Literal[1, 22]) -> str:
    """Looks up a number."""
    return str(n)


class LangChainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.served = Served(BINARY, context=1024)

    @classmethod
    def tearDownClass(cls):
        assert cls.served.stop() == 0, "the server did not end with exit code 0"

    def model(self, seed, **options):
        return ChatOpenAI(model="model", base_url=self.served.url + "/v1", api_key="none", max_retries=0,
                          max_tokens=300, extra_body={"seed": seed}, **options)

    def first(self, ask, found=bool):
        for seed in range(40):
            try:
                answer = ask(seed)
            except (openai.LengthFinishReasonError, pydantic.ValidationError):  # cut off
                continue
            if found(answer):
                return answer
        self.fail("no answer has ended by itself")

    def test_structured_output(self):
        for responses in (False, True):
            answer = self.first(lambda seed: self.model(seed, use_responses_api=responses).with_structured_output(
                Answer, method="json_schema").invoke("a"))
            self.assertIsInstance(answer, Answer)
        answer = self.first(lambda seed: self.model(seed).with_structured_output(
            Answer, method="function_calling").invoke("a"))
        self.assertIsInstance(answer, Answer)
        answer = self.first(lambda seed: self.model(seed).with_structured_output(
            Answer.model_json_schema(), method="json_schema", strict=True).invoke("a"))
        self.assertEqual(Answer(**answer).model_dump(), answer)

    def test_tools(self):
        for responses in (False, True):
            def bound(seed, choice="any"):
                return self.model(seed, use_responses_api=responses).bind_tools(
                    [look], tool_choice=choice, parallel_tool_calls=False)

            whole = self.first(lambda seed: bound(seed).invoke("a"), lambda message: message.tool_calls)
            [call] = whole.tool_calls
            self.assertEqual(call["name"], "look")
            self.assertIn(call["args"], ({"n": 1}, {"n": 22}))

            def streamed(seed):
                chunks = list(bound(seed, "look").stream("a"))
                self.assertGreater(len(chunks), 2)
                return sum(chunks[1:], chunks[0])

            again = self.first(streamed, lambda message: message.tool_calls)
            self.assertEqual(again.tool_calls[0]["name"], "look")
            self.assertIn(again.tool_calls[0]["args"], ({"n": 1}, {"n": 22}))
            # The call and its result go back.
            history = [HumanMessage("a"), whole, ToolMessage(look(**call["args"]), tool_call_id=call["id"])]
            after = self.model(1, use_responses_api=responses).invoke(history)
            self.assertGreater(after.usage_metadata["input_tokens"], whole.usage_metadata["input_tokens"])


if __name__ == "__main__":
    unittest.main(verbosity=1)
