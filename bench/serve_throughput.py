#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of a running server with OpenAI's completions API.

Prompts are random token ids, so none shares its beginning with another, and every answer has exactly
--new-tokens tokens (ignore_eos). Either so many requests at a time (--concurrency), or requests that
arrive at random at a mean rate however long the others take (--rate). Prints a table and, with
--json, appends a JSON line for each row. Needs Python alone.
Run: serve_throughput.py --url http://127.0.0.1:8000 --concurrency 1 8 64 --label sparse"""

import argparse
import asyncio
import json
import random
import time
import urllib.parse


class Client:
    def __init__(self, arguments):
        self.arguments = arguments
        url = urllib.parse.urlsplit(arguments.url)
        self.host, self.port = url.hostname, url.port or 80
        self.rng = random.Random(arguments.seed)

    def request(self):
        ids = [self.rng.randrange(self.arguments.first_id, self.arguments.last_id)
               for _ in range(self.arguments.prompt_tokens)]
        body = json.dumps({"prompt": ids, "max_tokens": self.arguments.new_tokens, "stream": True,
                           "temperature": self.arguments.temperature, "ignore_eos": True}).encode()
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {self.host}",
                 "Content-Type: application/json", f"Content-Length: {len(body)}",
                 "Connection: close"]
        if self.arguments.api_key:
            lines.append(f"Authorization: Bearer {self.arguments.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def one(self):
        """Seconds to the first token and to the end of one request."""
        data = self.request()
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head[:40]!r}: {(await reader.read())[:500]!r}")
        first, tail = None, b""
        while piece := await reader.read(1 << 16):
            if first is None and b"data:" in piece:
                first = time.perf_counter() - start
            tail = (tail + piece)[-100:]
        if b"[DONE]" not in tail:
            raise RuntimeError(f"a stream without an end: {tail!r}")
        writer.close()
        return first, time.perf_counter() - start

    async def closed_loop(self, concurrency):
        left = [max(self.arguments.requests, 4 * concurrency)]
        results = []

        async def worker():
            while left[0] > 0:
                left[0] -= 1
                results.append(await self.one())

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return results

    async def open_loop(self, rate):
        tasks = []
        for _ in range(self.arguments.requests):
            tasks.append(asyncio.create_task(self.one()))
            await asyncio.sleep(self.rng.expovariate(rate))
        return await asyncio.gather(*tasks)


def percentile(values, share):
    values = sorted(values)
    return values[min(int(share * len(values)), len(values) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--concurrency", type=int, nargs="+", help="requests at a time")
    mode.add_argument("--rate", type=float, nargs="+", help="mean arrivals per second")
    parser.add_argument("--requests", type=int, default=64,
                        help="per row; at least four times the concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--first-id", type=int, default=100, help="lowest id in prompts")
    parser.add_argument("--last-id", type=int, default=1000, help="end of the ids in prompts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="copied into every row")
    parser.add_argument("--json", help="file to append rows to")
    arguments = parser.parse_args()
    client = Client(arguments)
    asyncio.run(client.one())  # what is set up at the first request is not measured
    print(f"{'label':>10} {'load':>10} {'requests':>8} {'tokens/s':>9} {'first token ms':>16} "
          f"{'between tokens ms':>18}\n{'':>40} {'p50':>8} {'p99':>7} {'p50':>10} {'p99':>7}")
    for load in arguments.concurrency or arguments.rate:
        start = time.perf_counter()
        results = asyncio.run(client.closed_loop(load) if arguments.concurrency
                              else client.open_loop(load))
        seconds = time.perf_counter() - start
        first = [1e3 * one for one, _ in results]
        between = [1e3 * (end - one) / max(arguments.new_tokens - 1, 1) for one, end in results]
        row = {"label": arguments.label,
               "load": f"{load}" if arguments.concurrency else f"{load}/s",
               "prompt_tokens": arguments.prompt_tokens, "new_tokens": arguments.new_tokens,
               "requests": len(results), "seconds": seconds,
               "tokens_per_second": len(results) * arguments.new_tokens / seconds,
               "first_token_ms_p50": percentile(first, 0.5),
               "first_token_ms_p99": percentile(first, 0.99),
               "between_tokens_ms_p50": percentile(between, 0.5),
               "between_tokens_ms_p99": percentile(between, 0.99)}
        print(f"{row['label']:>10} {row['load']:>10} {row['requests']:>8} "
              f"{row['tokens_per_second']:>9.1f} {row['first_token_ms_p50']:>8.1f} "
              f"{row['first_token_ms_p99']:>7.1f} {row['between_tokens_ms_p50']:>10.2f} "
              f"{row['between_tokens_ms_p99']:>7.2f}", flush=True)
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
