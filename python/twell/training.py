# SPDX-License-Identifier: Apache-2.0
"""Training by the engine, without PyTorch's autograd: what `twell train` does, step by step.

    twell.tokenize("docs/", "shards", vocab_size=8192)
    trainer = twell.Trainer(out="runs/first", shards="shards", preset="tiny", steps=1000, l1=2e-5)
    for metrics in trainer:
        print(metrics["step"], metrics["ce"], metrics["l1"])
    twell.Engine(trainer.save())
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence

from . import _engine


def tokenize(
    data: str | os.PathLike | Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    tokenizer: str | os.PathLike | None = None,
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


class Trainer:
    """A training run in the folder `out`, on shards of `tokenize` or of `twell tokenize`.

    Options are those of `twell train` with `_` for `-`: preset, width, ffn, layers, heads, ...;
    `from_` for the checkpoint to start from; steps or tokens, sequence_length, micro_batch,
    batch_tokens, lr, l1, reinit_dead, validate_every, save_every, seed, device, threads, ... A
    ValueError names those that it does not know.

    Either `run`, or steps and `save`: a run is trained in one of the two ways.
    """

    def __init__(self, *, out: str | os.PathLike, shards: str | os.PathLike, **options):
        if "from_" in options:
            options["from"] = str(options.pop("from_"))
        given = {"out": str(out), "shards": str(shards), **options}
        self._run = _engine.TrainingRun(json.dumps(given))

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self._run.steps

    @property
    def steps_done(self) -> int:
        return self._run.steps_done

    def step(self) -> dict:
        """Trains one step and returns its metrics, as in metrics.jsonl: step, tokens, ce, l1,
        grad_norm, layers, ..."""
        return json.loads(self._run.step())

    def __iter__(self) -> Iterator[dict]:
        while self.steps_done < self.steps:
            yield self.step()

    def validate(self) -> float:
        """Nats per token on the validation shards."""
        return self._run.validate()

    def save(self) -> str:
        """Saves a checkpoint in the run's folder, which `checkpoint` there then links to. Returns
        its path."""
        return self._run.save()

    def run(self, on_step: Callable[[dict], bool | None] | None = None) -> str:
        """Trains to the end, with validation, metrics.jsonl and checkpoints. Returns the path of
        the last checkpoint. on_step gets the metrics of each step, and those of step 0 where the
        model is validated before it; where it returns False or raises, the run saves and ends, as
        it does for Ctrl-C."""
        return self._run.run(
            lambda text: on_step(json.loads(text)) if on_step is not None else None
        )
