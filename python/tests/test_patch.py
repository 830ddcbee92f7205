# SPDX-License-Identifier: Apache-2.0
"""Patched models of transformers against the same models unpatched."""

import copy
import importlib
import logging
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import twell

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def model(family="llama", hidden_act="relu"):
    config, cls = FAMILIES[family]
    return cls(
        config(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            hidden_act=hidden_act,
            max_position_embeddings=64,
        )
    )


def tokens():
    return torch.randint(0, 96, (2, 24))


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_loss_and_gradients(family):
    plain = model(family)
    patched = twell.patch(copy.deepcopy(plain))
    ids = tokens()
    losses = [m(ids, labels=ids).loss for m in (plain, patched)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), patched.parameters()):
        assert relative(q.grad, p.grad) < 1e-5, name


def test_state_dict_parameters_and_unpatch():
    plain = model()
    patched = copy.deepcopy(plain)
    before = {name: p for name, p in patched.named_parameters()}
    classes = [type(m) for m in patched.modules()]
    twell.patch(patched)
    assert all(p is before[name] for name, p in patched.named_parameters())
    state = patched.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], t) for name, t in plain.state_dict().items())
    patched.load_state_dict(model().state_dict())
    patched.load_state_dict(plain.state_dict())
    twell.unpatch(patched)
    assert [type(m) for m in patched.modules()] == classes
    assert all(p.is_contiguous() for p in patched.parameters())
    assert not patched._forward_pre_hooks
    ids = tokens()
    assert torch.equal(patched(ids).logits, plain(ids).logits)


def test_save_and_load(tmp_path):
    patched = twell.patch(model())
    patched.save_pretrained(tmp_path)
    loaded = twell.patch(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    ids = tokens()
    with torch.no_grad():
        assert relative(loaded(ids).logits, patched(ids).logits) < 1e-5


def test_generates_the_same():
    plain = model().eval()
    patched = twell.patch(copy.deepcopy(plain))
    ids = tokens()[:, :5]
    arguments = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(plain.generate(ids, **arguments), patched.generate(ids, **arguments))
    twell.update(patched)
    assert twell.stats(patched)[0].inference_tokens > 0


def test_compiled_model():
    patched = twell.patch(model())
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    ids = tokens()

    def gradients(run):
        patched.zero_grad()
        loss = run(ids, labels=ids).loss
        loss = loss + 0.01 * twell.l1(patched)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in patched.parameters())]

    for a, b in zip(gradients(patched), gradients(compiled)):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    patched = twell.patch(model())
    ids = tokens()
    mlp = patched.model.layers[0].mlp
    x = torch.randn(2, 24, 64, requires_grad=True)
    mlp(x).square().sum().backward()
    want = [x.grad.clone(), *(p.grad.clone() for p in mlp.parameters())]
    x.grad = None
    patched.zero_grad()
    checkpoint(mlp, x, use_reentrant=use_reentrant).square().sum().backward()
    for a, b in zip([x.grad, *(p.grad for p in mlp.parameters())], want):
        assert torch.equal(a, b)
    patched.gradient_checkpointing_enable()
    patched.train()
    patched(ids, labels=ids).loss.backward()


def test_other_activations_stay_dense_with_a_notice(caplog):
    smooth = model(hidden_act="silu")
    with caplog.at_level(logging.WARNING, "twell"):
        twell.patch(smooth)
    assert "model.layers.0.mlp stays dense: its activation SiLU" in caplog.text
    assert "no layer of LlamaForCausalLM runs sparse" in caplog.text
    assert not twell.stats(smooth)


class FATReLU(nn.Module):
    """As the published models that have it define it."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        return torch.where(x > self.threshold, x, torch.zeros_like(x))


class DoubleReLU(nn.Module):
    """The layer of Bamboo, with ReLU on both projections."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = nn.ReLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize("kind", ["fatrelu:0.01", "drelu"])
