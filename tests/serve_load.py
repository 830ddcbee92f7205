#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads `twell serve` with many clients, some of which drop their requests.

Every answer must equal that of `twell generate` with the same prompt and seed, and the server's
resident memory must stay flat. Prints what it measured; exits with 1 when either fails.
Run: serve_load.py TWELL [--clients 200] [--seconds 600]"""

import argparse
import json
import random
import statistics
import sys
import threading
import time

from serve_testing import Connection, Served, request_bytes

PROMPTS = ["The cork", "A river", "Where does", "One two"]
SEEDS = 6
TOKENS = 24
# Memory is compared from this share of the time on, when every thread has run.
WARM_UP = 0.2
FLAT = 0.05
# The C library keeps freed memory for each thread and processor, and fills these caches slowly.
# Without them a leak shows.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}


class Load:
    def __init__(self, served, deadline):
        self.served, self.deadline = served, deadline
        self.lock = threading.Lock()
        self.counts = {"answered": 0, "streamed": 0, "dropped": 0, "refused": 0}
        self.faults = []
        self.latencies = []
        self.expected = {}
        for prompt in PROMPTS:
            for seed in range(SEEDS):
                got = served.generate(prompt, "--max-tokens", TOKENS, "--seed", seed)
                self.expected[prompt, seed] = (got["text"], got["tokens"])

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def client(self, number):
        rng = random.Random(number)
        connection = None
        while time.monotonic() < self.deadline and not self.faults:
            try:
                connection = connection or Connection(self.served, timeout=120)
                if not self.one(connection, rng):
                    connection.close()
                    connection = None
            except Exception as fault:  # reported at the end
                self.faults.append(f"client {number}: {fault!r}")
        if connection:
            connection.close()

    def one(self, connection, rng):
        """One request; False when the connection was dropped."""
        prompt, seed = rng.choice(PROMPTS), rng.randrange(SEEDS)
        stream = rng.random() < 0.5
        start = time.monotonic()
        connection.send(request_bytes("POST", "/v1/completions", {
            "prompt": prompt, "seed": seed, "max_tokens": TOKENS, "stream": stream,
            "stream_options": {"include_usage": True} if stream else None}))
        if rng.random() < 0.3:
            if stream and rng.random() < 0.5:
                connection.head()
            time.sleep(rng.expovariate(5))
            self.count("dropped")
            return False
        status, headers, body = connection.reply()
        if status == 503:
            self.count("refused")
            time.sleep(0.2)
            return headers.get("connection") != "close"
        if status != 200:
            raise RuntimeError(f"status {status}: {body!r}")
        if stream:
            events = [line[6:] for line in body.decode().split("\n\n") if line]
            if events.pop() != "[DONE]":
                raise RuntimeError(f"a stream without an end: {body!r}")
            chunks = [json.loads(event) for event in events]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            usage = chunks[-1]["usage"]
        else:
            answer = json.loads(body)
            text, usage = answer["choices"][0]["text"], answer["usage"]
        if (text, usage["completion_tokens"]) != self.expected[prompt, seed]:
            raise RuntimeError(f"another answer to {prompt!r} with seed {seed}: {text!r}")
        with self.lock:
            self.latencies.append(time.monotonic() - start)
        self.count("streamed" if stream else "answered")
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("twell")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--option", action="append", default=[], help="of twell serve")
    arguments = parser.parse_args()
    served = Served(arguments.twell, "--batch", "16", *arguments.option, environment=ENVIRONMENT)
    start = time.monotonic()
    load = Load(served, start + arguments.seconds)
    load.deadline = time.monotonic() + arguments.seconds
    threads = [threading.Thread(target=load.client, args=(i,)) for i in range(arguments.clients)]
    for thread in threads:
        thread.start()
    begin, memory = time.monotonic(), []
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        if time.monotonic() - begin > WARM_UP * arguments.seconds:
            memory.append(served.resident_bytes())
    for thread in threads:
        thread.join()
    # Dropped requests end at once.
    connection = Connection(served)
    deadline = time.monotonic() + 10
    while True:
        left = [line for line in connection.get("/metrics")[1].splitlines()
                if line.startswith(("twell_requests_running ", "twell_requests_waiting "))]
        if all(line.endswith(" 0") for line in left) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    connection.close()
    if not all(line.endswith(" 0") for line in left):
        load.faults.append(f"sequences are left: {left}")
    code = served.stop()
    if code != 0:
        load.faults.append(f"exit code {code}")
    # Medians, because the memory of requests in progress goes up and down.
    fifth = max(len(memory) // 5, 1)
    medians = [statistics.median(memory[i:i + fifth]) for i in range(0, len(memory) - fifth + 1, fifth)]
    growth = medians[-1] / medians[0] - 1
    if abs(growth) > FLAT:
        load.faults.append(f"memory changed by {100 * growth:.1f}%")
    times = sorted(load.latencies)
    print(f"{arguments.clients} clients, {time.monotonic() - begin:.0f} s: {load.counts}")
    print(f"answers equal to generate's: {len(times)}, median {times[len(times) // 2]:.2f} s, "
          f"p99 {times[int(0.99 * len(times))]:.2f} s")
    print(f"resident memory after warm-up, MiB, medians of fifths of the time: "
          f"{', '.join(f'{one / 2**20:.1f}' for one in medians)} ({100 * growth:+.1f}%); "
          f"at most {max(memory) / 2**20:.1f}")
    for fault in load.faults[:10]:
        print("fault:", fault)
    return 1 if load.faults else 0


if __name__ == "__main__":
    sys.exit(main())
