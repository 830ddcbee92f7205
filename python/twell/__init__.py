# SPDX-License-Identifier: Apache-2.0
"""Sparse feed-forward layers for PyTorch and transformers.

    import twell
    twell.patch(model)      # ReLU feed-forward layers run on active neurons only; same results

Ops with autograd: `twell.ffn`, `twell.ffn_train`. Models: `patch`, `unpatch`, `relufy`, `l1`,
`update`, `stats`, `reinit_dead`. transformers' Trainer: `SparsityCallback`. Checkpoints without
transformers: `Engine`, `tokenize`, `Trainer`.
`python -m twell.doctor` says what this installation can do.
"""

from typing import TYPE_CHECKING, Any

from .ops import ffn, ffn_train
from .patch import LayerStats, l1, patch, reinit_dead, relufy, stats, unpatch, update
from .plan import Plan, TrainCounts

__all__ = [
    "Engine",
    "Generation",
    "Trainer",
    "tokenize",
    "LayerStats",
    "Plan",
    "SparsityCallback",
    "TrainCounts",
    "ffn",
    "ffn_train",
    "l1",
    "patch",
    "reinit_dead",
    "relufy",
    "stats",
    "unpatch",
    "update",
]
__version__ = "0.2.0"

if TYPE_CHECKING:
    from .callback import SparsityCallback
    from .engine import Engine, Generation
    from .training import Trainer, tokenize


def __getattr__(name: str) -> Any:
    # Imported when they are used: the engine needs nanobind-backend, the callback transformers.
    if name in ("Engine", "Generation"):
        from . import engine

        return getattr(engine, name)
    if name in ("Trainer", "tokenize"):
        from . import training

        return getattr(training, name)
    if name == "SparsityCallback":
        from .callback import SparsityCallback

        return SparsityCallback
    raise AttributeError(f"module 'twell' has no attribute '{name}'")