def test_published_activations(kind):
    own = model()
    for block in own.model.layers:
        if kind == "drelu":
            block.mlp = DoubleReLU(block.mlp)
        else:
            block.mlp.act_fn = FATReLU(0.01)
    patched = twell.patch(copy.deepcopy(own), policy="sparse")
    assert {m._twell.activation for m in patched.modules() if hasattr(m, "_twell")} == {kind}
    ids = tokens()
    want, got = own(ids, labels=ids), patched(ids, labels=ids)
    assert relative(got.logits, want.logits) < 1e-5
    want.loss.backward()
    got.loss.backward()
    for a, b in zip(patched.parameters(), own.parameters()):
        assert relative(a.grad, b.grad) < 1e-4


def test_relufy_by_and_by():
    smooth = model(hidden_act="silu")
    ids = tokens()
    want = smooth(ids).logits
    twell.relufy(smooth, 0.0)
    assert relative(smooth(ids).logits, want) < 1e-6
    twell.relufy(smooth, 0.5)
    twell.patch(smooth)
    assert not twell.stats(smooth)
    twell.relufy(smooth)
    assert smooth.config.hidden_act == "relu"
    twell.patch(smooth)
    assert len(twell.stats(smooth)) == 2
    with pytest.raises(ValueError, match="share 2 of ReLU"):
        twell.relufy(smooth, 2)


class Plain(nn.Module):
    def __init__(self, up="fc1", down="fc2", bias=False, extra=0.0):
        super().__init__()
        self.names = up, down
        self.extra = extra
        setattr(self, up, nn.Linear(16, 32, bias=bias))
        setattr(self, down, nn.Linear(32, 16, bias=bias))
        self.act = nn.ReLU()

    def forward(self, x):
        up, down = (getattr(self, name) for name in self.names)
        return down(self.act(up(x))) + self.extra


@pytest.mark.parametrize("names", [("up_proj", "down_proj"), ("fc1", "fc2")])
def test_plain_layers(names):
    module = Plain(*names)
    x = torch.randn(3, 7, 16)
    want = module(x)
    twell.patch(module)
    assert len(twell.stats(module)) == 1
    assert relative(module(x), want) < 1e-5


def test_refuses_what_only_looks_like_a_layer(caplog):
    twell.patch(Plain(extra=1.0))
    assert "its forward is not down(act(gate(x)) * up(x))" in caplog.text
    twell.patch(Plain(bias=True))
    assert "its projections have biases" in caplog.text


def test_l1_has_a_gradient_and_needs_a_forward():
    patched = twell.patch(model())
    with pytest.raises(RuntimeError, match="no training forward"):
        twell.l1(patched)
    ids = tokens()
    patched(ids)
    term = twell.l1(patched)
    mlp = patched.model.layers[0].mlp
    gradient = torch.autograd.grad(term, mlp.gate_proj.weight)[0]
    assert gradient.norm() > 0
    copy.deepcopy(patched)


def test_stats_and_dead_neurons():
    patched = twell.patch(model(), automatic=False)
    mlp = patched.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[:5] = 0.0
    ids = tokens()
    patched(ids, labels=ids).loss.backward()
    twell.update(patched)
    first, second = twell.stats(patched)
    assert first.tokens == second.tokens == 48
    assert second.dead >= 5 and second.neurons == 128
    before = mlp.gate_proj.weight.detach().clone()
    dead = sum(s.dead for s in twell.stats(patched))
    assert twell.reinit_dead(patched, strength=0.5, std=0.1) == dead
    assert (mlp.gate_proj.weight[:5].std() > 0.02) and (before[:5] == 0).all()


def test_updates_by_itself():
    patched = twell.patch(model())
    ids = tokens()
    for _ in range(5):
        patched(ids)
    assert twell.stats(patched)[0].tokens == 48 * 2  # of calls 3 and 4


def test_contiguous_parameters():
    patched = twell.patch(model(), by_neuron=False)
    assert all(p.is_contiguous() for p in patched.parameters())
    ids = tokens()
    patched(ids, labels=ids).loss.backward()
    assert patched.model.layers[0].mlp.down_proj.weight.grad.shape == (64, 128)


