#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of a running server with OpenAI's completions API.

Streamed requests, either so many at a time (--concurrency: the next one starts when one ends) or
arriving at random at a mean rate however long the others take (--rate), for --seconds each. What
arrives in the first fifth of the time is not counted, and requests that run at the end are dropped.
Prompts are random token ids, or stretches of a shard of `twell tokenize` (--shard), and hardly share
beginnings; every answer has exactly --new-tokens tokens (ignore_eos).

Prints a table and, with --json, appends a JSON line for each row. Needs Python alone.
Run: serve_throughput.py --url http://127.0.0.1:8000 --concurrency 1 8 64 --label sparse"""

import argparse
import array
import json
import multiprocessing
import random
import selectors
import socket
import time
import urllib.parse

WARM_UP = 0.2  # share of the time


def read_shard(file):
    ids = array.array("H")
    with open(file, "rb") as data:
        ids.frombytes(data.read())
    return ids


def prompt(arguments, shard, rng):
    length = arguments.prompt_tokens
    if shard is None:
        return [rng.randrange(arguments.first_id, arguments.last_id) for _ in range(length)]
    begin = rng.randrange(len(shard) - length)
    return shard[begin:begin + length].tolist()


class Request:
    """One streamed request on a connection of its own."""

    def __init__(self, arguments, address, prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": arguments.new_tokens, "stream": True,
                           "temperature": arguments.temperature, "ignore_eos": True})
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {address[0]}",
                 "Content-Type: application/json", f"Content-Length: {len(body)}",
                 "Connection: close"]
        if arguments.api_key:
            lines.append(f"Authorization: Bearer {arguments.api_key}")
        self.arrivals = []  # (time, events) of each read with events
        self.end = None
        self.tail = b""
        self.start = time.perf_counter()
        self.socket = socket.create_connection(address)
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
        self.socket.setblocking(False)

    def read(self):
        """Takes what has arrived. True when the answer is complete."""
        try:
            piece = self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        now = time.perf_counter()
        if not self.tail and not self.arrivals and not piece.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server refused: {piece[:500]!r}")
        # An event's first bytes may stand at the end of the previous read.
        data = self.tail[-6:] + piece
        if events := data.count(b"data: {"):
            self.arrivals.append((now, events))
        self.tail = (self.tail + piece)[-100:]
        if piece:
            return False
        if b"[DONE]" not in self.tail:
            raise RuntimeError(f"a stream without an end: {self.tail!r}")
        self.end = now
        return True


def drive(arguments, address, load, process, results):
    """Runs this process's share of a load and puts its requests as (start, arrivals, end)."""
    try:
        results.put(requests_of(arguments, address, load, process))
    except Exception as error:  # reported by the parent
        results.put(f"{error!r}")


def requests_of(arguments, address, load, process):
    shard = read_shard(arguments.shard) if arguments.shard else None
    rng = random.Random(f"{arguments.seed} {load} {process}")
    selector = selectors.DefaultSelector()
    requests = []
    share = load / arguments.processes
    if arguments.concurrency:  # the first processes have one more where it does not divide
        share = load // arguments.processes + (process < load % arguments.processes)
    begin = time.perf_counter()
    end = begin + arguments.seconds
    arrival = begin + rng.expovariate(share) if arguments.rate else end

    def start():
        request = Request(arguments, address, prompt(arguments, shard, rng))
        selector.register(request.socket, selectors.EVENT_READ, request)
        requests.append(request)

    if arguments.concurrency:
        for _ in range(share):
            start()
    while (now := time.perf_counter()) < end:
        while arrival <= now:
            start()
            arrival += rng.expovariate(share)
        for key, _ in selector.select(max(min(arrival, end) - time.perf_counter(), 0)):
            if key.data.read():
                selector.unregister(key.fileobj)
                key.fileobj.close()
                if arguments.concurrency:
                    start()
    for request in requests:
        request.socket.close()
    return begin, [(r.start, r.arrivals, r.end) for r in requests]


def percentile(values, share):
    values = sorted(values)
    return values[min(int(share * len(values)), len(values) - 1)]


def measure(arguments, address, load):
    results = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=drive,
                                         args=(arguments, address, load, number, results))
                 for number in range(arguments.processes)]
    for process in processes:
        process.start()
    shares = [results.get() for _ in processes]
    for process in processes:
        process.join()
    for share in shares:
        if isinstance(share, str):
            raise SystemExit(f"serve_throughput: {share}")
    requests = [request for _, of_process in shares for request in of_process]
    low = max(begin for begin, _ in shares) + WARM_UP * arguments.seconds
    high = min(begin for begin, _ in shares) + arguments.seconds
    whole = [sum(events for _, events in arrivals) for _, arrivals, end in requests if end]
    if not whole:
        raise SystemExit(f"no request ended in {arguments.seconds} s: give more --seconds")
    # Tokens that complete no character come with the next one.
    tokens_per_event = arguments.new_tokens * len(whole) / sum(whole)
    events, first, between = 0, [], []
    for start, arrivals, _ in requests:
        last = None
        for when, arrived in arrivals:
            if low <= when < high:
                events += arrived
                if last is None:
                    first.append(1e3 * (when - start))
                else:
                    between += [1e3 * (when - last) / arrived] * arrived
            last = when
    row = {"bench": "serve", "label": arguments.label, "load": load,
           "unit": "requests at a time" if arguments.concurrency else "requests per second",
           "prompt": arguments.prompt_tokens, "new_tokens": arguments.new_tokens,
           "temperature": arguments.temperature, "seconds": high - low, "requests": len(whole),
           "tokens_per_s": events * tokens_per_event / (high - low)}
    for name, values in (("first_token_ms", first), ("between_tokens_ms", between)):
        for share in (50, 95, 99):
            row[f"{name}_p{share}"] = percentile(values, share / 100) if values else None
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--concurrency", type=int, nargs="+", help="requests at a time")
    mode.add_argument("--rate", type=float, nargs="+", help="mean arrivals per second")
    parser.add_argument("--seconds", type=float, default=10, help="of each row")
    parser.add_argument("--processes", type=int, default=1,
                        help="of this client; one reads some 50,000 tokens per second")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shard", help="file of 16-bit token ids to take prompts from")
    parser.add_argument("--first-id", type=int, default=100, help="lowest id in random prompts")
    parser.add_argument("--last-id", type=int, default=1000, help="end of the ids in random prompts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="copied into every row")
    parser.add_argument("--json", help="file to append rows to")
    arguments = parser.parse_args()
    url = urllib.parse.urlsplit(arguments.url)
    address = (url.hostname, url.port or 80)
    print(f"{'label':>10} {'load':>8} {'requests':>8} {'tokens/s':>9} {'first token ms':>23} "
          f"{'between tokens ms':>23}\n{'':>38} " + f"{'p50':>7} {'p95':>7} {'p99':>7} " * 2)
    for load in arguments.concurrency or arguments.rate:
        row = measure(arguments, address, load)
        latencies = [row[f"{name}_p{share}"] for name in ("first_token_ms", "between_tokens_ms")
                     for share in (50, 95, 99)]
        print(f"{row['label']:>10} {row['load']:>8} {row['requests']:>8} "
              f"{row['tokens_per_s']:>9.1f} "
              + " ".join(f"{value if value is not None else float('nan'):>7.2f}"
                         for value in latencies), flush=True)
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
