#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model at some L1 coefficients on several GPUs. In each run one process is killed; the run
goes on with a single one, and then with all. Condenses the curves, and draws them.

  bench/distributed_run.py --work DIR --text TEXT --gpus 2 [--l1 0 1e-4] [--seconds 540]
  bench/distributed_run.py --work DIR --text TEXT --ranks 2 --small    # on the CPU, in minutes

A call ends after --seconds, saves, and exits with 75 while there is more to do: repeat it until it
exits with 0. DIR keeps everything between calls; DIR/result has curves.csv, curves.svg and
summary.txt. Needs only Python's standard library."""
import argparse
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TIME_IS_UP = 75
# Shares of the steps: checkpoints, when a process is killed, how long a single one runs.
SAVE_EVERY, KILL_AT, ALL_AGAIN_AFTER = 0.20, 0.41, 0.02
FULL = ["--preset", "0.5b", "--batch-tokens", "65536", "--tokens", "300000000",
        "--validate-every", "100", "--validation-sequences", "64"]
FULL_SEQUENCES = 32  # of a step
SMALL = ["--width", "64", "--ffn", "256", "--layers", "2", "--heads", "2", "--context", "64",
         "--micro-batch", "4", "--batch-tokens", "1024", "--tokens", "204800",
         "--validate-every", "20", "--validation-sequences", "16", "--lr", "3e-3"]
SMALL_L1 = {"1e-4": "1e-2"}  # few steps need a stronger coefficient


class TimeIsUp(Exception):
    pass


class Machine:
    def __init__(self, options):
        self.twell, self.work = options.twell, options.work
        self.small = options.small
        self.all = options.gpus or options.ranks
        self.flag = "--gpus" if options.gpus else "--ranks"
        self.device = ["--device", "cuda" if options.gpus else "cpu"]
        self.deadline = time.monotonic() + options.seconds

    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline

    def processes(self, count: int) -> list[str]:
        return self.device + ([self.flag, str(count)] if count > 1 else [])

    def start(self, words: list[str], log: pathlib.Path) -> subprocess.Popen:
        with open(log, "w") as file:
            return subprocess.Popen([self.twell, *words], stdout=file, stderr=subprocess.STDOUT)

    def tokenize(self, text: list[str]) -> None:
        shards = self.work / "shards"
        if (shards / "manifest.json").exists():
            return
        vocabulary = "1024" if self.small else "49152"
        log = self.work / "tokenize.log"
        process = self.start(["tokenize", "--data", *text, "--out", str(shards), "--bad-files",
                              "skip", "--vocab-size", vocabulary], log)
        while process.poll() is None:
            if self.time_is_up():
                process.send_signal(signal.SIGTERM)  # finished parts are kept
                process.wait()
                raise TimeIsUp
            time.sleep(0.1)
        require(process.returncode == 0, log)


def require(fine: bool, log: pathlib.Path) -> None:
    if not fine:
        sys.exit(f"{log}:\n{log.read_text()[-2000:]}")


