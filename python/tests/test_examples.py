# SPDX-License-Identifier: Apache-2.0
"""The examples and the doctor run."""

import pathlib
import runpy
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one and two are three, and two and two are four. " * 60)
    return path


def save_model(folder, hidden_act):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        hidden_act=hidden_act,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!", pad_token="!")
    wrapped.save_pretrained(folder)


def test_train_small(monkeypatch, capsys, text):
    run(monkeypatch, "train_small.py", text, "--steps", 2)
    assert "of 512 active" in capsys.readouterr().out


def test_sparsify_and_generate(monkeypatch, capsys, tmp_path, text):
    smooth, sparse = tmp_path / "smooth", tmp_path / "sparse"
    save_model(smooth, "silu")
    run(monkeypatch, "sparsify.py", smooth, text, "--out", sparse, "--steps", 2, "--ramp", 3,
        "--length", 32, "--batch", 2)
    model = LlamaForCausalLM.from_pretrained(sparse)
    assert model.config.hidden_act == "relu"
    run(monkeypatch, "generate.py", sparse, "one and", "--tokens", 3)
    assert "neurons active" in capsys.readouterr().out


def test_activity_plots(monkeypatch, tmp_path, text):
    pytest.importorskip("matplotlib")
    save_model(tmp_path / "model", "relu")
    picture = tmp_path / "activity.png"
    run(monkeypatch, "activity_plots.py", tmp_path / "model", text, "--out", picture)
    assert picture.stat().st_size > 10_000


def test_doctor(capsys):
    from twell import doctor

    assert doctor.main() == 0
    assert "ops on cpu: works" in capsys.readouterr().out
