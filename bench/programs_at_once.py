#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast a program of the command line is beside others on the same cores.

Each measured program does a fixed amount of work, alone and while another one runs again and again
beside it. The share is the time alone over the time beside: half is fair for two programs that use
every core, and anything far below it means that waiting threads burn the other's time. Medians of
several rounds, with pauses, on a machine that does nothing else.
Run: programs_at_once.py TWELL [--rounds 5] [--checkpoint RUN] [--least 0.4]"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(command):
    """Seconds that a command takes."""
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def run_beside(command, other):
    """The same while `other` runs again and again."""
    done = threading.Event()

    def repeat():
        while not done.is_set():
            child = subprocess.Popen(other, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while child.poll() is None:
                if done.wait(0.02):
                    child.kill()
                    child.wait()

    thread = threading.Thread(target=repeat)
    thread.start()
    time.sleep(0.5)  # the other one has loaded its model
    try:
        return run(command)
    finally:
        done.set()
        thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("twell", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--checkpoint", help="of a run; by default a new one of the tiny preset")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between measurements")
    parser.add_argument("--tokens", type=int, default=256, help="of each of four texts")
    parser.add_argument("--least", type=float, default=0.4, help="share below which it exits with 1")
    given = parser.parse_args()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load:.2f} before")
    with tempfile.TemporaryDirectory(prefix="twell-at-once-") as folder:
        folder = pathlib.Path(folder)
        if given.checkpoint is None:
            given.checkpoint = str(folder / "run")
            run([given.twell, "train", "--preset", "tiny", "--steps", "2", "--validate-every", "0",
                 "--data", str(ROOT / "docs"), "--out", given.checkpoint])
        (folder / "prompts").write_text("the\na\nof\nin\n")
        generate = [given.twell, "generate", "--checkpoint", given.checkpoint, "--prompts",
                    str(folder / "prompts"), "--batch", "1", "--max-tokens", str(given.tokens),
                    "--seed", "1", "--device", "cpu", "--quiet"]
        evaluate = [given.twell, "eval", "--checkpoint", given.checkpoint, "--data",
                    str(ROOT / "docs"), "--max-tokens", "20000", "--device", "cpu"]
        many = str(4 * cores)
        cases = [
            ("generate beside generate", generate, generate, None),
            ("eval beside eval", evaluate, evaluate, None),
            ("generate beside eval", generate, evaluate, None),
            ("eval beside generate", evaluate, generate, None),
            (f"generate --threads {many}", generate, None, generate + ["--threads", many]),
            (f"eval --threads {many}", evaluate, None, evaluate + ["--threads", many]),
        ]
        failed = False
        print(f"{'':28} {'alone, s':>10} {'then, s':>10} {'share':>7}   rounds")
        for name, command, other, instead in cases:
            alone, then = [], []
            for _ in range(given.rounds):
                alone.append(run(command))
                time.sleep(given.pause)
                then.append(run_beside(command, other) if instead is None else run(instead))
                time.sleep(given.pause)
            share = statistics.median(alone) / statistics.median(then)
            failed = failed or share < given.least
            rounds = " ".join(f"{a / b:.2f}" for a, b in zip(alone, then))
            print(f"{name:28} {statistics.median(alone):10.2f} {statistics.median(then):10.2f} "
                  f"{share:7.2f}   {rounds}", flush=True)
    print(f"load {os.getloadavg()[0]:.2f} after")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
