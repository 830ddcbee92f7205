# SPDX-License-Identifier: Apache-2.0
"""Layers for the library `kernels`, which puts their forward in place of a model's own."""

import torch
from torch import nn

from . import ops
from .patch import (
    _activation,
    _is_linear,
    _is_relu,
    _is_relu2,
    _Layer,
    _projections,
    _threshold,
    _Updates,
)
from .plan import Plan


class SparseMLP(nn.Module):
    """For a module with gate_proj, up_proj, down_proj and act_fn that computes
    `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, or one without a gate: with a ReLU on active
    neurons alone, with another activation, biases or another dtype as it is. The results are the same.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _forward(self, x)


def _forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer = module.__dict__.get("_twell")
    if layer is None:
        layer = _layer_of(module)
        object.__setattr__(module, "_twell", layer)
    projections = [getattr(module, name) for name in (layer.gate, layer.up, layer.down) if name]
    if layer.activation is None or not ops.takes(x) or not all(_is_linear(p) for p in projections):
        activation = _activation(module)[1]
        *gate, up, down = projections
        return down(activation(gate[0](x)) * up(x) if gate else activation(up(x)))
    _count_call(layer, x, projections)
    *gate, up, down = (p.weight for p in projections)
    gate = gate[0] if gate else None
    down = down.t()
    if torch.is_grad_enabled() and ops.wants_gradient(x, gate, up, down):
        y, l1, _ = ops.ffn_train(x, gate, up, down, layer.plan, layer.activation)
        layer.l1 = l1 / max(x.numel() // x.shape[-1], 1)
        return y
    return ops.ffn(x, gate, up, down, layer.plan, layer.activation)


def _count_call(layer: _Layer, x: torch.Tensor, projections) -> None:
    """Chooses the layer's execution by what it counted, as often as `patch` does for a model."""
    if torch.compiler.is_compiling():
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    calls = layer.calls = layer.calls + 1
    if calls % _Updates.EVERY == 0 or (calls < _Updates.EVERY and calls & (calls - 1) == 0):
        neurons, width = projections[-2].weight.shape
        layer.plan.update(width, neurons, layer.gate is not None, x.is_cuda)


def _layer_of(module: nn.Module) -> _Layer:
    """What a module computes; its activation is None where it does so by itself."""
    names = _projections(module)
    if names is None:
        raise TypeError(
            f"{type(module).__name__} is no feed-forward layer with gate_proj, up_proj and down_proj"
        )
    activation = _activation(module)[1]
    kind = None
    if _is_relu(activation):
        kind = "relu"
    elif _is_relu2(activation):
        kind = "relu2"
    elif (threshold := _threshold(activation)) is not None:
        kind = f"fatrelu:{threshold!r}"
    linear = [getattr(module, name) for name in names if name]
    neurons, width = getattr(module, names[1]).weight.shape
    if width % 8 or neurons % 8 or any(p.bias is not None for p in linear):
        kind = None
    layer = _Layer(type(module).__name__, Plan("auto", ops._default_plan()), names, kind)
    layer.calls = 0
    return layer