class Adapter(nn.Module):
    """As peft wraps a projection: with its weight, and with more than its product."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.tensor(2.0))

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.scale * self.base(x)


def test_copies_by_pickle_and_torch_save(tmp_path):
    patched = twell.patch(model())
    ids = tokens()
    expected = patched(ids).logits
    torch.save(patched, tmp_path / "model.pt")
    for copied in (
        pickle.loads(pickle.dumps(patched)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        torch.testing.assert_close(copied(ids).logits, expected)
        (copied(ids, labels=ids).loss + 1e-3 * twell.l1(copied)).backward()
        twell.unpatch(copied)
        torch.testing.assert_close(copied(ids).logits, expected)


def test_other_dtypes_run_dense_with_a_notice(caplog):
    patched = twell.patch(model())
    ids = tokens()
    expected = patched(ids).logits
    with caplog.at_level(logging.WARNING, logger="twell"):
        assert relative(patched.bfloat16()(ids).logits.float(), expected) < 0.05
        patched(ids)
    assert caplog.text.count("layers.0.mlp runs dense: the ops take float32 on the CPU") == 1
    twell.update(patched.float())
    patched(ids)
    twell.update(patched)
    assert twell.stats(patched)[0].inference_tokens == 0  # gradients are on, so it trained
    assert twell.stats(patched)[0].tokens == ids.numel()


def test_a_notebook_may_import_again():
    importlib.reload(twell.ops)
    ids = tokens()
    torch.compile(twell.patch(model()), backend="eager", fullgraph=True)(ids)


def test_wants_a_module():
    with pytest.raises(TypeError, match="twell.patch takes a torch.nn.Module"):
        twell.patch("runs/first")


def test_replaced_projections_run_as_they_are(caplog):
    ids = tokens()
    plain = model()
    patched = twell.patch(copy.deepcopy(plain))
    for m in (plain, patched):
        mlp = m.model.layers[0].mlp
        mlp.up_proj = Adapter(mlp.up_proj)
    losses = [m(ids, labels=ids).loss for m in (plain, patched)]
    for loss in losses:
        loss.backward()
    assert relative(losses[1], losses[0]) < 1e-5
    scales = [m.model.layers[0].mlp.up_proj.scale.grad for m in (plain, patched)]
    assert relative(scales[1], scales[0]) < 1e-4
    assert caplog.text.count("model.layers.0.mlp runs dense") == 1
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    assert relative(compiled(ids, labels=ids).loss, losses[0]) < 1e-5

    wrapped = model()
    wrapped.model.layers[0].mlp.down_proj.__class__ = type(
        "Other", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    twell.patch(wrapped)
    assert "compute something else than nn.Linear" in caplog.text
    assert len(twell.stats(wrapped)) == 1

    replaced = model()
    first, second = (layer.mlp for layer in replaced.model.layers)
    first.forward = first.forward
    second.up_proj.forward = lambda x: 2 * nn.functional.linear(x, second.up_proj.weight)
    twell.patch(replaced)
    assert "model.layers.0.mlp stays dense: its forward was replaced" in caplog.text
    assert "model.layers.1.mlp stays dense: its projections compute" in caplog.text

    for dtype in (torch.int8, torch.float8_e4m3fn):
        caplog.clear()
        eight = model()
        for projection in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(eight.model.layers[1].mlp, projection)
            linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
        twell.patch(eight)
        assert f"model.layers.1.mlp stays dense: its weights are in 8 bits ({dtype})" in caplog.text
        assert len(twell.stats(eight)) == 1


def test_one_weight_alone_is_trained():
    ids = tokens()
    gradients = []
    plain = model()
    for m in (plain, twell.patch(copy.deepcopy(plain))):
        m.requires_grad_(False)
        weight = m.model.layers[0].mlp.down_proj.weight.requires_grad_()
        m(ids, labels=ids).loss.backward()
        gradients.append(weight.grad)
    assert relative(gradients[1], gradients[0]) < 1e-4


def test_patch_and_unpatch_between_steps_of_a_fused_optimizer():
    plain = model()
    patched = copy.deepcopy(plain)
    trained = []
    for m in (plain, patched):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)
        for step in range(4):
            if m is patched and step == 1:
                twell.patch(m)
            if m is patched and step == 3:
                twell.unpatch(m)
            ids = tokens()
            m(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach() for p in m.parameters()])
    # Adam's first steps turn roundings of tiny gradients into steps of up to lr.
    for a, b in zip(*trained):
        assert relative(b, a) < 1e-3


def test_fsdp_trains_as_one_process():
    script = pathlib.Path(__file__).with_name("fsdp_check.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
