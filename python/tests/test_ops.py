# SPDX-License-Identifier: Apache-2.0
"""The ops against float64 PyTorch, and against what torch.library demands of an op."""

import copy
import gc
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import twell
from twell._library import has_cuda

# float32 sums of a few hundred terms: rounding grows with the square root of their number.
TOLERANCE = 32 * torch.finfo(torch.float32).eps


def layer(tokens, width, neurons, gated, bias=0.0):
    """x, w_gate, w_up, w_down in float64; bias shifts the ReLU's input."""
    x = torch.randn(tokens, width, dtype=torch.float64)
    x[:, 0] = 1.0
    weights = [torch.randn(neurons, width, dtype=torch.float64) / width**0.5 for _ in range(3)]
    weights[0 if gated else 1][:, 0] = bias
    return x, weights[0] if gated else None, weights[1], weights[2]


def reference(x, w_gate, w_up, w_down, activation="relu"):
    kind, _, threshold = activation.partition(":")
    threshold = float(threshold or 0.0)
    power = 2 if kind == "relu2" else 1

    def f(v):
        return torch.where(v > threshold, v, 0.0) ** power

    u = x @ w_up.t()
    if kind == "drelu":
        u = torch.relu(u)
    h = f(u) if w_gate is None else f(x @ w_gate.t()) * u
    return h @ w_down, h.abs().sum()


def leaves(operands, dtype):
    return [
        t.detach().to(dtype).requires_grad_() if t is not None else None for t in operands
    ]


def assert_close(got, want):
    assert (got.double() - want).norm() <= TOLERANCE * want.norm()


SHAPES = [(1, 8, 8), (37, 64, 96), (129, 64, 256), (200, 72, 40)]


@pytest.mark.parametrize("policy", ["auto", "dense", "sparse"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [0.0, -1.5, -100.0])
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu:0.125", "drelu"])
def test_forward_and_gradients(shape, gated, policy, bias, activation):
    if activation == "drelu" and not gated:
        pytest.skip("dReLU needs a gate")
    operands = leaves(layer(*shape, gated, bias), torch.float32)
    exact = leaves(operands, torch.float64)
    plan = twell.Plan(policy)
    if policy == "sparse":
        plan.nnz = 1
    y, l1, counts = twell.ffn_train(*operands, plan, activation)
    y_exact, l1_exact = reference(*exact, activation)
    assert_close(y, y_exact)
    assert_close(l1, l1_exact)
    gate = exact[0] @ (exact[1] if gated else exact[2]).t()
    nnz = (gate > float(activation.partition(":")[2] or 0.0)).sum(1)
    assert counts.tolist() == [shape[0], nnz.sum(), 0, nnz.max()]
    with torch.no_grad():
        assert_close(twell.ffn(*operands, plan, activation), y_exact)
    d_y = torch.randn_like(y)
    ((y * d_y).sum() + 0.5 * l1).backward()
    ((y_exact * d_y.double()).sum() + 0.5 * l1_exact).backward()
    for got, want in zip(operands, exact):
        if got is not None:
            assert_close(got.grad, want.grad)


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_against_finite_differences(gated):
    x, w_gate, w_up, w_down = layer(5, 8, 16, gated, 0.1)
    operands = leaves((x, w_gate, w_up, w_down), torch.float32)

    def loss(*operands):
        y, l1, _ = twell.ffn_train(*operands)
        return (y.double() ** 2).sum() / 8 + 0.3 * l1.double()

    loss(*operands).backward()
    # A step that moves no neuron across zero: the gradient is smooth between.
    step = 1e-3
    for index, operand in enumerate(operands):
        if operand is None:
            continue
        direction = torch.randn_like(operand)
        shifted = []
        for sign in (1, -1):
            moved = [t.detach() if t is not None else None for t in operands]
            moved[index] = operand.detach() + sign * step * direction
            shifted.append(loss(*moved).item())
        got = (operand.grad * direction).sum().item()
        assert (shifted[0] - shifted[1]) / (2 * step) == pytest.approx(got, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("gated", [True, False])
def test_opcheck(gated):
    operands = leaves(layer(9, 8, 16, gated), torch.float32)
    plan = twell.Plan()
    call = (*operands, "relu", plan.handle)
    torch.library.opcheck(torch.ops.twell.ffn_train, (*call, 0, -1, -1))
    detached = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in call)
    torch.library.opcheck(torch.ops.twell.ffn, detached)
    saved = torch.ops.twell.ffn_train(*detached, 0, -1, -1)[3]
    x, rest = detached[0], detached[:4]
    torch.library.opcheck(
        torch.ops.twell.ffn_train_backward,
        (torch.randn_like(x), torch.tensor(0.5), *rest, saved, "relu", plan.handle, 0, -1, -1),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_full_graph(dynamic):
    plan = twell.Plan()

    def step(x, w_gate, w_up, w_down):
        y, l1, counts = twell.ffn_train(torch.tanh(x), w_gate, w_up, w_down, plan)
        return y.square().mean() + 0.1 * l1, counts

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (16, 24):
        eager = leaves(layer(tokens, 8, 16, True), torch.float32)
        other = leaves(eager, torch.float32)
        loss, counts = step(*eager)
        loss_compiled, counts_compiled = compiled(*other)
        assert torch.equal(loss, loss_compiled) and torch.equal(counts, counts_compiled)
        loss.backward()
        loss_compiled.backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, other))


