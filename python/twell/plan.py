# SPDX-License-Identifier: Apache-2.0
"""What a feed-forward layer keeps between calls: its counts, and the execution they lead to."""

from __future__ import annotations

import dataclasses
import math
import weakref

import torch

from ._library import ops as _ops

_POLICIES = {"auto": "auto", "dense": "dense", "sparse": "sparse"}
_REPORT_FIELDS = 10
_NAME_BYTES = 64  # of an execution's name, at most
_STEP = 1.25  # capacities grow in steps of this factor, so that compiled graphs stay valid


@dataclasses.dataclass
class TrainCounts:
    """Activity since the last update of a plan."""

    tokens: int = 0
    nnz: int = 0  # active (token, neuron) pairs
    max_row_nnz: int = 0  # most active neurons of a token
    union_neurons: float = 0.0  # mean union of a tile of 128 tokens; 0 on the CPU
    recomputed: int = 0  # chunks of 16,384 tokens that backward had to compute again
    l1_sum: float = 0.0  # sum of |h|

    @property
    def nnz_per_token(self) -> float:
        return self.nnz / self.tokens if self.tokens else 0.0


class Plan:
    """The execution of one layer, chosen by what the layer counted. Pass it to `ffn` and
    `ffn_train`; keep it as long as the layer, or a CUDA graph of it, is used.

    The choice changes only in `update()`, so calls in between repeat and can be captured.
    Plans made with `sibling` share its threads, library handles and inference workspaces, as the
    layers of one model should.

    policy: "auto" runs what is estimated to be fastest; "dense" and "sparse" force an execution.
    """

    def __init__(self, policy: str = "auto", sibling: Plan | None = None):
        if policy not in _POLICIES:
            raise ValueError(f"unknown policy '{policy}': use auto, dense or sparse")
        self.policy = policy
        self._sibling = sibling
        self.handle: int = _ops.plan_create(
            sibling.handle if sibling is not None else 0, torch.get_num_threads()
        )
        _ops.plan_set_policy(self.handle, _POLICIES[policy])
        self._release = weakref.finalize(self, _ops.plan_release, self.handle)
        self._release.atexit = False
        # The execution in training is 0 for dense and 1 for hybrid, which expects so many active
        # neurons per token and in the union of a tile of 128 tokens. These are hints, no limits;
        # -1 means unknown.
        self.execution = 1 if policy == "sparse" else 0
        self.nnz = -1
        self.union_neurons = -1
        self.train = TrainCounts()
        self.inference_tokens = 0
        self.inference_nnz = 0
        self.inference_execution = "dense"

    def __deepcopy__(self, memo):
        return Plan(self.policy)

    def __reduce__(self):
        return (Plan, (self.policy,))

    def update(self, width: int, ffn: int, gated: bool, cuda: bool) -> TrainCounts:
        """Fetches the counts since the last update, which waits for the GPU, and chooses the
        execution of the next calls. Returns the counts of training."""
        report = torch.zeros(_REPORT_FIELDS, dtype=torch.float64)
        _ops.plan_update(self.handle, report)
        values = report.tolist()
        tokens = int(values[0])
        self.train = TrainCounts(
            tokens=tokens,
            nnz=int(values[1]),
            union_neurons=values[2] * 128 / tokens if tokens else 0.0,
            max_row_nnz=int(values[3]),
            recomputed=int(values[4]),
            l1_sum=values[5],
        )
        self.inference_tokens = int(values[7])
        self.inference_nnz = int(values[8])
        name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
        _ops.plan_execution(self.handle, name)
        self.inference_execution = bytes(name.tolist()).rstrip(b"\0").decode()
        if tokens:
            self._choose(int(values[6]), width, ffn, gated, cuda)
        return self.train

    def _choose(self, tokens: int, width: int, ffn: int, gated: bool, cuda: bool) -> None:
        counts = self.train
        share = counts.union_neurons / ffn if cuda else -1.0
        self.execution = _ops.plan_choose(
            self.handle, cuda, tokens, width, ffn, gated, counts.nnz_per_token, share
        )
        if self.execution == 0:
            self.nnz, self.union_neurons = -1, -1
            return
        if not _fits(self.nnz, counts.nnz_per_token):
            self.nnz = _room(counts.nnz_per_token)
        if cuda and not _fits(self.union_neurons, counts.union_neurons):
            self.union_neurons = _room(counts.union_neurons)

    def active(self, ffn: int) -> torch.Tensor:
        """Flags uint8 [F] on the CPU: 1 for each neuron that fired in training since the last call.
        Call `update` first."""
        flags = torch.empty(ffn, dtype=torch.uint8)
        _ops.plan_active(self.handle, flags)
        return flags


def _room(expected: float) -> int:
    """The next larger capacity; forward adds half as much again."""
    return math.ceil(_STEP ** math.ceil(math.log(max(expected, 1.0), _STEP)))


def _fits(capacity: int, expected: float) -> bool:
    return capacity >= expected >= capacity / _STEP**3
