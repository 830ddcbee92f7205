# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer as functions of tensors, with autograd, autocast and torch.compile.

    gated       h = f(x w_gate^T) * (x w_up^T)    y = h w_down
    non-gated   h = f(x w_up^T)                   y = h w_down

f is activation: "relu"; "relu2", its square; "fatrelu:T", x above the threshold T and 0 up to it; or
"drelu", ReLU of both products of a gated layer.

All weights keep a neuron per row: [F, D]. torch.nn.Linear stores a down projection as [D, F]; pass
`down_proj.weight.t()`, which costs a transposing copy per pass unless the memory already lies
neuron by neuron (`twell.patch` arranges that).

float32 on the CPU, bfloat16 on a GPU, all operands on one device; D and F are multiples of 8 on a GPU.
Anything else is a RuntimeError. Under torch.autocast operands are converted. Executions differ only
in the order of additions.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch.autograd.function import once_differentiable

from ._library import add_op_namespace_prefix, library
from ._library import ops as _ops
from .plan import Plan

library.twell_saved_bytes.restype = ctypes.c_int64
library.twell_saved_bytes.argtypes = (
    [ctypes.c_int64] * 3 + [ctypes.c_int] * 2 + [ctypes.c_int64] * 3
)


@functools.cache
def _default_plan() -> Plan:
    return Plan()


def wants_gradient(*operands: torch.Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in operands)


def ffn(
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    plan: Plan | None = None,
    activation: str = "relu",
) -> torch.Tensor:
    """Inference: y [..., D] of x [..., D]. Has no gradient, and refuses operands that want one: call
    it under `torch.no_grad()`, or use `ffn_train`.

    w_gate: [F, D], or None for a layer without a gate. w_up, w_down: [F, D].
    plan: of this layer; without one, all calls share a plan that measures nothing.
    """
    if torch.is_grad_enabled() and wants_gradient(x, w_gate, w_up, w_down):
        raise RuntimeError(
            "twell.ffn has no gradient: call it under torch.no_grad(), or use twell.ffn_train"
        )
    plan = plan or _default_plan()
    return _ops.ffn.default(x, w_gate, w_up, w_down, activation, plan.handle)


def ffn_train(
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    plan: Plan | None = None,
    activation: str = "relu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training: (y, l1, counts), without host synchronisation.

    y       [..., D]
    l1      float32 []: sum over tokens and neurons of |h|; differentiable
    counts  int64 [4]: tokens; active (token, neuron) pairs; sum over tiles of 128 tokens of the
            neurons active in the tile (0 on the CPU); most active neurons of a token

    plan: see `ffn`.
    Differentiable in x and the weights, once: no gradients of gradients. Backward runs once per
    forward, without retain_graph, because on a GPU it uses up what forward kept.
    """
    plan = plan or _default_plan()
    run = _TrainCall.apply if _is_plain_call(x) else _ops.ffn_train.default
    y, l1, counts, _ = run(
        x, w_gate, w_up, w_down, activation, plan.handle, plan.execution, plan.nnz,
        plan.union_neurons,
    )
    return y, l1, counts


def _round_up(value, multiple: int):
    return (value + multiple - 1) // multiple * multiple


def _saved_bytes(x, ffn_size, gated, execution, nnz, union_neurons):
    """Bytes of `saved`, in closed form where sizes may be symbolic."""
    tokens = math.prod(x.shape[:-1])
    if tokens == 0:
        return 0
    planes = 2 if gated else 1
    if x.device.type != "cuda":
        return 64 + planes * 4 * _round_up(tokens * ffn_size, 16)
    if execution == 0:
        return planes * _round_up(2 * tokens * ffn_size, 256)
    if all(isinstance(size, int) for size in (tokens, nnz, union_neurons)):
        size = library.twell_saved_bytes(
            tokens, x.shape[-1], ffn_size, gated, True, execution, nnz, union_neurons
        )
        if size < 0:
            raise RuntimeError("this build of twell has no CUDA ops for this layer")
        return size
    return torch.library.get_ctx().new_dynamic_size()


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def takes(x: torch.Tensor) -> bool:
    """Whether the ops take such an operand, as it is or converted by torch.autocast."""
    device = x.device.type
    if device not in ("cpu", "cuda"):
        return False
    return x.dtype == _dtype_on(x.device) or torch.is_autocast_enabled(device)


def _check(x, w_up):
    dtype = _dtype_on(x.device)
    if x.dtype != dtype or w_up.dtype != dtype:
        raise RuntimeError(
            "the feed-forward ops take float32 on the CPU and bfloat16 on a GPU, all operands on "
            "one device; convert them or use torch.autocast"
        )


def _fake_ffn(x, w_gate, w_up, w_down, activation, plan):
    _check(x, w_up)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_ffn_train(x, w_gate, w_up, w_down, activation, plan, execution, nnz, union_neurons):
    _check(x, w_up)
    saved = _saved_bytes(x, w_up.shape[0], w_gate is not None, execution, nnz, union_neurons)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(4, dtype=torch.int64),
        x.new_empty(saved, dtype=torch.uint8),
    )


def _fake_backward(
    d_y, d_l1, x, w_gate, w_up, w_down, saved, activation, plan, execution, nnz, union_neurons
):
    def gradient(t):
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)

    return (
        gradient(x),
        gradient(w_gate) if w_gate is not None else x.new_empty(0),
        gradient(w_up),
        gradient(w_down),
    )


def _save(ctx, inputs, output):
    x, w_gate, w_up, w_down, *ctx.rest = inputs
    ctx.gated = w_gate is not None
    ctx.used = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w_gate, w_up, w_down, output[3])


def _backward(ctx, d_y, d_l1, d_counts, d_saved):
    if ctx.used and not torch.compiler.is_compiling():
        raise RuntimeError(
            "backward through a twell layer runs once, because it uses up what forward kept; run "
            "the forward again instead of retain_graph"
        )
    x, w_gate, w_up, w_down, saved = ctx.saved_tensors
    ctx.used = x.device.type == "cuda"
    if d_y is None:
        d_y = torch.zeros_like(x)
    d_x, d_gate, d_up, d_down = _ops.ffn_train_backward.default(
        d_y, d_l1, x, w_gate, w_up, w_down, saved, *ctx.rest
    )
    return d_x, d_gate if ctx.gated else None, d_up, d_down, None, None, None, None, None


# The autograd of torch.library takes several times as long as the whole of a small layer, so an
# eager call has an autograd.Function of its own. The library's serves torch.compile and autocast.
# (torch.func takes neither.)
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


class _TrainCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with _below_autograd():
            output = _ops.ffn_train.default(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return _backward(ctx, *gradients)


def _is_plain_call(x: torch.Tensor) -> bool:
    return not (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
        or _below_autograd is None
    )


def _register():
    for name, fake in (
        ("ffn", _fake_ffn),
        ("ffn_train", _fake_ffn_train),
        ("ffn_train_backward", _fake_backward),
    ):
        torch.library.register_fake(add_op_namespace_prefix(name), fake)
    torch.library.register_autograd(
        add_op_namespace_prefix("ffn_train"), _backward, setup_context=_save
    )
    for name in ("ffn", "ffn_train"):
        torch.library.register_autocast(add_op_namespace_prefix(name), "cuda", torch.bfloat16)
        torch.library.register_autocast(add_op_namespace_prefix(name), "cpu", torch.float32)


# PyTorch takes a registration once in a process, but notebooks import a module again.
if not getattr(_ops, "python_registered", False):
    _register()
    _ops.python_registered = True