class Run:
    """A training run and what happened to it, which DIR/l1-C.events.json keeps."""

    def __init__(self, machine: Machine, coefficient: str):
        self.machine, self.coefficient = machine, coefficient
        self.folder = machine.work / f"l1-{coefficient}"
        self.log = machine.work / f"l1-{coefficient}.log"
        self.path = machine.work / f"l1-{coefficient}.events.json"
        self.events = json.loads(self.path.read_text()) if self.path.exists() else []
        # A micro-batch per GPU and step.
        self.sizes = SMALL if machine.small else \
            [*FULL, "--micro-batch", str(max(1, FULL_SEQUENCES // machine.all))]
        value = {self.sizes[i]: self.sizes[i + 1] for i in range(0, len(self.sizes), 2)}
        batch = int(value["--batch-tokens"])
        self.steps = -(-int(value["--tokens"]) // batch)

    def note(self, what: str, processes: int) -> None:
        self.events.append({"step": self.done(), "what": what, "processes": processes})
        self.path.write_text(json.dumps(self.events, indent=1) + "\n")
        print(f"L1 {self.coefficient}: step {self.done()} of {self.steps}: {what}", flush=True)

    def done(self) -> int:
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        complete = [line for line in lines if line.endswith("}")]
        return json.loads(complete[-1])["step"] if complete else 0

    def killed_at(self):
        return next((e["step"] for e in self.events if e["what"] == "killed"), None)

    def finished(self) -> bool:
        return bool(self.events) and self.events[-1]["what"] == "finished"

    def words(self, processes: int) -> list[str]:
        out = ["train", "--out", str(self.folder), *self.machine.processes(processes)]
        if (self.folder / "options.json").exists():
            saved = (self.folder / "checkpoint").exists()
            if not saved:  # it was stopped before its first checkpoint
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return out + ["--resume"]
        l1 = SMALL_L1.get(self.coefficient, self.coefficient) if self.machine.small \
            else self.coefficient
        every = str(max(1, int(SAVE_EVERY * self.steps)))
        return out + ["--shards", str(self.machine.work / "shards"), "--l1", l1,
                      "--save-every", every, *self.sizes]

    def until(self, step: int, processes: int) -> subprocess.Popen:
        """Trains until a step is done or the process has ended; the caller ends what still runs."""
        process = self.machine.start(self.words(processes), self.log)
        self.note("started" if not self.events else "resumed", processes)
        while process.poll() is None and self.done() < step:
            if self.machine.time_is_up():
                self.stop(process)
                self.note("stopped by the time limit", processes)
                raise TimeIsUp
            time.sleep(0.02 if self.machine.small else 0.2)
        return process

    def stop(self, process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGTERM)
        process.wait()
        # The launcher of several ranks ends with 130.
        require(process.returncode in (0, 130, 128 + signal.SIGTERM), self.log)

    def go_on(self) -> None:
        machine = self.machine
        if self.killed_at() is None:
            process = self.until(int(KILL_AT * self.steps), machine.all)
            require(process.poll() is None, self.log)
            ranks = re.search(r"^ranks: \d+ processes, (.*)$", self.log.read_text(), re.M)
            victim = int(ranks[1].split()[1])
            subprocess.run(["kill", "-KILL", str(victim)], check=True)
            process.wait()
            text = self.log.read_text()
            require(process.returncode == 1 and "rank 1 ended in step" in text, self.log)
            self.note("killed", machine.all)
        alone_until = self.killed_at() + int(ALL_AGAIN_AFTER * self.steps)
        if not any(e["what"] == "alone" for e in self.events):
            process = self.until(alone_until, 1)
            self.stop(process)
            self.note("alone", 1)
        process = self.until(self.steps + 1, machine.all)
        require(process.wait() == 0, self.log)
        self.note("finished", machine.all)

    def summary(self) -> list[str]:
        rows = [json.loads(line) for line in open(self.folder / "metrics.jsonl")]
        rows = [row for row in rows if row["step"] > 0]
        last = rows[-min(100, len(rows)):]
        layers = list(zip(*(row["layers"] for row in last)))
        active = [sum(l["nnz"] for l in layer) / len(layer) for layer in layers]
        held_out = [row["val_ce"] for row in rows if "val_ce" in row]
        out = [f"L1 {self.coefficient}: {len(rows)} steps, {rows[-1]['tokens'] / 1e6:.1f} M tokens",
               f"  held-out CE      {held_out[-1]:.4f}",
               f"  training CE      {sum(r['ce'] for r in last) / len(last):.4f}  (last 100 steps)",
               "  active neurons   " + " ".join(f"{value:.1f}" for value in active),
               "  dead neurons     " + " ".join(str(l["dead"]) for l in rows[-1]["layers"])]
        speed = {}
        for event, following in zip(self.events, self.events[1:]):
            if event["what"] in ("started", "resumed"):
                part = [r["tokens_per_s"] for r in rows
                        if event["step"] < r["step"] <= following["step"]]
                speed.setdefault(event["processes"], []).extend(part)
        for processes, values in sorted(speed.items()):
            if values:
                median = sorted(values)[len(values) // 2]
                out.append(f"  tokens/s         {median:.0f} with {processes}")
        out.append("  " + "; ".join(f"{e['what']} at step {e['step']} ({e['processes']})"
                                    for e in self.events))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--text", nargs="+", required=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--gpus", type=int)
    kind.add_argument("--ranks", type=int)
    parser.add_argument("--l1", nargs="+", default=["0", "1e-4"])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--twell", default="build/release/twell")
    options = parser.parse_args()
    if (options.gpus or options.ranks) < 2:
        parser.error("it takes at least two processes")
    options.work.mkdir(parents=True, exist_ok=True)
    machine = Machine(options)
    try:
        machine.tokenize(options.text)
        for coefficient in options.l1:
            run = Run(machine, coefficient)
            if not run.finished():
                run.go_on()
    except TimeIsUp:
        sys.exit(TIME_IS_UP)
    result = options.work / "result"
    result.mkdir(exist_ok=True)
    runs = [Run(machine, coefficient) for coefficient in options.l1]
    plot = [sys.executable, str(HERE / "plot_recipe.py")]
    with open(result / "curves.csv", "w") as file:
        subprocess.run([*plot, "condense", *(f"{r.coefficient}={r.folder}" for r in runs)],
                       stdout=file, check=True)
    subprocess.run([*plot, "plot", str(result / "curves.csv"), str(result / "curves.svg")],
                   check=True)
    text = "\n".join(line for run in runs for line in run.summary()) + "\n"
    (result / "summary.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
