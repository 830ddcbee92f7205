# SPDX-License-Identifier: Apache-2.0
"""Training by the engine, without PyTorch's autograd: what `twell train` does, step by step.

    twell.tokenize("docs/", "shards", vocab_size=2048)
    trainer = twell.Trainer(out="runs/first", shards="shards", preset="tiny", steps=1000, l1=2e-5)
    for metrics in trainer:
        print(metrics["step"], metrics["ce"], metrics["l1"])
    engine = twell.Engine(trainer.save())
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _engine


def tokenize(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 4096,
    validation_fraction: float = 0.01,
    seed: int = 0,
    threads: int = 0,
) -> tuple[int, int]:
    """Writes text as shards of token ids into a folder. Returns the tokens for training and for
    validation.

    data: files and folders of text, .jsonl or .parquet, also .gz, .xz, .zst.
    tokenizer: a tokenizer.json; None learns one of vocab_size tokens from the first 32 MiB.
    """
    paths = [data] if isinstance(data, (str, os.PathLike)) else data
    return _engine.tokenize(
        [str(path) for path in paths], str(folder), str(tokenizer or ""), vocab_size,
        validation_fraction, seed, threads,
    )


def _absolute(path: str | os.PathLike[str], name: str) -> str:
    # An empty path would mean the current folder.
    text = os.fspath(path)
    if not text:
        raise ValueError(f"{name} must be a path, got {text!r}")
    return os.path.abspath(text)


class Trainer:
    """A training run in the folder `out`, on shards of `tokenize` or of `twell tokenize`, or on the
    conversations of `chat_data`. `run` trains it as a whole; or iterate over the trainer, or call
    `step`, and `save`.

    resume: goes on with the run in `out` from its newest checkpoint; options that are not given are
        those that it began with, its shards too.
    device: "auto", "cpu", "cuda" or "cuda:N"; threads, of the CPU.

    All other options are those of `twell train`, whose help explains them, with `_` for `-`:
    `lr=1e-3, batch_tokens=65536, gated=False`; `from_` is a checkpoint to start from. The command
    goes on with a run of Python, `twell train --resume --out DIR`, and Python with one of the
    command. Wrong or unknown options are a ValueError.
    """

    def __init__(
        self,
        *,
        out: str | os.PathLike[str],
        shards: str | os.PathLike[str] | None = None,
        resume: bool = False,
        **options: Any,
    ) -> None:
        given = {"out": _absolute(out, "out"), **options}
        if shards is not None:
            given["shards"] = _absolute(shards, "shards")
        if resume:
            given["resume"] = True
        if "from_" in options:
            given["from"] = _absolute(given.pop("from_"), "from_")
        for name in ("chat_data", "chat_template"):
            if name in options:
                given[name] = _absolute(given[name], name)
        self._run = _engine.training_run(json.dumps(given))

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self._run.steps

    @property
    def steps_done(self) -> int:
        return self._run.steps_done

    def step(self) -> dict[str, Any]:
        """Trains one step and returns its metrics, as docs/formats.md lists them for
        metrics.jsonl: step, tokens, ce, l1, grad_norm, layers, ..."""
        return json.loads(self._run.step())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.steps_done < self.steps:
            yield self.step()

    def validate(self) -> float:
        """Nats per token on the validation shards."""
        return self._run.validate()

    def save(self) -> str:
        """Saves a checkpoint in the run's folder, which `checkpoint` there then links to. Returns
        its path."""
        return self._run.save()

    def run(self, on_step: Callable[[dict[str, Any]], bool | None] | None = None) -> str:
        """Trains to the end, with validation, metrics.jsonl and checkpoints. Returns the path of
        the last checkpoint.

        on_step: gets the metrics of each step; val_ce is among them after a validation, and those
            of step 0 have nothing else, where the model is validated before the first step;
            `sample_every` and `sample_prompt` (a text or several) add `samples`. Where
            it returns False or raises, the run saves and ends, as it does for Ctrl-C.
        """
        return self._run.run(
            lambda text: on_step(json.loads(text)) if on_step is not None else None
        )
