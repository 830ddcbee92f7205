# SPDX-License-Identifier: Apache-2.0
"""A small model learns answers from conversations, and gives them by `generate --chat` and the server.

    chat_training_test.py TWELL
"""

import http.client
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

TWELL = sys.argv.pop(1) if len(sys.argv) > 1 else "build/release/twell"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWERS = {"grass": "green", "snow": "white", "night": "black", "blood": "red", "the sea": "blue"}
ON_CPU = ["--device", "cpu", "--threads", "1"]


def question(thing):
    return f"what is the colour of {thing}?"


class ChatTraining(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temp = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temp.name)
        text = "".join(f"{question(thing)} {thing} has a colour, user and assistant say\n" * 20
                       for thing in ANSWERS)
        (cls.folder / "text.txt").write_text(text)
        (cls.folder / "turns.jinja").write_text(TEMPLATE)
        things = list(ANSWERS.items())
        with open(cls.folder / "talks.jsonl", "w") as file:
            for first, colour in things:
                for second, other in things:
                    file.write(json.dumps({"messages": [
                        {"role": "user", "content": question(first)},
                        {"role": "assistant", "content": colour},
                        {"role": "user", "content": question(second)},
                        {"role": "assistant", "content": other},
                    ]}) + "\n")
                file.write(json.dumps({"prompt": question(first), "completion": colour}) + "\n")
            file.write('{"text": "no conversation"}\n')
        cls.run_twell("train", "--data", "text.txt", "--out", "base", "--steps", "3", "--width", "64",
                      "--ffn", "128", "--layers", "2", "--heads", "4", "--context", "96",
                      "--vocab-size", "300", "--micro-batch", "2", "--validate-every", "0")
        cls.chat = ["train", "--from", "base", "--chat-data", "talks.jsonl", "--chat-template",
                    "turns.jinja", "--out", "chat", "--steps", "120", "--micro-batch", "4", "--lr",
                    "5e-3", "--l1", "1e-5", "--bad-files", "skip", "--validate-every", "60",
                    "--save-every", "60"]
        cls.trained = cls.run_twell(*cls.chat)

    @classmethod
    def tearDownClass(cls):
        cls.temp.cleanup()

    @classmethod
    def run_twell(cls, *arguments, code=0, text=None):
        done = subprocess.run([TWELL, *arguments, *ON_CPU], cwd=cls.folder, input=text, text=True,
                              capture_output=True)
        if done.returncode != code:
            raise AssertionError(f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def test_what_was_read_and_learned(self):
        self.assertRegex(self.trained, r"29 conversations to train on and 1 for validation")
        self.assertRegex(self.trained, r"1 lines skipped")
        self.assertRegex(self.trained, r"talks.jsonl: line 31: it has neither messages")
        rows = [json.loads(line) for line in
                (self.folder / "chat/metrics.jsonl").read_text().splitlines()]
        self.assertLess(rows[-1]["ce"], 0.1)
        self.assertGreater(rows[-1]["layers"][0]["nnz"], 0)
        self.assertGreater(rows[-1]["l1"], 0)

    def test_generate(self):
        for thing, colour in ANSWERS.items():
            out = self.run_twell("generate", "--checkpoint", "chat", "--chat", "--temperature", "0",
                                 "--max-tokens", "20", text=question(thing))
            self.assertEqual(out.strip(), colour)

    def test_server(self):
        server = subprocess.Popen([TWELL, "serve", "--checkpoint", "chat", "--port", "0", *ON_CPU],
                                  cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  text=True)
        try:
            port = int(re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline()).group(1))
            talk = []
            for thing, colour in ANSWERS.items():
                talk = talk[-2:] + [{"role": "user", "content": question(thing)}]
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                client.request("POST", "/v1/chat/completions", json.dumps(
                    {"messages": talk, "temperature": 0, "max_tokens": 20}),
                    {"Content-Type": "application/json"})
                choice = json.loads(client.getresponse().read())["choices"][0]
                client.close()
                self.assertEqual(choice["message"]["content"], colour)
                self.assertEqual(choice["finish_reason"], "stop")
                talk.append({"role": "assistant", "content": colour})
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            server.stdout.close()

    def test_resume(self):
        weights = (self.folder / "chat/checkpoint/model.safetensors").read_bytes()
        self.run_twell(*[{"chat": "half"}.get(word, word) for word in self.chat])
        resumed = ["train", "--resume-from", "60", "--out", "half"]
        # The template is the checkpoint's now.
        (self.folder / "turns.jinja").rename(self.folder / "gone.jinja")
        try:
            self.run_twell(*resumed)
        finally:
            (self.folder / "gone.jinja").rename(self.folder / "turns.jinja")
        self.assertEqual((self.folder / "half/checkpoint/model.safetensors").read_bytes(), weights)
        talks = self.folder / "talks.jsonl"
        before = talks.read_text()
        talks.write_text(before.replace("green", "gray"))
        try:
            out = self.run_twell(*resumed, code=2)
            self.assertIn("cannot resume on other data", out)
            self.assertIn("conversations", out)
        finally:
            talks.write_text(before)
        out = self.run_twell("train", "--resume", "--out", "half", "--chat-data", "other.jsonl", code=2)
        self.assertIn("--chat-data", out)

    def test_refusals(self):
        for arguments, fault in [
            (["--chat-data", "talks.jsonl"], "add --from DIR"),
            (["--from", "base", "--chat-template", "turns.jinja"], "goes with --chat-data"),
            (["--from", "base", "--chat-data", "talks.jsonl"], "there is no chat_template"),
            (["--from", "base", "--chat-data", "talks.jsonl", "--data", "text.txt"],
             "leave --data, --shards and --tokenizer out"),
            (["--from", "base", "--chat-data", "talks.jsonl", "--chat-template", "turns.jinja"],
             "talks.jsonl: line 31: it has neither messages nor prompt and completion"),
        ]:
            out = self.run_twell("train", *arguments, "--out", "refused", code=2)
            self.assertIn(fault, out)
            self.assertFalse((self.folder / "refused/options.json").exists())


if __name__ == "__main__":
    unittest.main()
