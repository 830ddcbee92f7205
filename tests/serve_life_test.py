#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`twell serve` with other options than most of its tests have: pages of other sites, the log,
limits; how it ends, and when it does not begin.

Run: serve_life_test.py TWELL [unittest arguments]."""

import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from serve_testing import Connection, Served, request_bytes

BINARY = sys.argv.pop(1)


class ServerLifeTest(unittest.TestCase):
    def test_pages_of_other_sites(self):
        preflight = ["Origin: https://chat.example", "Access-Control-Request-Method: POST",
                     "Access-Control-Request-Headers: authorization,content-type"]
        served = Served(BINARY)  # no site may use it
        self.connection = Connection(served)
        self.connection.send(request_bytes("OPTIONS", "/v1/completions", b"", preflight))
        status, headers, _ = self.connection.reply()
        self.assertEqual(status, 405)
        self.assertNotIn("access-control-allow-origin", headers)
        self.connection.close()
        self.assertEqual(served.stop(), 0)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="twell-keys-"))
        (folder / "keys").write_text("secret\n")
        served = Served(BINARY, "--cors-origin", "https://chat.example", "--cors-origin", "localhost",
                        "--api-key-file", folder / "keys")

        def ask(method, path, headers, body=b""):
            connection = Connection(served)
            connection.send(request_bytes(method, path, body, headers))
            reply = connection.reply()
            connection.close()
            return reply[:2]

        status, headers = ask("OPTIONS", "/v1/chat/completions", preflight)
        self.assertEqual(status, 200)
        self.assertEqual(headers["access-control-allow-origin"], "https://chat.example")
        self.assertEqual(headers["access-control-allow-methods"], "GET, POST")
        self.assertEqual(headers["access-control-allow-headers"], "authorization,content-type")
        self.assertEqual(headers["access-control-allow-credentials"], "true")
        self.assertEqual(headers["vary"], "Origin")
        status, headers = ask("OPTIONS", "/v1/models", ["Origin: http://127.0.0.1:5173", *preflight[1:]])
        self.assertEqual((status, headers["access-control-allow-origin"]), (200, "http://127.0.0.1:5173"))
        self.assertEqual(ask("OPTIONS", "/v1/models", ["Origin: https://evil.example", *preflight[1:]])[0], 403)
        self.assertEqual(ask("OPTIONS", "/none", preflight)[0], 404)
        self.assertEqual(ask("OPTIONS", "/v1/models", [])[0], 405)
        key = "Authorization: Bearer secret"
        for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
            for head, status in (([key], 200), ([], 401)):  # a page sees why it is refused
                got, headers = ask("POST", "/tokenize", [f"Origin: {origin}", *head], {"prompt": "a"})
                self.assertEqual(got, status)
                self.assertEqual("access-control-allow-origin" in headers, allowed)
        self.assertNotIn("access-control-allow-origin", ask("GET", "/health", [])[1])
        shutil.rmtree(folder)
        self.assertEqual(served.stop(), 0)

    def test_log_of_requests(self):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="twell-log-"))
        log = folder / "log"
        log.write_text('{"older": true}\n')
        served = Served(BINARY, "--log-requests", log)
        connection = Connection(served)
        body = {"prompt": "secret words", "max_tokens": 5, "ignore_eos": True}
        self.assertEqual(connection.post("/v1/completions", body, ["Authorization: Bearer secret"])[0], 200)
        connection.send(request_bytes("POST", "/v1/completions", {**body, "stream": True, "n": 2}))
        connection.reply()
        self.assertEqual(connection.get("/health?secret=1")[0], 200)
        self.assertEqual(connection.post("/v1/completions", {"prompt": "secret", "n": 0})[0], 400)
        connection.send(request_bytes("GET", "/nothing"))
        self.assertEqual(connection.reply()[0], 404)
        connection.close()

        def wait_for_lines(count):
            deadline = time.monotonic() + 30
            while len(log.read_text().splitlines()) < count and time.monotonic() < deadline:
                time.sleep(0.05)

        wait_for_lines(6)  # connections have no order
        gone = Connection(served)  # goes in the middle of a stream
        gone.send(request_bytes("POST", "/v1/completions", {"prompt": ["a"] * 64, "max_tokens": 90,
                                                            "ignore_eos": True, "stream": True}))
        gone.head()
        gone.close()
        wait_for_lines(7)
        connection, usage = Connection(served), []
        for stream in (False, True):
            connection.send(request_bytes("POST", "/v1/responses",
                                          {"input": "secret", "max_output_tokens": 5, "stream": stream}))
            last = json.loads(connection.reply()[2].decode().split("data: ")[-1])
            usage.append((last["response"] if stream else last)["usage"])
        connection.close()
        wait_for_lines(9)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        self.assertEqual(lines[0], {"older": True})
        prompt = lines[1]["prompt_tokens"]
        self.assertEqual([(line["method"], line["path"], line["status"], line["prompt_tokens"],
                           line["completion_tokens"]) for line in lines[1:6]],
                         [("POST", "/v1/completions", 200, prompt, 5), ("POST", "/v1/completions", 200, prompt, 10),
                          ("GET", "/health", 200, None, None), ("POST", "/v1/completions", 400, None, None),
                          ("GET", "/nothing", 404, None, None)])
        self.assertEqual(lines[6]["status"], 499)
        self.assertEqual([(line["prompt_tokens"], line["completion_tokens"]) for line in lines[7:]],
                         [(one["input_tokens"], one["output_tokens"]) for one in usage])
        for line in lines[1:]:
            self.assertRegex(line["time"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertGreaterEqual(line["seconds"], 0)
        self.assertNotIn("secret", log.read_text())
        self.assertEqual(served.stop(), 0)
        shutil.rmtree(folder)

    def test_sigterm_finishes_what_runs(self):
        served = Served(BINARY)
        connections = [Connection(served) for _ in range(4)]
        for connection in connections:
            connection.send(request_bytes("POST", "/v1/completions", {
                "prompt": ["The"] * 8, "max_tokens": 80, "ignore_eos": True, "stream": True}))
            self.assertEqual(connection.head()[0], 200)
        served.terminate()
        for connection in connections:
            text = b"".join(connection.pieces()).decode()
            self.assertEqual(text.count('"finish_reason":"length"'), 8)
            self.assertTrue(text.endswith("data: [DONE]\n\n"))
            connection.close()
        self.assertEqual(served.wait(), 0)

    def test_sigterm_has_a_limit(self):
        served = Served(BINARY, "--drain-seconds", "0", "--batch", "1")
        connection = Connection(served)
        connection.send(request_bytes("POST", "/v1/completions", {
            "prompt": ["The"] * 500, "max_tokens": 80, "ignore_eos": True, "stream": True}))
        connection.head()
        served.terminate()
        text = b"".join(connection.pieces()).decode()
        self.assertIn("the server is stopping", text)
        connection.close()
        self.assertEqual(served.wait(timeout=30), 0)

    def test_too_many_connections(self):
        served = Served(BINARY, "--max-connections", "2")
        connections = [Connection(served) for _ in range(3)]
        for connection in connections[:2]:
            self.assertEqual(connection.get("/health")[0], 200)
        self.assertEqual(connections[2].head()[0], 503)
        for connection in connections:
            connection.close()
        self.assertEqual(served.stop(), 0)

    def test_memory_of_requests(self):
        """Bodies and answers share --request-mib, which is given back."""
        served = Served(BINARY, "--request-mib", "1")
        connection = Connection(served)
        # The values that JSON makes of this body take many times its size.
        status, answer = connection.post("/v1/completions", {"prompt": [[1]] * 9000})
        self.assertEqual((status, answer["error"]["code"]), (503, "overloaded"))
        long = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "logprobs": 20}
        for _ in range(5):
            status, answer = connection.post("/v1/completions", {**long, "n": 64, "echo": True})
            self.assertEqual(status, 503)
            self.assertIn("no memory for the answer", answer["error"]["message"])
            for stream in (False, True):
                connection.send(request_bytes("POST", "/v1/completions", {**long, "stream": stream}))
                status, _, text = connection.reply()
                self.assertEqual(status, 200)
                self.assertNotIn(b'"error"', text)
        connection.close()
        self.assertEqual(served.stop(), 0)

    def test_more_connections_than_open_files(self):
        served = Served(BINARY, "--max-connections", "1")
        out = subprocess.run(
            [BINARY, "serve", "--checkpoint", str(served.checkpoint), "--device", "cpu", "--port",
             "0", "--max-connections", "900"], capture_output=True, text=True, timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900)))
        self.assertEqual(out.returncode, 2, out.stderr)
        self.assertIn("allow fewer connections", out.stderr)
        self.assertEqual(served.stop(), 0)

    def test_models_that_cannot_chat_name_the_field_that_asks(self):
        served = Served(BINARY, template=None)
        connection = Connection(served)
        for path, body, field in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
                                  ("/v1/responses", {"input": "a"}, "input")):
            status, answer = connection.post(path, body)
            self.assertEqual((status, answer["error"]["param"]), (400, field))
            self.assertIn("use /v1/completions", answer["error"]["message"])
        self.assertEqual(connection.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
        connection.close()
        self.assertEqual(served.stop(), 0)

    def test_refused_starts(self):
        served = Served(BINARY)
        model = str(served.checkpoint)
        empty = served.folder / "keys"
        empty.write_text("# none\n")
        for options, fault in ((["--port", str(served.port)], "Address already in use"),
                               (["--port", "70000"], "65535"),
                               (["--host", "192.0.2.1"], "192.0.2.1"), (["--host", ""], "--host"),
                               (["--allow-host", "no host"], "no host"),
                               (["--cors-origin", "chat.example"], "chat.example"),
                               (["--log-requests", "/no/such/file"], "/no/such/file"),
                               (["--api-key-file", "/no/such/file"], "/no/such/file"),
                               (["--api-key-file", model + "/config.json"], "line 2"),
                               (["--api-key-file", str(empty)], "no key in it"),
                               (["--context", "97"], "97"), (["--ffn", "fast"], "fast"),
                               (["--batch", "0"], "batch")):
            out = subprocess.run([BINARY, "serve", "--checkpoint", model, "--device", "cpu",
                                  *options], capture_output=True, text=True, timeout=60)
            self.assertEqual(out.returncode, 2, (options, out.stderr))
            self.assertIn(fault, out.stderr)
            self.assertEqual(out.stderr.count("\n"), 1, out.stderr)
        self.assertEqual(served.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
