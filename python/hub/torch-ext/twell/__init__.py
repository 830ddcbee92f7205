# SPDX-License-Identifier: Apache-2.0
"""Sparse feed-forward layers: the ops and `patch` of the package `twell`, as a kernel of the Hub."""

from . import layers
from .ops import ffn, ffn_train
from .patch import LayerStats, l1, patch, reinit_dead, relufy, stats, unpatch, update
from .plan import Plan, TrainCounts

__all__ = [
    "LayerStats",
    "Plan",
    "TrainCounts",
    "ffn",
    "ffn_train",
    "l1",
    "layers",
    "patch",
    "reinit_dead",
    "relufy",
    "stats",
    "unpatch",
    "update",
]
