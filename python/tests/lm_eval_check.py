# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice tasks on one checkpoint, scored in every way there is: transformers through
lm-eval's model `hf`, the same patched (`twell-hf`), the engine (`twell`), the server
(`local-completions`), and `twell eval --tasks`. Prints one table; exits 1 if they differ.

    python python/tests/lm_eval_check.py runs/first/checkpoint --task-data TASKS --device cuda
    python python/tests/lm_eval_check.py tests/golden/tasks/model

TASKS holds the data sets as docs/evaluation.md lists them, in the Hub's formats (Parquet or JSON
lines). Nothing is downloaded. Ways whose program or package is missing are named and left out.

On the CPU all ways compute in float32, and a choice's log-likelihoods may differ by 1e-3 nats and
1e-5 of their size. On a GPU they compute in bfloat16: by 0.1 nats and 1%. An item may be answered
differently only where its two answers are as close to each other as that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import datasets  # noqa: E402
import lm_eval  # noqa: E402
import torch  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from pyarrow import parquet  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import twell.lm_eval  # noqa: E402, F401  (registers the models)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Task: folder in a copy of the data set's files on the Hub, split.
TASKS = {
    "arc_easy": ("ARC-Easy", "test"),
    "arc_challenge": ("ARC-Challenge", "test"),
    "hellaswag": ("hellaswag/data", "validation"),
    "openbookqa": ("openbookqa/main", "test"),
    "piqa": ("piqa/plain_text", "validation"),
    "winogrande": ("winogrande/winogrande_xl", "validation"),
    "commonsense_qa": ("commonsense_qa/data", "validation"),
}
ROUNDING = {"cpu": (1e-3, 1e-5), "cuda": (0.1, 0.01)}  # in nats, relative


def task_file(folder: pathlib.Path, task: str) -> pathlib.Path | None:
    where, split = TASKS[task]
    names = [f"{task}.jsonl", f"{task}.parquet"]
    for inside in (where, where.split("/")[0] + "/data", task):
        names += [f"{inside}/{split}-00000-of-00001.parquet", f"{inside}/{split}.jsonl"]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def harness_tasks(files: dict[str, pathlib.Path]) -> list:
    """lm-eval's own tasks, with their prompts and metrics, on local data."""
    manager = TaskManager()
    tasks = []
    for task, path in files.items():
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.open()]
        else:
            rows = parquet.read_table(path).to_pylist()
        splits = datasets.DatasetDict(
            {name: datasets.Dataset.from_list(rows) for name in ("train", "validation", "test")}
        )
        with mock.patch("datasets.load_dataset", return_value=splits):
            tasks += manager.load([task])["tasks"].values()
    return tasks


