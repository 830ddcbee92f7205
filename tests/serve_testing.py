# SPDX-License-Identifier: Apache-2.0
"""A running `twell serve` for tests and load scripts, and a small HTTP client with raw sockets."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/golden/tasks/model"
# Short, because the test model's context is 96 tokens. Tools are called in the form of Hermes.
CHAT_TEMPLATE = ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n"
                 "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
                 "{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ mood }}"
                 "{% if add_generation_prompt %}a:{% endif %}")


def needs_clients(*modules):
    """Goes on in the Python of the clients, which scripts/setup.sh --test installs, where a module is missing here;
    ends as skipped where that is missing too."""
    if all(importlib.util.find_spec(module) for module in modules):
        return
    installed = ROOT / ".cache/openai-client/bin/python"
    if installed.exists() and sys.executable != str(installed):
        os.execv(installed, [str(installed), *sys.argv])
    print(f"skipped: {', '.join(modules)} not installed (scripts/setup.sh --test)")
    sys.exit(77)


class Served:
    """Serves the test model, with a chat template unless that is None, on a free port of this machine."""

    def __init__(self, binary, *options, environment=None, template=CHAT_TEMPLATE,
                 context=None):
        self.binary = str(binary)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="twell-serve-"))
        self.checkpoint = self.folder / "model"
        shutil.copytree(MODEL, self.checkpoint)
        if template is not None:
            (self.checkpoint / "chat_template.jinja").write_text(template)
        if context:
            config = self.checkpoint / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": context}))
        self.log = open(self.folder / "stderr", "w+")
        self.process = subprocess.Popen(
            [self.binary, "serve", "--checkpoint", str(self.checkpoint), "--port", "0",
             "--device", "cpu", "--threads", "1", *map(str, options)],
            stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, **(environment or {})})
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not found:
            raise RuntimeError(f"the server did not start: {line}{self.stderr()}")
        self.port = int(found.group(1))
        self.url = f"http://127.0.0.1:{self.port}"

    def stderr(self):
        self.log.flush()
        return (self.folder / "stderr").read_text()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def stop(self, timeout=60):
        """Terminates the server and returns its exit code."""
        self.terminate()
        return self.wait(timeout)

    def wait(self, timeout=60):
        """Returns the exit code of a server that was terminated."""
        code = self.process.wait(timeout)
        self.process.stdout.close()
        self.log.close()
        shutil.rmtree(self.folder)
        return code

    def resident_bytes(self):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text).group(1)) * 1024

    def connect(self, timeout=30):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def generate(self, prompt, *options):
        """What `twell generate --json` gives for the prompt."""
        out = subprocess.run(
            [self.binary, "generate", "--checkpoint", str(self.checkpoint), "--prompt", prompt,
             "--device", "cpu", "--threads", "1", "--json", *map(str, options)],
            capture_output=True, text=True, check=True).stdout
        return json.loads(out)


def request_bytes(method, path, body=b"", headers=()):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """A kept-alive connection. Call close() at the end."""

    def __init__(self, served, timeout=30):
        self.socket = served.connect(timeout)
        self.file = self.socket.makefile("rb")

    def close(self):
        self.file.close()
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def head(self):
        """Reads status and headers; (None, {}) when the server has closed the connection."""
        line = self.file.readline()
        if not line:
            return None, {}
        headers = {}
        while (text := self.file.readline().decode("latin-1").strip()):
            name, value = text.split(":", 1)
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    def pieces(self):
        """The chunks of a body with chunked encoding."""
        while True:
            size = int(self.file.readline(), 16)
            data = self.file.read(size + 2)[:-2]
            if size == 0:
                return
            yield data

    def reply(self):
        """Reads a reply: status, headers, body."""
        status, headers = self.head()
        if status is None:
            return None, {}, b""
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, b"".join(self.pieces())
        return status, headers, self.file.read(int(headers.get("content-length", 0)))

    def post(self, path, body, headers=()):
        """Status and JSON of the reply."""
        self.send(request_bytes("POST", path, body, headers))
        status, _, text = self.reply()
        return status, json.loads(text)

    def get(self, path, headers=()):
        self.send(request_bytes("GET", path, b"", headers))
        status, _, text = self.reply()
        return status, text.decode()


def in_threads(count, work):
    """Runs work(0), ..., work(count - 1) beside each other; passes on the first exception."""
    faults = []

    def run(i):
        try:
            work(i)
        except BaseException as fault:  # passed on below
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