def test_autocast_converts_operands():
    operands = [t.bfloat16() for t in layer(16, 8, 16, True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = twell.ffn(*operands)
    assert y.dtype == torch.float32


def test_leading_dimensions_and_strides():
    x, w_gate, w_up, w_down = (t.float() for t in layer(24, 8, 16, True))
    y = twell.ffn(x, w_gate, w_up, w_down)
    linear_layout = w_down.t().contiguous()  # as torch.nn.Linear keeps it
    assert torch.equal(twell.ffn(x.view(2, 3, 4, 8), w_gate, w_up, linear_layout.t()).view(24, 8), y)
    assert twell.ffn(x[:0], w_gate, w_up, w_down).shape == (0, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: [t.double() for t in o], "float32 on the CPU and bfloat16 on a GPU"),
        (lambda o: [t.bfloat16() for t in o], "float32 on the CPU and bfloat16 on a GPU"),
        (lambda o: [o[0], o[1], o[2], o[3].t()], r"w_down is \[8, 16\], expected \[F, D\] = \[16, 8\]"),
        (lambda o: [o[0], o[1][:8], o[2], o[3]], r"w_gate is \[8, 8\], expected"),
    ],
)
def test_refuses_in_one_line(change, message):
    operands = change([t.float() for t in layer(4, 8, 16, True)])
    for op in (twell.ffn, twell.ffn_train):
        with pytest.raises(RuntimeError, match=message) as caught:
            op(*operands)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("trained", range(4))
def test_inference_refuses_operands_that_want_a_gradient(trained):
    operands = [t.detach().float() for t in layer(4, 16, 8, True)]
    operands[trained].requires_grad_()
    with pytest.raises(RuntimeError, match="use twell.ffn_train"):
        twell.ffn(*operands)
    with torch.no_grad():
        assert not twell.ffn(*operands).requires_grad


def test_refuses_unknown_plans_and_policies():
    plan = twell.Plan()
    handle = plan.handle
    del plan
    gc.collect()
    x, *weights = (t.float() for t in layer(4, 8, 16, True))
    with pytest.raises(RuntimeError, match=f"there is no plan {handle}"):
        torch.ops.twell.ffn(x, *weights, "relu", handle)
    with pytest.raises(RuntimeError, match="activation 'silu'"):
        torch.ops.twell.ffn(x, *weights, "silu", twell.Plan().handle)
    with pytest.raises(ValueError, match="unknown policy 'fast'"):
        twell.Plan("fast")


def test_refuses_what_forward_did_not_keep():
    plan = twell.Plan("dense")
    x, *weights = (t.float() for t in layer(4, 8, 16, True))
    y, _, _, saved = torch.ops.twell.ffn_train(x, *weights, "relu", plan.handle, 0, 0, 0)

    def backward(d_y, kept):
        return torch.ops.twell.ffn_train_backward(
            d_y, None, x, *weights, kept, "relu", plan.handle, 0, 0, 0
        )

    for kept in (saved[:-1], saved[64:], saved.int(), torch.full_like(saved, 0x7F)):
        with pytest.raises(RuntimeError, match="`saved`"):
            backward(torch.ones_like(y), kept)
    with pytest.raises(RuntimeError, match="d_y differs from y"):
        backward(torch.ones_like(y).double(), saved)
    assert backward(torch.ones_like(y), saved)[0].shape == x.shape


@pytest.mark.skipif(has_cuda(), reason="this build has an answer")
def test_fake_tensors_of_a_gpu_without_cuda():
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(16, 8, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="no CUDA ops"):
            torch.ops.twell.ffn_train(x, w, w, w, "relu", 1, 1, 8, 8)


def test_plan_follows_activity():
    plan = twell.Plan()
    operands = leaves(layer(256, 64, 256, True, -3.0), torch.float32)
    _, l1, counts = twell.ffn_train(*operands, plan)
    measured = plan.update(64, 256, True, cuda=False)
    assert (measured.tokens, measured.nnz) == (256, counts[1])
    assert measured.l1_sum == pytest.approx(l1.item(), rel=1e-6)
    assert measured.nnz_per_token < 0.05 * 256 and plan.execution == 1
    assert int(plan.active(256).sum()) == int(
        ((operands[0] @ operands[1].t()) > 0).any(0).sum()
    )
    assert plan.update(64, 256, True, cuda=False).tokens == 0
    operands = leaves(layer(256, 64, 256, True, 1.0), torch.float32)
    twell.ffn_train(*operands, plan)
    plan.update(64, 256, True, cuda=False)
    assert plan.execution == 0


def test_plans_are_copied_as_new_ones():
    plan = twell.Plan("dense")
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other.policy == "dense" and other.handle != plan.handle


def test_repeats_bit_for_bit():
    def run():
        operands = leaves(layer(150, 64, 256, True, -1.5), torch.float32)
        plan = twell.Plan("sparse")
        y, l1, _ = twell.ffn_train(*operands, plan)
        (y.square().sum() + l1).backward()
        return [y, l1, *(t.grad for t in operands)]

    torch.manual_seed(1)
    first = run()
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, run()))
