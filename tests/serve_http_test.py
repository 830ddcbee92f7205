#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HTTP of `twell serve` against a strict reading of the same bytes, and behind nginx.

Run: serve_http_test.py TWELL [unittest arguments]. TWELL_HTTP_MUTATIONS is the number of mutated
requests (10000 in a long run), TWELL_NGINX_SECONDS the time behind nginx, which is skipped where
there is none."""

import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib

from serve_testing import Connection, Served, in_threads, request_bytes

BINARY = sys.argv.pop(1)
MUTATIONS = int(os.environ.get("TWELL_HTTP_MUTATIONS", "1500"))
NGINX_SECONDS = float(os.environ.get("TWELL_NGINX_SECONDS", "5"))
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"


class Fault(Exception):
    """The bytes are no request; the connection ends after a reply of 4xx."""


class Reference:
    """The requests in what a client sends, as RFC 9112 has them, and nothing that it lets a server
    choose: what is not exactly a request is a fault. Independent of the server's code."""

    def __init__(self, data):
        self.data = data

    def line(self):
        end = self.data.find(b"\r\n")
        if end < 0:
            raise Fault("no line")
        line, self.data = self.data[:end], self.data[end + 2:]
        if re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", line):
            raise Fault("control character")
        return line

    def fields(self):
        fields = []
        while True:
            line = self.line()
            if not line:
                return fields
            match = re.fullmatch(rb"(" + TOKEN + rb"):[ \t]*(.*?)[ \t]*", line)
            if not match:
                raise Fault("no field")
            fields.append((match[1].lower(), match[2]))

    def request(self):
        """Method, target, fields and body; None at the end of the data."""
        if not self.data:
            return None
        head = self.data.find(b"\r\n\r\n")
        if (head if head >= 0 else len(self.data)) + 4 > 32 << 10:
            raise Fault("long")
        match = re.fullmatch(rb"(" + TOKEN + rb") (/[!-~]*) HTTP/1\.([01])", self.line())
        if not match or b"#" in match[2] or re.search(rb"%(?![0-9A-Fa-f]{2})", match[2].split(b"?")[0]):
            raise Fault("no request line")
        method, target, version = match[1], match[2], int(match[3])
        fields = self.fields()
        given = {}
        for name, value in fields:
            given.setdefault(name, []).append(value)
        for name in (b"host", b"content-length", b"transfer-encoding", b"content-type",
                     b"authorization", b"x-api-key"):
            if len(given.get(name, [])) > 1:
                raise Fault("twice")
        if version == 1 and b"host" not in given:
            raise Fault("no host")
        for value in given.get(b"connection", []) + given.get(b"proxy-connection", []):
            if not re.fullmatch(rb"[ \t,]*(" + TOKEN + rb"([ \t]*,[ \t,]*" + TOKEN + rb")*)?[ \t,]*", value):
                raise Fault("connection")
        coding, length = given.get(b"transfer-encoding"), given.get(b"content-length")
        if coding:
            if length or version == 0 or coding[0].lower() != b"chunked":
                raise Fault("coding")
            return method, target, version, given, None
        if length and not re.fullmatch(rb"[0-9]{1,19}", length[0]):
            raise Fault("length")
        return method, target, version, given, int(length[0]) if length else 0

    def body(self, length, most):
        if length is not None:
            if len(self.data) < length:
                raise Fault("short")
            body, self.data = self.data[:length], self.data[length:]
            return body
        body = b""
        while True:
            line = self.line()
            extension = rb"[ \t]*;[ \t]*" + TOKEN + \
                rb'(?:[ \t]*=[ \t]*(?:' + TOKEN + rb'|"(?:[^"\\]|\\.)*"))?'
            match = re.fullmatch(rb"([0-9A-Fa-f]+)(?:" + extension + rb")*", line)
            if not match:
                raise Fault("chunk")
            size = int(match[1], 16)
            if size == 0:
                for name, _ in self.fields():
                    if name in (b"content-length", b"transfer-encoding"):
                        raise Fault("trailer")
                return body
            if size > most or len(body) + size > most or len(self.data) < size + 2:
                raise Fault("chunk size")
            body += self.data[:size]
            if self.data[size:size + 2] != b"\r\n":
                raise Fault("chunk end")
            self.data = self.data[size + 2:]


