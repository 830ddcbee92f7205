# SPDX-License-Identifier: Apache-2.0
"""Sparse feed-forward layers for existing models: patch, unpatch, relufy, and what training with an
L1 term needs.

A layer is a module with gate_proj, up_proj and down_proj that computes
`down_proj(act(gate_proj(x)) * up_proj(x))` (Llama, Mistral, Qwen2, Qwen3 and others) or, with ReLU,
`down_proj(act(gate_proj(x)) * act(up_proj(x)))` (Bamboo, TurboSparse without predictors), or a plain
one of two matrices without biases, `down(act(up(x)))`, named up_proj/down_proj, fc1/fc2 or
w_in/w_out.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from . import ops
from .plan import Plan

logger = logging.getLogger("twell")

_Model = TypeVar("_Model", bound=nn.Module)

_PLAIN_NAMES = (("up_proj", "down_proj"), ("fc1", "fc2"), ("w_in", "w_out"))
_ACTIVATION_NAMES = ("act_fn", "act", "activation_fn", "activation")
_PATCHED: dict[type, type] = {}  # class of a module -> its class while patched


@dataclasses.dataclass
class LayerStats:
    """Activity of one layer between two updates."""

    name: str
    # How the next training calls run, "dense" or "hybrid"; how the last inference call ran where no
    # training was seen since the last update.
    execution: str
    tokens: int  # of training
    nnz_per_token: float  # active neurons per token in training
    max_row_nnz: int  # most active neurons of a token
    l1_per_token: float  # sum over neurons of |h|, mean over tokens
    dead: int  # neurons that fired on no token of training, or -1 where none was seen
    neurons: int
    inference_tokens: int
    inference_nnz_per_token: float


class _Layer:
    """What a patched module knows about itself."""

    def __init__(self, name: str, plan: Plan, names: tuple[str | None, str, str], activation: str):
        self.name = name
        self.activation = activation
        self.plan = plan
        self.gate, self.up, self.down = names
        self.l1 = None  # of the last training forward: sum of |h|, mean over tokens
        self.flags = None  # uint8 [F] of the last update
        self.warned = False

    def warn_dense(self, reason: str):
        if not self.warned and not torch.compiler.is_compiling():
            logger.warning("%s runs dense: %s", self.name, reason)
            self.warned = True

    def __deepcopy__(self, memo):
        names = (self.gate, self.up, self.down)
        return _Layer(self.name, Plan(self.plan.policy), names, self.activation)

    def __getstate__(self):
        return {**self.__dict__, "l1": None}


class _SparseForward:
    """Comes before a module's own class and replaces its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._twell
        names = (layer.gate, layer.up, layer.down)
        projections = [getattr(self, name) for name in names if name is not None]
        reason = ""
        if not all(_is_linear(p) for p in projections):  # LoRA replaces them, for instance
            reason = "its projections are no plain nn.Linear any more"
        elif not ops.takes(x):
            reason = f"the ops take float32 on the CPU and bfloat16 on a GPU, not {x.dtype} on {x.device}"
        if reason:
            layer.l1 = None
            layer.warn_dense(reason)
            return super().forward(x)
        *gate, up, down = (p.weight for p in projections)
        gate = gate[0] if gate else None
        down = down.t()
        if torch.is_grad_enabled() and ops.wants_gradient(x, gate, up, down):
            y, l1, _ = ops.ffn_train(x, gate, up, down, layer.plan, layer.activation)
            layer.l1 = l1 / max(x.numel() // x.shape[-1], 1)
            return y
        return ops.ffn(x, gate, up, down, layer.plan, layer.activation)

    def __reduce_ex__(self, protocol):
        # Pickle finds no classes that were made at run time.
        return (_make_patched, (_own_class(type(self)),), *super().__reduce_ex__(protocol)[2:])

    def __setstate__(self, state):
        super().__setstate__(state)
        weight = getattr(self, self._twell.down).weight
        if not weight.is_contiguous():
            _keep_moments_like(weight)


def _patched_class(own: type) -> type:
    if own not in _PATCHED:
        _PATCHED[own] = type(f"Twell{own.__name__}", (_SparseForward, own), {})
    return _PATCHED[own]


def _own_class(patched: type) -> type:
    return next(own for own, new in _PATCHED.items() if patched is new)


def _make_patched(own: type) -> nn.Module:
    patched = _patched_class(own)
    return patched.__new__(patched)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def _is_relu(activation) -> bool:
    return isinstance(activation, nn.ReLU) or activation in (
        torch.relu,
        nn.functional.relu,
    )


def _is_relu2(activation) -> bool:
    return type(activation).__name__ == "ReLUSquaredActivation"  # of transformers


def _threshold(activation) -> float | None:
    """The threshold of a FATReLU (ProSparse, MiniCPM-S, SparseLlama); None for others."""
    if type(activation).__name__.lower() != "fatrelu":
        return None
    value = getattr(activation, "threshold", None)
    return float(value) if value is not None and torch.tensor(value).numel() == 1 else None


def _activation(module: nn.Module):
    """Name and value of the activation, or (None, None)."""
    for name in _ACTIVATION_NAMES:
        value = getattr(module, name, None)
        if callable(value):
            return name, value
    return None, None


def _projections(module: nn.Module) -> tuple[str | None, str, str] | None:
    """Names of (gate, up, down) of a feed-forward module, or None."""

    def linear(name):
        return isinstance(getattr(module, name, None), nn.Linear)

    if _activation(module)[0] is None:
        return None
    if all(linear(name) for name in ("gate_proj", "up_proj", "down_proj")):
        return ("gate_proj", "up_proj", "down_proj")
    for up, down in _PLAIN_NAMES:
        if linear(up) and linear(down) and getattr(module, "gate_proj", None) is None:
            return (None, up, down)
    return None


def _feed_forward_modules(model: nn.Module):
    for name, module in model.named_modules():
        names = _projections(module)
        if names is not None:
            yield name, module, names


def _patched_modules(model: nn.Module):
    return [m for m in model.modules() if isinstance(m, _SparseForward)]


def _why_dense(module: nn.Module, names) -> str:
    """Why a module keeps its own forward; empty when it can run sparse."""
    gate, up, down = (getattr(module, n) if n is not None else None for n in names)
    if "forward" in module.__dict__:
        return "its forward was replaced, by hooks of accelerate or another patch"
    _, activation = _activation(module)
    if not (_is_relu(activation) or _is_relu2(activation) or _threshold(activation) is not None):
        kind = type(activation).__name__
        return f"its activation {kind} leaves no zeros to skip (twell.relufy replaces it)"
    if any(p is not None and p.bias is not None for p in (gate, up, down)):
        return "its projections have biases"
    for p in (gate, up, down):
        weight = getattr(p, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.element_size() == 1:
            return f"its weights are in 8 bits ({weight.dtype}), which twell.Engine takes"
    if not all(p is None or _is_linear(p) for p in (gate, up, down)):
        return "its projections compute something else than nn.Linear"
    neurons, width = up.weight.shape
    if width % 8 or neurons % 8:
        return f"width {width} and {neurons} neurons are not multiples of 8"
    if tuple(down.weight.shape) != (width, neurons):
        return f"{names[2]} is {tuple(down.weight.shape)}, expected {(width, neurons)}"
    if gate is not None and gate.weight.shape != up.weight.shape:
        return "its gate and up projections differ in shape"
    return _formula(module, names, activation)[1]


@torch.no_grad()
def _formula(module: nn.Module, names, activation) -> tuple[str, str]:
    """What the ops call the activation, and why they do not compute the module's forward (empty where
    they do): compares that with the formulas on a few tokens, because a module may have these
    projections and compute something else."""
    kind = "relu2" if _is_relu2(activation) else "relu"
    if (threshold := _threshold(activation)) is not None:
        kind = f"fatrelu:{threshold!r}"
    gate, up, down = (getattr(module, n) if n is not None else None for n in names)
    weight = up.weight
    if weight.is_meta or type(weight.data) is not torch.Tensor:
        return kind, ""
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    x = x.view(1, 2, weight.shape[1])
    was_training = module.training
    module.eval()
    try:
        got = module(x)
    except Exception as error:  # noqa: BLE001  (any failure means: not such a module)
        return kind, f"its forward does not take one tensor of tokens ({type(error).__name__})"
    finally:
        module.train(was_training)

    def is_down_of(hidden):
        return isinstance(got, torch.Tensor) and torch.allclose(
            got, down(hidden), rtol=1e-2, atol=1e-4
        )

    if is_down_of(activation(gate(x)) * up(x) if gate is not None else activation(up(x))):
        return kind, ""
    if kind == "relu" and gate is not None and is_down_of(activation(gate(x)) * activation(up(x))):
        return "drelu", ""
    return kind, "its forward is not down(act(gate(x)) * up(x))"


@torch.no_grad()
def _lay_out_by_neuron(weight: nn.Parameter, by_neuron: bool) -> None:
    """Moves the memory of a down projection [D, F] to neuron by neuron, or back. Its shape, values
    and identity stay."""
    if type(weight.data) is not torch.Tensor:  # a sharded parameter
        return

    def moved(t):
        return t.t().contiguous().t() if by_neuron else t.contiguous()

    weight.data = moved(weight.data)
    if weight.grad is not None:
        weight.grad = moved(weight.grad)
    _keep_moments_like(weight)


def _keep_moments_like(weight: nn.Parameter) -> None:
    _watch_optimizers()
    _MOVED[weight] = True


_MOVED = WeakIdKeyDictionary()  # parameters whose memory layout was changed


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_move_moments)


@torch.no_grad()
def _move_moments(optimizer, args, kwargs) -> None:
    """Before a step of any optimizer: gives its moments the strides of a parameter that was moved
    after they were made. Fused optimizers pair values by their place in memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in _MOVED:
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    state[name] = torch.empty_strided(
                        value.shape, parameter.stride(), dtype=value.dtype, device=value.device
                    ).copy_(value)


def _require_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"twell.{function} takes a torch.nn.Module, such as a model of transformers, got "
            f"{type(model).__name__}"
        )


class _Updates:
    """Updates the plans of a model after forward calls 1, 2, 4, ..., 128 and then after every 128th,
    where calls are not compiled or captured."""

    EVERY = 128

    def __init__(self):
        self.calls = 0

    def __call__(self, model, args):
        if torch.compiler.is_compiling():
            return
        calls = self.calls
        if calls % self.EVERY and calls & (calls - 1):
            self.calls += 1
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self.calls += 1
        if calls:
            update(model)


def patch(
    model: _Model,
    policy: str = "auto",
    automatic: bool = True,
    by_neuron: bool = True,
) -> _Model:
    """Makes the ReLU feed-forward layers of `model` run on active neurons only, in place, and
    returns it. Results are the same but for the order of additions.

    Parameters stay the same objects, with the same names, shapes and values, so that optimizers and
    state_dict are not affected. Hooks of the projections are not called while their layer is
    patched. Layers that cannot run sparse keep their forward, with a notice in the log (logger
    "twell"), and so does a call in another dtype than float32 on the CPU and bfloat16 on a GPU.
    Patching again takes up layers that have become ReLU since.

    policy: "auto" runs each layer as its measured activity suggests; "dense" or "sparse" force it.
    automatic: call `update` after forward calls 1, 2, 4, ..., 128 and then after every 128th. It waits
        for the GPU. A compiled model skips it, so call `update` yourself after a few steps.
    by_neuron: lay the memory of down projections out neuron by neuron (their strides become
        (1, D)), which saves a transposing copy in every pass. False for FSDP2, which takes
        contiguous parameters only: the copies then cost 2 D F values of memory traffic in each
        forward and backward.
    """
    _require_module("patch", model)
    first = next((m._twell.plan for m in _patched_modules(model)), None)
    sparse = 0
    for name, module, names in list(_feed_forward_modules(model)):
        if isinstance(module, _SparseForward):
            sparse += 1
            continue
        reason = _why_dense(module, names)
        if reason:
            logger.warning("%s stays dense: %s", name or type(module).__name__, reason)
            continue
        plan = Plan(policy, first)
        first = first or plan
        activation = _formula(module, names, _activation(module)[1])[0]
        module.__class__ = _patched_class(type(module))
        object.__setattr__(module, "_twell", _Layer(name, plan, names, activation))
        if by_neuron:
            _lay_out_by_neuron(getattr(module, names[2]).weight, True)
        sparse += 1
    if not sparse:
        logger.warning("no layer of %s runs sparse", type(model).__name__)
    elif automatic and "_twell_updates" not in model.__dict__:
        object.__setattr__(model, "_twell_updates", model.register_forward_pre_hook(_Updates()))
    return model


def unpatch(model: _Model) -> _Model:
    """Restores what `patch` changed and returns the model."""
    _require_module("unpatch", model)
    hook = model.__dict__.pop("_twell_updates", None)
    if hook is not None:
        hook.remove()
    for module in _patched_modules(model):
        layer = module.__dict__.pop("_twell")
        module.__class__ = _own_class(type(module))
        _lay_out_by_neuron(getattr(module, layer.down).weight, False)
    return model


class BlendedReLU(nn.Module):
    """share * relu(x) + (1 - share) * activation(x), for a gradual change to ReLU."""

    def __init__(self, activation: nn.Module, share: float):
        super().__init__()
        self.activation = activation
        self.register_buffer("share", torch.tensor(float(share)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        smooth = self.activation(x)
        return smooth + self.share.to(x.dtype) * (torch.relu(x) - smooth)


def relufy(model: _Model, share: float = 1.0) -> _Model:
    """Replaces the activations of all feed-forward layers by ReLU, in place, and returns the model.
    It then needs training, with an L1 term, to become good again, and sparse.

    share: below 1, a blend of ReLU and the activation, which runs dense; call again with growing
        shares, and at last with 1.
    """
    _require_module("relufy", model)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share} of ReLU: expected 0 to 1")
    for _, module, _ in list(_feed_forward_modules(model)):
        name, activation = _activation(module)
        if _is_relu(activation) or _is_relu2(activation) or _threshold(activation) is not None:
            continue
        if share >= 1.0:
            setattr(module, name, nn.ReLU())
        elif isinstance(activation, BlendedReLU):
            activation.share.fill_(share)
        else:
            blend = BlendedReLU(activation, share)
            setattr(module, name, blend.to(next(module.parameters()).device))
    config = getattr(model, "config", None)
    if share >= 1.0 and config is not None:
        for field in ("hidden_act", "hidden_activation", "activation_function"):
            if hasattr(config, field):
                setattr(config, field, "relu")
    return model


def l1(model: nn.Module) -> torch.Tensor:
    """The L1 term of the last training forward, float32 [] with gradient: the sum over neurons of
    |h|, mean over tokens and patched layers. Add `coefficient * twell.l1(model)` to the loss;
    2e-5 is a good start for a model trained from scratch."""
    terms = [m._twell.l1 for m in _patched_modules(model) if m._twell.l1 is not None]
    if not terms:
        raise RuntimeError("no training forward of a patched layer yet: call twell.patch(model), "
                           "then the model, with gradients enabled; layers that run dense, as the "
                           "log says, have none")
    return torch.stack([term.to(terms[0].device) for term in terms]).mean()


def update(model: nn.Module) -> None:
    """Fetches what the layers counted since the last update, and chooses the executions of the
    next calls. Waits for the GPU. Compiled graphs are compiled again where a choice changed."""
    for module in _patched_modules(model):
        layer = module._twell
        weight = getattr(module, layer.up).weight
        neurons, width = weight.shape
        counts = layer.plan.update(width, neurons, layer.gate is not None, weight.is_cuda)
        layer.flags = layer.plan.active(neurons) if counts.tokens else None


def stats(model: nn.Module) -> list[LayerStats]:
    """Activity of the patched layers between the last two updates."""
    result = []
    for module in _patched_modules(model):
        layer, plan = module._twell, module._twell.plan
        neurons = getattr(module, layer.up).weight.shape[0]
        counts = plan.train
        trained = counts.tokens > 0
        execution = ("dense", "hybrid")[plan.execution] if trained else plan.inference_execution
        result.append(
            LayerStats(
                name=layer.name,
                execution=execution,
                tokens=counts.tokens,
                nnz_per_token=counts.nnz_per_token,
                max_row_nnz=counts.max_row_nnz,
                l1_per_token=counts.l1_sum / counts.tokens if trained else 0.0,
                dead=neurons - int(layer.flags.sum()) if layer.flags is not None else -1,
                neurons=neurons,
                inference_tokens=plan.inference_tokens,
                inference_nnz_per_token=plan.inference_nnz / max(plan.inference_tokens, 1),
            )
        )
    return result


@torch.no_grad()
def reinit_dead(
    model: nn.Module,
    strength: float = 0.1,
    std: float = 0.02,
    generator: torch.Generator | None = None,
) -> int:
    """Moves the neurons that fired on no token between the last two updates towards random ones:
    w <- (1 - strength) w + strength N(0, std^2), in the projection whose ReLU decides. Returns how
    many there were. generator: a CPU one, so that all ranks of a run can draw the same."""
    dead_neurons = 0
    for module in _patched_modules(model):
        layer = module._twell
        if layer.flags is None:
            continue
        dead = (layer.flags == 0).nonzero().squeeze(1)
        if not len(dead):
            continue
        weight = getattr(module, layer.gate or layer.up).weight
        noise = torch.randn(len(dead), weight.shape[1], generator=generator) * std
        rows = dead.to(weight.device)
        mixed = (1 - strength) * weight[rows].float() + strength * noise.to(weight.device)
        weight[rows] = mixed.to(weight.dtype)
        dead_neurons += len(dead)
    return dead_neurons