def prepared(checkpoint: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The checkpoint, with what transformers needs to read its tokenizer.json as it stands."""
    if (checkpoint / "tokenizer_config.json").is_file():
        return checkpoint
    folder.mkdir()
    for file in checkpoint.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    for name in ("bos_token", "eos_token"):
        token = config.get(f"{name}_id")
        token = token[0] if isinstance(token, list) else token
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    (folder / "tokenizer.json").unlink()
    tokenizer.save_pretrained(folder)
    return folder


class Scores:
    """Of one way: log-likelihoods of the choices and what the harness makes of them."""

    def __init__(self):
        self.choices: dict[str, list[list[float]]] = {}
        self.right: dict[str, dict[str, list[bool]]] = {}  # task: metric: item
        self.texts: dict[str, list[list[str]]] = {}  # contexts with choices

    def accuracy(self, task: str, metric: str) -> float:
        items = self.right[task][metric]
        return sum(items) / len(items)


def through_harness(model: str, arguments: dict, tasks: list, batch: int, device: str) -> Scores:
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, batch_size=batch, device=device,
        bootstrap_iters=0,
    )
    scores = Scores()
    for task, samples in found["samples"].items():
        samples = sorted(samples, key=lambda sample: sample["doc_id"])
        scores.choices[task] = [[value for value, _ in s["filtered_resps"]] for s in samples]
        scores.texts[task] = [["".join(pair) for pair in s["arguments"]] for s in samples]
        scores.right[task] = {
            metric: [bool(s[metric]) for s in samples]
            for metric in ("acc", "acc_norm") if metric in samples[0]
        }
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return scores


def through_server(binary, checkpoint, context, begin, tasks, batch, device) -> Scores:
    server = subprocess.Popen(
        [binary, "serve", "--checkpoint", checkpoint, "--model-name", "model", "--port", "0",
         "--device", device],
        stdout=subprocess.PIPE, text=True,
    )
    try:
        line = server.stdout.readline()
        address = re.search(r"http://\S+?:\d+", line)
        if not address:
            raise RuntimeError(f"twell serve did not start: {line}")
        return through_harness(
            "local-completions",
            {"model": "model", "base_url": f"{address[0]}/v1/completions", "max_length": context,
             "tokenizer": str(checkpoint), "tokenizer_backend": "huggingface",
             "add_bos_token": begin, "num_concurrent": 4},
            tasks, batch, "cpu",
        )
    finally:
        server.terminate()
        server.wait()


def through_eval(binary, checkpoint, data, tasks, device, out) -> Scores:
    subprocess.run(
        [binary, "eval", "--checkpoint", checkpoint, "--tasks", ",".join(tasks), "--task-data",
         data, "--device", device, "--out", out],
        check=True, stdout=subprocess.DEVNULL,
    )
    scores = Scores()
    for task in tasks:
        _, *items = map(json.loads, (out / f"{task}.jsonl").read_text().splitlines())
        scores.choices[task] = [item["log_likelihoods"] for item in items]
        scores.right[task] = {"acc": [item["correct"] for item in items]}
        if "correct_norm" in items[0]:
            scores.right[task]["acc_norm"] = [item["correct_norm"] for item in items]
    return scores


def compare(task: str, want: Scores, got: Scores, rounding, skip: set[int]) -> tuple[float, list[str]]:
    """Largest difference of a log-likelihood, and what is beyond rounding."""
    absolute, relative = rounding
    largest, faults = 0.0, []
    for i, (a, b) in enumerate(zip(want.choices[task], got.choices[task], strict=True)):
        if i in skip:
            continue
        room = absolute + relative * max(map(abs, a))
        difference = max(abs(p - q) for p, q in zip(a, b, strict=True))
        if not difference <= room:
            faults.append(f"{task} item {i}: log-likelihoods differ by {difference:.2g}")
        largest = max(largest, difference)
        first, second = sorted(a)[-1], sorted(a)[-2]
        if want.right[task]["acc"][i] != got.right[task]["acc"][i] and first - second > 2 * room:
            faults.append(f"{task} item {i}: another answer, {first - second:.2g} nats apart")
    return largest, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--task-data", type=pathlib.Path, default=ROOT / "tests/golden/tasks/parquet")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated (all of %(default)s)")
    parser.add_argument("--device", default="cpu", choices=sorted(ROUNDING))
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--twell", type=pathlib.Path, default=ROOT / "build/release/twell",
                        help="the command, for the server and `twell eval` (%(default)s)")
    arguments = parser.parse_args()

    files = {}
    for task in arguments.tasks.split(","):
        if task not in TASKS:
            parser.error(f"unknown task '{task}': one of {', '.join(TASKS)}")
        path = task_file(arguments.task_data, task)
        if path is None:
            parser.error(f"no data of {task} in {arguments.task_data} (docs/evaluation.md)")
        files[task] = path
    device, batch = arguments.device, arguments.batch_size
    dtype = "bfloat16" if device == "cuda" else "float32"
    ways: dict[str, Scores] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="twell-lm-eval-") as temporary:
        folder = pathlib.Path(temporary)
        checkpoint = prepared(arguments.checkpoint, folder / "checkpoint")
        tasks = harness_tasks(files)

        tokenizer = twell.Engine(checkpoint, "cpu", slots=1)
        context = tokenizer.context
        begin = tokenizer.encode("a") != tokenizer.encode("a", begin_token=False)
        hf = {"max_length": context, "add_bos_token": begin}
        ways["hf"] = through_harness(
            "hf", {"pretrained": str(checkpoint), "dtype": dtype, **hf}, tasks, batch, device)
        # The harness keeps two tokens less of a text for a server than for a model of its own.
        cut = {
            task: {
                i for i, texts in enumerate(items)
                if max(len(tokenizer.encode(text)) for text in texts) > context - 1
            }
            for task, items in ways["hf"].texts.items()
        }
        del tokenizer
        ways["twell-hf"] = through_harness(
            "twell-hf", {"checkpoint": str(checkpoint), **hf}, tasks, batch, device)
        ways["twell"] = through_harness(
            "twell", {"checkpoint": str(checkpoint)}, tasks, batch, device)
        if not arguments.twell.is_file():
            left_out["server"] = left_out["eval"] = f"there is no {arguments.twell}"
        else:
            try:
                import tenacity  # noqa: F401  (lm-eval's client needs it)

                ways["server"] = through_server(
                    arguments.twell, checkpoint, context, begin, tasks, batch, device)
            except ModuleNotFoundError as error:
                left_out["server"] = str(error)
            ways["eval"] = through_eval(
                arguments.twell, checkpoint, arguments.task_data, list(files), device, folder / "eval")

    print(f"{arguments.checkpoint} on {device} in {dtype}, torch {torch.__version__}, "
          f"lm-eval {lm_eval.__version__}; acc and acc_norm, and the largest difference to hf of a "
          "choice's log-likelihood in nats")
    print(f"{'':15}{'items':>6}" + "".join(f"{way:>24}" for way in ways))
    faults = []
    for task in files:
        line = f"{task:15}{len(ways['hf'].choices[task]):6}"
        for way, scores in ways.items():
            skip = cut[task] if way == "server" else set()
            largest, found = compare(task, ways["hf"], scores, ROUNDING[device], skip)
            faults += [f"{way}: {fault}" for fault in found]
            text = " ".join(
                f"{scores.accuracy(task, metric):.3f}" if metric in ways["hf"].right[task] else " " * 5
                for metric in ("acc", "acc_norm")
            )
            line += f"{text:>15}" + (f"{largest:9.1e}" if way != "hf" else f"{'':9}")
        print(line)
    number = sum(map(len, cut.values()))
    if number and "server" in ways:
        print(f"{number} item(s) with more than {context - 1} tokens are not compared through the "
              "server, for which the harness keeps two tokens less of a text")
    for way, reason in left_out.items():
        print(f"{way} is left out: {reason}")
    for fault in faults:
        print(f"FAIL {fault}")
    print(f"FAIL {len(faults)} difference(s)" if faults else "ok   all ways agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