GETS = (b"/", b"/health", b"/metrics", b"/activity", b"/v1/models")
POSTS = (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize")
MOST = 100000


def expected(data):
    """For each reply that the bytes call for, its status and the JSON to compare, or None where it is
    not compared. The last one may end the connection."""
    reference, out = Reference(data), []
    while True:
        try:
            request = reference.request()
            if request is None:
                return out
            method, target, version, given, length = request
            path = re.sub(rb"%([0-9A-Fa-f]{2})", lambda m: bytes([int(m[1], 16)]),
                          target.split(b"?")[0])
            get = method in (b"GET", b"HEAD")
            known = path in GETS or path in POSTS or path.startswith(b"/v1/models/")
            if not known:
                return out + [(404, None)]
            if get if path in POSTS else not get:
                return out + [(405, None)]
            if not get and method != b"POST":
                return out + [(405, None)]
            if b"host" in given and not re.fullmatch(rb"([a-z0-9_-]*\.)*localhost\.?(:[0-9]*)?", given[b"host"][0], re.I):
                return out + [(403, None)]
            expect = b", ".join(given.get(b"expect", [])).split(b";")[0].strip(b" \t").lower()
            if expect not in (b"", b"100-continue"):
                return out + [(417, None)]
            if length is not None and length > MOST:
                return out + [(413, None)]
            kind = given.get(b"content-type", [b""])[0].split(b";")[0].strip(b" \t").lower()
            if not get and kind != b"application/json":
                return out + [(415, None)]
            body = reference.body(length, MOST)
        except Fault:
            return out + [("fault", None)]  # 400 or 413
        encoding = b", ".join(given.get(b"content-encoding", [])).split(b";")[0].strip(b" \t").lower()
        status, compared = 200, None
        if not get and encoding in (b"gzip", b"x-gzip", b"deflate"):
            try:
                decoder = zlib.decompressobj(47)
                body = decoder.decompress(body) + decoder.flush()
                if not decoder.eof or decoder.unused_data:
                    status = 400
            except zlib.error:
                status = 400
        elif not get and encoding not in (b"", b"identity"):
            status = 415
        if not get and status == 200:
            status = None if path != b"/tokenize" else tokenize_status(body)
            compared = body if path == b"/tokenize" and status == 200 else None
        out.append((status, compared))
        last = version == 0 or b"close" in [
            one.strip(b" \t").lower() for value in
            given.get(b"connection", []) + given.get(b"proxy-connection", []) for one in value.split(b",")]
        if last:
            return out


def tokenize_status(body):
    """200 or 400 for what only this test sends, None where it cannot tell."""
    try:
        parsed = json.loads(body.decode())
    except (ValueError, UnicodeDecodeError):
        return 400
    if not isinstance(parsed, dict) or set(parsed) - {"prompt", "add_special_tokens"}:
        return None
    return 200 if isinstance(parsed.get("prompt"), str) and \
        parsed.get("add_special_tokens", False) is False else None


def replies(data, heads):
    """The replies in what a server sent: status, headers, body. heads: whether reply i has no body."""
    out = []
    while data:
        if b"\r\n\r\n" not in data:
            raise AssertionError(f"no reply: {data!r}")
        head, data = data.split(b"\r\n\r\n", 1)
        status = int(re.match(rb"HTTP/1\.1 (\d\d\d) ", head)[1])
        if status == 100:
            continue
        headers = {name.lower(): value for name, value in re.findall(r"\r\n([^:]+): ([^\r]*)", head.decode())}
        length = int(headers["content-length"])
        if heads[len(out)] if len(out) < len(heads) else False:
            length = 0
        if len(data) < length:
            raise AssertionError(f"a short body: {head!r}")
        out.append((status, headers, data[:length]))
        data = data[length:]
    return out


def talk(port, data):
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        received = b""
        try:
            while piece := client.recv(1 << 16):
                received += piece
        except ConnectionError:
            pass
        return received


class HttpTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.served = Served(BINARY, "--request-seconds", "5", "--max-body", str(MOST))

    @classmethod
    def tearDownClass(cls):
        assert cls.served.stop() == 0, "the server did not end with exit code 0"

    def tokenize(self, number, rng):
        """A request whose answer no other one has."""
        body = json.dumps({"prompt": f"n{number} ", "add_special_tokens": False}).encode()
        head = [b"POST /tokenize HTTP/1.1", b"Host: localhost", b"Content-Type: application/json"]
        kind = rng.randrange(5)
        if kind == 0:
            head.append(b"Transfer-Encoding: chunked")
            cut = sorted(rng.sample(range(1, len(body)), 2))
            parts = [body[:cut[0]], body[cut[0]:cut[1]], body[cut[1]:]]
            body = b"".join(b"%x%s\r\n%s\r\n" % (len(part), rng.choice([b"", b";a=b", b';a="b c"']), part)
                            for part in parts) + b"0\r\n" + rng.choice([b"", b"T: x\r\n"]) + b"\r\n"
        else:
            if kind == 1:
                body = gzip.compress(body)
                head.append(b"Content-Encoding: gzip")
            head.append(b"Content-Length: %d" % len(body))
        if rng.random() < 0.1:
            head.append(b"Expect: 100-continue")
        rng.shuffle(head)
        head.sort(key=lambda line: not line.startswith(b"POST"))
        return b"\r\n".join(head) + b"\r\n\r\n" + body

    def mutate(self, data, rng):
        """Changes of framing, and of any bytes."""
        line = [b"Content-Length: 5", b"Content-Length: 0", b"content-length:45abc", b"Content-Length: 45, 0",
                b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding : chunked",
                b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\x0bchunked", b"Content-Length: +5",
                b" folded: yes", b"Connection: close", b"Host: other", b"X: \xff\x80", b"Content_Length: 3",
                b"Content-Encoding: br", b"Expect: 100-continue", b"Connection: keep-alive, x", b": empty",
                b"X\x00: y", b"GET / HTTP/1.1", b"", b"Transfer-Encoding: identity", b"TE: trailers"]
        pieces = [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"0\r\n\r\n", b"2dzz\r\n",
                  b"0x5\r\n", b"5\r\nabcde\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00", b"\xff",
                  b"ffffffffffffffff\r\n", b"HTTP/1.0", b"-1", b"00000000000000000000", b"chunked"]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            kind = rng.random()
            ends = [m.end() for m in re.finditer(b"\r\n", data)] or [0]
            if kind < 0.35:  # a line more
                at = rng.choice(ends)
                data = data[:at] + rng.choice(line) + b"\r\n" + data[at:]
            elif kind < 0.5:  # a line twice, or less
                begin = rng.choice([0, *ends])
                end = data.find(b"\r\n", begin) + 2
                data = data[:begin] + rng.choice([b"", 2 * data[begin:end]]) + data[end:]
            elif kind < 0.6:  # another number
                numbers = list(re.finditer(rb"[0-9a-f]+", data))
                one = rng.choice(numbers)
                value = rng.choice([b"0", b"1", b"%d" % rng.randrange(99), b"%x" % rng.randrange(99), b"", b"1e1"])
                data = data[:one.start()] + value + data[one.end():]
            else:  # other bytes
                at = rng.randrange(len(data) + 1)
                change = rng.choice([b"", rng.choice(pieces), bytes([rng.randrange(256)])])
                data = data[:at] + change + data[at + rng.choice([0, 0, 1, 2, 5]):]
        return data

    def check(self, data):
        want = expected(data)
        heads = []
        reference = Reference(data)
        try:  # which of the replies have no body
            while request := reference.request():
                heads.append(request[0] == b"HEAD")
                reference.body(request[4], MOST)
        except Fault:
            pass
        got = replies(talk(self.served.port, data), heads)
        self.assertEqual(len(got), len(want), (data, want, got))
        for (status, headers, body), (want_status, sent) in zip(got, want, strict=True):
            if want_status == "fault":
                self.assertIn(status, (400, 413), (data, want, got))
                self.assertEqual(headers["connection"], "close")
            elif want_status is None:
                self.assertIn(status, (200, 400), (data, want, got))
            else:
                self.assertEqual(status, want_status, (data, want, got))
            if sent is not None:
                tokens = json.loads(body)["tokens"]
                number = json.loads(sent)["prompt"]
                self.assertEqual(self.text_of(tokens), number, (data, got))
        return [status for status, _, _ in got]

    def text_of(self, tokens):
        connection = Connection(self.served)
        text = connection.post("/detokenize", {"tokens": tokens})[1]["prompt"]
        connection.close()
        return text

    def test_mutated_requests(self):
        """Three requests on a connection, one of them mutated: as many replies as a strict reading
        finds requests, each to its own request, and nothing behind a fault."""
        seed = int(os.environ.get("TWELL_SEED", "7"))
        statuses, lock = {}, threading.Lock()

        def work(thread):
            rng = random.Random(1000 * seed + thread)
            for i in range(MUTATIONS // 4):
                requests = [self.tokenize(f"{thread}x{i}x{j}", rng) for j in range(3)]
                if rng.random() < 0.2:
                    requests[0] = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nGET /"
                if rng.random() < 0.1:
                    requests[1] = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
                at = rng.randrange(3)
                requests[at] = self.mutate(requests[at], rng)
                got = self.check(b"".join(requests))
                with lock:
                    for status in got:
                        statuses[status] = statuses.get(status, 0) + 1

        in_threads(4, work)
        print(f"{MUTATIONS} mutated requests, replies by status: {dict(sorted(statuses.items()))}")
        self.assertGreater(statuses[200], MUTATIONS)

    def test_smuggled_requests(self):
        """Those of reports: nothing behind them is read as a request."""
        victim = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for fields in (b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 45abc",
                       b"Content-Length: 45, 0", b"Content-Length: 5\r\nTransfer-Encoding: chunked",
                       b"Transfer-Encoding: cow", b"Transfer-Encoding : chunked",
                       b"Transfer-Encoding: chunked\r\n\r\n2dzz", b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0",
                       b"X: y\r\n Content-Length: 5", b"X: y\nContent-Length: 5"):
            statuses = self.check(post + fields + b"\r\n\r\n" + victim)
            self.assertEqual(statuses, [400], fields)
        for method in (b"GET", b"HEAD"):  # its body is a body
            data = method + b" /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(victim)
            self.assertEqual(self.check(data + victim), [200])
            data = method + b" /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            self.assertEqual(self.check(data + b"%x\r\n%s\r\n0\r\n\r\n" % (len(victim), victim)), [200])

    def test_hosts(self):
        for host, status in ((b"localhost", 200), (b"LOCALHOST:1", 200), (b"127.0.0.1:80", 200), (b"[::1]", 200),
                             (b"evil.example", 403), (b"evil.example:%d" % self.served.port, 403),
                             (b"localhost.evil.example", 403), (b"192.168.0.1", 403), (b"", 403)):
            for path in (b"/", b"/health", b"/v1/models"):
                data = b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (path, host)
                self.assertTrue(talk(self.served.port, data).startswith(b"HTTP/1.1 %d " % status), host)
        named = Served(BINARY, "--allow-host", "my.server", "other")
        for host, status in ((b"My.Server:80", 200), (b"other", 200), (b"evil.example", 403)):
            data = b"GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host
            self.assertTrue(talk(named.port, data).startswith(b"HTTP/1.1 %d " % status), host)
        self.assertEqual(named.stop(), 0)
        refused = subprocess.run([BINARY, "serve", "--checkpoint", str(self.served.checkpoint), "--host", "",
                                  "--port", "0"], capture_output=True, text=True, timeout=60)
        self.assertEqual(refused.returncode, 2, refused.stderr)
        self.assertIn("--host is empty", refused.stderr)

    def test_hostile_json_is_read_in_linear_time(self):
        """Lists of empty objects, which a reader that scans its parent at every end takes minutes for."""
        served = Served(BINARY)
        seconds = []
        for size in (240_000, 4_000_000):
            body = b'{"prompt": [' + b"{}," * (size // 3 - 6) + b"{}]}"
            connection = Connection(served, timeout=300)
            start = time.monotonic()
            connection.send(request_bytes("POST", "/v1/completions", body))
            status, _, _ = connection.reply()
            seconds.append(time.monotonic() - start)
            self.assertEqual(status, 400)
            connection.close()
        print(f"240 KB and 4 MB of empty objects: {seconds[0]:.3f} s, {seconds[1]:.3f} s")
        self.assertLess(seconds[1], 60 * seconds[0] + 5)
        self.assertEqual(served.stop(), 0)


class ManyConnectionsTest(unittest.TestCase):
    def test_idle_connections_need_no_threads(self):
        count = int(os.environ.get("TWELL_CONNECTIONS", "1500"))
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 2 * count:
            self.skipTest(f"only {hard} open files are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
        served = Served(BINARY, "--max-connections", count + 10)
        before = served.resident_bytes()
        clients = [served.connect() for _ in range(count)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for client in clients:
            self.assertTrue(client.recv(4096).startswith(b"HTTP/1.1 200"))
        status = pathlib.Path(f"/proc/{served.process.pid}/status").read_text()
        threads = int(re.search(r"Threads:\s+(\d+)", status).group(1))
        print(f"{count} connections: {threads} threads, "
              f"{(served.resident_bytes() - before) / count / 1024:.1f} KiB each")
        self.assertLess(threads, 64)
        start = time.monotonic()
        self.assertEqual(served.stop(), 0)
        self.assertLess(time.monotonic() - start, 10)
        for client in clients:
            client.close()


class EndTest(unittest.TestCase):
    def test_sigterm_waits_for_nobody(self):
        """Neither for half-sent requests nor for a client that does not read."""
        served = Served(BINARY)
        half_head, half_body, idle, deaf = (Connection(served) for _ in range(4))
        half_head.send(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        half_body.send(request_bytes("POST", "/v1/completions", {"prompt": "a"})[:-3])
        self.assertEqual(idle.get("/health")[0], 200)
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.send(request_bytes("POST", "/v1/completions", {
            "prompt": ["a"] * 64, "max_tokens": 90, "ignore_eos": True, "stream": True, "logprobs": 20}))
        deaf.head()
        time.sleep(0.5)
        start = time.monotonic()
        self.assertEqual(served.stop(), 0)
        self.assertLess(time.monotonic() - start, 25)  # what runs is finished: 10 s under sanitizers
        for connection in (half_head, half_body, idle, deaf):
            connection.close()

    def large_body(self):
        """Seconds of work for the reader of JSON."""
        return request_bytes("POST", "/v1/completions", b'{"prompt": [' + b"{}," * 1_300_000 + b"{}]}")

    def test_sigterm_during_a_large_body(self):
        served = Served(BINARY)
        clients = [Connection(served, timeout=60) for _ in range(2)]
        for client in clients:
            client.send(self.large_body())
        time.sleep(0.1)
        start = time.monotonic()
        self.assertEqual(served.stop(), 0)
        seconds = time.monotonic() - start
        print(f"SIGTERM while two bodies of 4 MB are read: {seconds:.1f} s")
        self.assertLess(seconds, 20)
        for client in clients:
            client.close()

    def test_disconnect_during_a_large_body(self):
        """Others are served while nobody waits for the body any more, and after it."""
        served = Served(BINARY)
        for _ in range(3):
            gone = [Connection(served, timeout=60) for _ in range(2)]
            for client in gone:
                client.send(self.large_body())
            time.sleep(0.05)
            for client in gone:
                client.close()
            other = Connection(served, timeout=60)
            start = time.monotonic()
            self.assertEqual(other.get("/health")[0], 200)
            self.assertLess(time.monotonic() - start, 5)
            other.close()
        last = Connection(served, timeout=120)
        self.assertEqual(last.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
        last.close()
        self.assertEqual(served.stop(), 0)

    def test_clients_take_turns(self):
        """One client's sequences do not keep another's single token waiting."""
        served = Served(BINARY, "--batch", "8")
        many = Connection(served, timeout=300)
        many.send(request_bytes("POST", "/v1/completions", {
            "prompt": ["The"] * 1024, "max_tokens": 90, "ignore_eos": True, "stream": True}))
        many.head()
        next(many.pieces())
        waits = []
        for _ in range(5):
            single = Connection(served)
            start = time.monotonic()
            self.assertEqual(single.post("/v1/completions", {"prompt": "A", "max_tokens": 1})[0], 200)
            waits.append(time.monotonic() - start)
            single.close()
        text = many.socket.recv(1)
        self.assertTrue(text, "the many go on")
        many.close()
        print(f"single tokens beside 1024 sequences: {', '.join(f'{1000 * one:.0f}' for one in waits)} ms")
        self.assertLess(sorted(waits)[2], 2.0)
        self.assertEqual(served.stop(), 0)


class TemplateTest(unittest.TestCase):
    def test_the_client_is_told_why_a_template_cannot_be_used(self):
        for template, why in (("{% unknown %}", "unknown"), ("{{ messages | nosuchfilter }}", "nosuchfilter")):
            served = Served(BINARY, template=template)
            connection = Connection(served)
            status, reply = connection.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
            self.assertEqual(status, 400)
            self.assertIn("chat_template.jinja", reply["error"]["message"])
            self.assertIn(why, reply["error"]["message"])
            self.assertNotIn(str(served.folder), reply["error"]["message"])
            self.assertEqual(connection.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
            connection.close()
            self.assertEqual(served.stop(), 0)

    def test_the_client_is_told_why_a_conversation_cannot_be_rendered(self):
        served = Served(BINARY, template="{{ raise_exception('roles must alternate') }}")
        connection = Connection(served)
        status, reply = connection.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        self.assertEqual(status, 400)
        self.assertIn("roles must alternate", reply["error"]["message"])
        connection.close()
        self.assertEqual(served.stop(), 0)


class MemoryTest(unittest.TestCase):
    """Has a test of its own in the release build: AddressSanitizer keeps freed memory."""

    # A tokenizer keeps a cache of 2 MiB for each thread that uses it, of which there are at most 8;
    # allocators of threads keep up to 1 MiB each.
    MOST_LEFT = 24 << 20

    def test_memory_is_given_back(self):
        if b"__asan_init" in pathlib.Path(BINARY).read_bytes():
            self.skipTest("AddressSanitizer keeps freed memory")
        served = Served(BINARY)
        connection = Connection(served, timeout=120)
        self.assertEqual(connection.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0], 200)
        before = served.resident_bytes()
        size = 4_000_000
        bodies = (b'{"prompt": [' + b"[1]," * (size // 5) + b"[1]]}",
                  b'{"prompt": [' + b"{}," * (size // 4) + b"{}]}",
                  b'{"prompt": [' + b"5," * (size // 2 - 20) + b"5]}",
                  b'{"prompt": "' + b"a" * (size - 20) + b'"}',
                  b'{"messages": [' + b'{"role": "user", "content": "a b c"},' * (size // 40)
                  + b'{"role": "user", "content": "a"}]}')

        def work(number):
            own = Connection(served, timeout=120)
            for k in range(len(bodies)):
                body = bodies[(number + k) % len(bodies)]
                path = "/v1/chat/completions" if body.startswith(b'{"messages') else "/v1/completions"
                own.send(request_bytes("POST", path, body))
                self.assertIn(own.reply()[0], (400, 503))
            own.close()

        in_threads(4, work)
        most = served.resident_bytes()
        deadline = time.monotonic() + 30
        while served.resident_bytes() - before > self.MOST_LEFT and time.monotonic() < deadline:
            time.sleep(0.1)
        left = served.resident_bytes() - before
        print(f"{(most - before) / 2**20:.0f} MiB after hostile bodies, {left / 2**20:.0f} MiB a moment later")
        self.assertLess(left, self.MOST_LEFT)
        connection.close()
        self.assertEqual(served.stop(), 0)


@unittest.skipUnless(pathlib.Path(NGINX).exists(), "there is no nginx")
class NginxTest(unittest.TestCase):
    def test_attackers_and_victims_behind_nginx(self):
        """With kept connections between nginx and the server, every victim gets its own answer."""
        served = Served(BINARY)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="twell-nginx-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "nginx.conf").write_text(f"""
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream model {{ server 127.0.0.1:{served.port}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://model; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_set_header Host localhost; proxy_request_buffering off; proxy_buffering off;
    }}
  }}
}}""")
        nginx = subprocess.Popen([NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c",
                                  str(folder / "nginx.conf")], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    self.assertLess(time.monotonic(), deadline, "nginx does not start")
                    time.sleep(0.05)
            end = time.monotonic() + NGINX_SECONDS
            counts = {"victims": 0, "attacks": 0}

            def victim(i):
                number = 0
                while time.monotonic() < end:
                    number += 1
                    text = f"v{i}n{number} "
                    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
                    data = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    reply = self.ask(port, data)
                    self.assertTrue(reply.startswith(b"HTTP/1.1 200"), reply)
                    tokens = json.loads(reply.split(b"\r\n\r\n", 1)[1])["tokens"]
                    back = json.dumps({"tokens": tokens}).encode()
                    reply = self.ask(port, b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" %
                                           (len(back), back))
                    self.assertEqual(json.loads(reply.split(b"\r\n\r\n", 1)[1])["prompt"], text)
                    counts["victims"] += 1

            def attacker(i):
                rng = random.Random(i)
                smuggled = b"GET /v1/models/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
                post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                while time.monotonic() < end:
                    method = rng.choice([b"GET", b"HEAD", b"POST", b"DELETE", b"OPTIONS"])
                    path = rng.choice([b"/health", b"/v1/models", b"/tokenize", b"/nothing"])
                    fields = rng.choice([
                        b"Content-Length: %d\r\n\r\n%s" % (len(smuggled), smuggled),
                        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(smuggled), smuggled),
                        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n%s" % (len(smuggled), smuggled),
                        b"Transfer-Encoding: chunked\r\n\r\n1;a=\"b\"\r\na\r\n0\r\nT: x\r\n\r\n",
                        b"Content-Length: %d\r\n\r\n%s" % (2 * len(smuggled), smuggled)])  # cut off
                    head = post if method == b"POST" else method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n"
                    try:
                        with socket.create_connection(("127.0.0.1", port), 30) as client:
                            client.sendall(head + fields)
                            client.settimeout(0.05)
                            client.recv(4096)
                    except OSError:
                        pass
                    counts["attacks"] += 1

            in_threads(6, lambda i: victim(i) if i % 2 else attacker(i))
            print(f"behind nginx: {counts}")
            self.assertGreater(counts["victims"], 20)
            self.assertGreater(counts["attacks"], 20)
        finally:
            nginx.send_signal(signal.SIGTERM)
            nginx.wait(30)
            shutil.rmtree(folder)
        self.assertEqual(served.stop(), 0)

    def ask(self, port, data):
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(data)
            received = b""
            while piece := client.recv(1 << 16):
                received += piece
            return received


if __name__ == "__main__":
    unittest.main(verbosity=1)
