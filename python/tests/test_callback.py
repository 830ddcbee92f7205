# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with and without the package."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import twell


def model(hidden_act="relu"):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            hidden_act=hidden_act,
        )
    )


class Text(torch.utils.data.Dataset):
    """Counting modulo 64, from everywhere."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(16) * (i % 5 + 1) + i) % 64
        return {"input_ids": ids, "labels": ids}


def train(m, folder, callbacks=(), steps=12, **arguments):
    trainer = Trainer(
        m,
        TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Text(),
        callbacks=list(callbacks),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_same_losses_as_unpatched(tmp_path):
    start = model()
    plain = train(copy.deepcopy(start), tmp_path)
    patched = train(
        twell.patch(copy.deepcopy(start)), tmp_path, [twell.SparsityCallback(coefficient=0.0)]
    )
    assert [e["loss"] for e in patched] == pytest.approx([e["loss"] for e in plain], rel=1e-3)
    assert patched[-1]["loss"] < patched[0]["loss"]


def test_logs_and_learns_sparsity(tmp_path):
    callback = twell.SparsityCallback(coefficient=2.0, zero_steps=4, ramp_steps=4, by_layer=True)
    entries = train(model(), tmp_path, [callback], steps=20)
    assert [e["l1_coefficient"] for e in entries[:9]] == [0, 0, 0, 0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert entries[-1]["l1"] < 0.7 * entries[3]["l1"]
    assert "nnz/model.layers.0.mlp" in entries[0] and 0 <= entries[0]["dead"] < 0.5


def test_one_term_for_accumulated_batches(tmp_path):
    """The L1 term counts once per step, however many micro-batches it has."""
    start = twell.patch(model())
    plain = train(copy.deepcopy(start), tmp_path, steps=1, gradient_accumulation_steps=2)[0]
    with_term = train(
        copy.deepcopy(start), tmp_path, [twell.SparsityCallback(coefficient=0.5)], steps=1,
        gradient_accumulation_steps=2,
    )[0]
    assert with_term["loss"] - plain["loss"] == pytest.approx(0.5 * with_term["l1"], rel=2e-2)


def test_reinitialises_dead_neurons(tmp_path):
    m = model()
    with torch.no_grad():
        for layer in m.model.layers:
            layer.mlp.gate_proj.weight[:8] = 0.0
    train(m, tmp_path, [twell.SparsityCallback(reinit_every=2)], steps=4)
    assert (m.model.layers[0].mlp.gate_proj.weight[:8].abs().sum(1) > 0).all()


def test_refuses_smooth_models(tmp_path):
    with pytest.raises(ValueError, match="twell.relufy"):
        train(model("silu"), tmp_path, [twell.SparsityCallback()])
