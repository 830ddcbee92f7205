#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What weights in 8 bits do to a trained model: cross-entropy of a text, active neurons of each layer,
and how many greedy tokens agree with those of the stored weights, dense and sparse.

  quality_8bit.py CHECKPOINT --text TEXT [--device cuda] [--max-tokens 200000] [--prompts 32]
                  [--tasks NAMES --task-data DIR]

On a GPU it compares fp8, on a CPU int8, without and with the output head in 8 bits; the first row is
the checkpoint as stored. Tasks are those of `twell eval --tasks`. Greedy tokens
count up to the first one that differs, so that one early difference weighs as much as it does for a
reader. Prompts are the text's first lines."""
import argparse
import json
import pathlib
import subprocess
import tempfile


def run(arguments, *command):
    done = subprocess.run([arguments.twell, *command, "--device", arguments.device], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def evaluate(arguments, kind, policy):
    return json.loads(run(arguments, "eval", "--checkpoint", arguments.checkpoint, "--data", arguments.text, "--json",
                          "--max-tokens", str(arguments.max_tokens), *kind, "--ffn", policy))


def accuracies(arguments, kind, policy):
    if arguments.tasks is None:
        return ""
    out = run(arguments, "eval", "--checkpoint", arguments.checkpoint, "--tasks", arguments.tasks, "--task-data",
              arguments.task_data, "--json", *kind, "--ffn", policy)
    return "".join(f"  {task} {100 * of['acc']:.1f}%" for task, of in json.loads(out)["tasks"].items())


def greedy(arguments, kind, policy, prompts):
    out = run(arguments, "generate", "--checkpoint", arguments.checkpoint, "--prompts", prompts, "--temperature", "0",
              "--max-tokens", str(arguments.tokens), "--json", *kind, "--ffn", policy)
    return [json.loads(line)["ids"] for line in out.splitlines()]


def agreement(want, got):
    """The share of a text's tokens before the first that differs."""
    same = 0
    for a, b in zip(want, got):
        if a != b:
            break
        same += 1
    return same / max(1, len(want))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--text", required=True)
    parser.add_argument("--twell", default="twell")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--max-tokens", type=int, default=200000)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens behind a prompt")
    parser.add_argument("--tasks")
    parser.add_argument("--task-data")
    arguments = parser.parse_args()
    type_of_weights = "fp8" if arguments.device == "cuda" else "int8"
    in_bytes = ["--weights", type_of_weights]
    kinds = {"stored": [], type_of_weights: in_bytes, "+ head": [*in_bytes, "--head", "8bit"]}
    lines = [line for line in pathlib.Path(arguments.text).read_text().splitlines() if len(line) > 40]
    with tempfile.TemporaryDirectory() as folder:
        prompts = pathlib.Path(folder) / "prompts.txt"
        prompts.write_text("\n".join(line[:200] for line in lines[:arguments.prompts]) + "\n")
        first = None
        for weights, kind in kinds.items():
            for policy in ("dense", "sparse"):
                result = evaluate(arguments, kind, policy)
                texts = greedy(arguments, kind, policy, str(prompts))
                if first is None:
                    first = (result["cross_entropy"], texts)
                ce = result["cross_entropy"]
                same = sum(agreement(a, b) for a, b in zip(first[1], texts)) / max(1, len(texts))
                active = " ".join(f"{n:.1f}" for n in result["nnz_per_token"])
                print(f"{weights:6} {policy:6} CE {ce:.4f} ({100 * (ce / first[0] - 1):+.2f}%)  greedy {100 * same:.1f}%"
                      f"{accuracies(arguments, kind, policy)}  active {active}", flush=True)


if __name__ == "__main__":
    main()
