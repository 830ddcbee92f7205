# SPDX-License-Identifier: Apache-2.0
"""Training by the engine: step by step and as a whole run, the same losses and a usable model."""

import itertools
import json
import pathlib
import shutil
import signal
import threading
import time

import pytest
import torch

import twell

SMALL = {
    "width": 32, "ffn": 64, "layers": 2, "heads": 4, "context": 32, "steps": 6, "micro_batch": 2,
    "validate_every": 3, "validation_sequences": 2, "l1": 1e-4, "device": "cpu", "threads": 1,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = "one two three four five six seven eight nine ten".split()
    text = " ".join(words[i * i % 10] for i in range(6000))
    (folder / "text.txt").write_text(text)
    tokens, held_out = twell.tokenize(folder / "text.txt", folder / "shards", vocab_size=270,
                                      validation_fraction=0.1)
    assert tokens > 10 * 64 and held_out > 64
    return folder / "shards"


def test_steps_and_a_run_give_the_same_losses(shards, tmp_path):
    trainer = twell.Trainer(out=tmp_path / "steps", shards=shards, **SMALL)
    losses = [metrics["ce"] for metrics in trainer]
    assert len(losses) == 6 and trainer.steps_done == 6 and losses[-1] < losses[0]
    checkpoint = trainer.save()
    assert trainer.validate() < 6.0
    with pytest.raises(ValueError, match="ended after 6 steps"):
        trainer.step()

    seen = []
    run = twell.Trainer(out=tmp_path / "run", shards=shards, **SMALL)
    last = run.run(seen.append)
    assert [m["ce"] for m in seen if m["step"] > 0] == losses
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert [metrics["ce"] for metrics in written if metrics["step"] > 0] == losses

    texts = [twell.Engine(folder, device="cpu").generate("one two", max_tokens=8, temperature=0).text
             for folder in (checkpoint, last, tmp_path / "run")]
    assert texts[0] == texts[1] == texts[2]


def test_a_run_writes_texts(shards, tmp_path):
    plain, seen = [], []
    twell.Trainer(out=tmp_path / "plain", shards=shards, **SMALL).run(plain.append)
    texts = {"sample_every": 4, "sample_prompt": ["one two", "three"], "sample_tokens": 5}
    trainer = twell.Trainer(out=tmp_path / "texts", shards=shards, **SMALL, **texts)
    last = trainer.run(seen.append)
    assert [m.get("ce") for m in seen] == [m.get("ce") for m in plain]
    sampled = {m["step"]: m["samples"] for m in seen if "samples" in m}
    assert list(sampled) == [4, 6]
    assert [sample["prompt"] for sample in sampled[6]] == texts["sample_prompt"]
    engine = twell.Engine(last, device="cpu")
    assert sampled[6][0]["text"] == engine.generate("one two", max_tokens=5, temperature=0.8,
                                                    seed=0).text
    del trainer
    more = []
    twell.Trainer(out=tmp_path / "texts", resume=True, steps=8).run(more.append)
    assert [m["step"] for m in more if "samples" in m] == [8]
    one = twell.Trainer(out=tmp_path / "one", shards=shards, **SMALL, sample_every=6,
                        sample_prompt="four")
    one.run(more.append)
    assert more[-1]["samples"][0]["prompt"] == "four"
    for given, fault in [({"sample_prompt": "x"}, "sample_prompt goes with sample_every"),
                         ({"sample_every": 1, "sample_prompt": [1]}, "1 is not a text"),
                         ({"sample_every": 1, "sample_prompt": "one " * 99}, "leaves no room")]:
        with pytest.raises(ValueError, match=fault):
            twell.Trainer(out=tmp_path / "faulty", shards=shards, **SMALL, **given)


def test_a_run_ends_when_it_is_told_to(shards, tmp_path):
    trainer = twell.Trainer(out=tmp_path / "short", shards=shards, **SMALL)
    checkpoint = trainer.run(lambda metrics: metrics["step"] < 2)
    assert trainer.steps_done == 2 and pathlib.Path(checkpoint, "model.safetensors").exists()

    def fail(metrics):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        twell.Trainer(out=tmp_path / "failed", shards=shards, **SMALL).run(fail)


def test_starts_from_a_checkpoint(shards, tmp_path):
    first = twell.Trainer(out=tmp_path / "first", shards=shards, **SMALL)
    before = [metrics["ce"] for metrics in first]
    options = {k: v for k, v in SMALL.items() if k not in ("width", "ffn", "layers", "heads", "context")}
    second = twell.Trainer(out=tmp_path / "second", shards=shards, from_=first.save(), **options)
    assert second.step()["ce"] < before[0]
    with pytest.raises(ValueError, match="from takes the model from the checkpoint"):
        twell.Trainer(out=tmp_path / "third", shards=shards, from_=first.save(), width=32)


def test_options_reach_the_model_and_its_files(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"activation": "relu2", "rope_theta": 500.0, "norm_eps": 1e-4, "save_dtype": "bf16",
             "l1_reduction": "mean", "document_mask": True}
    trainer = twell.Trainer(out="run", shards=shards, **SMALL, **given)
    engine = twell.Engine(trainer.run(), device="cpu")
    assert engine.config["hidden_act"] == "relu2" and engine.config["rms_norm_eps"] == 1e-4
    embedding = torch.from_dlpack(engine.weights()["model.embed_tokens.weight"])
    assert embedding.dtype == torch.bfloat16
    options = json.loads((tmp_path / "run/options.json").read_text())
    assert options.items() >= given.items() and options["out"] == str(tmp_path / "run")


def test_transformers_and_lm_eval_take_a_checkpoint_as_it_is(shards, tmp_path):
    from transformers import AutoTokenizer, pipeline

    folder = twell.Trainer(out=tmp_path / "run", shards=shards, **SMALL).run()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.model_max_length == 32
    batch = tokenizer(["one", "one two three"], padding=True)
    assert len(batch["input_ids"][0]) == len(batch["input_ids"][1])
    assert 0 in batch["attention_mask"][0] and 0 not in batch["attention_mask"][1]
    generate = pipeline("text-generation", model=folder)
    assert generate.model.generation_config.max_length == 32
    assert generate.model.generation_config.eos_token_id == tokenizer.eos_token_id
    for answer in generate(["one two", "three"], batch_size=2, do_sample=False):
        assert len(tokenizer(answer[0]["generated_text"])["input_ids"]) <= 32

    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model
    from test_lm_eval import requests

    model = get_model("hf")(pretrained=folder, device="cpu", batch_size=2)
    pairs = requests("loglikelihood", [("one", " two"), ("one two three", " four")])
    engine = twell.Engine(folder, device="cpu").loglikelihood([r.args for r in pairs])
    for (a, _), (b, _) in zip(model.loglikelihood(pairs), engine):
        assert a == pytest.approx(b, abs=1e-4)
    until = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    assert len(model.generate_until(requests("generate_until", [("one", until), ("two three", until)]))) == 2


def test_conversations(shards, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size = {**SMALL, "width": 64, "ffn": 128, "context": 64}
    base = twell.Trainer(out=tmp_path / "base", shards=shards, **size).run()
    pairs = {"one": "two", "three": "four", "five": "six"}
    # Copies would go to validation together, and then nothing would be learned of them.
    lines = [json.dumps({"messages": [m for question in questions for m in (
                 {"role": "user", "content": question},
                 {"role": "assistant", "content": pairs[question]})]})
             for count in (1, 2, 3) for questions in itertools.product(pairs, repeat=count)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    (tmp_path / "turns.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    given = {"from_": base, "chat_data": tmp_path / "talks.jsonl",
             "chat_template": tmp_path / "turns.jinja", "steps": 60, "micro_batch": 2, "lr": 5e-3,
             "validate_every": 0, "device": "cpu", "threads": 1}
    trainer = twell.Trainer(out=tmp_path / "chat", **given)
    for metrics in trainer:
        if metrics["step"] == 30:
            trainer.save()
    assert metrics["ce"] < 0.05
    folder = trainer.save()
    engine = twell.Engine(folder, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for question, answer in pairs.items():
        messages = [{"role": "user", "content": question}]
        assert engine.chat(messages, temperature=0, max_tokens=8).text == answer
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False)[0][ids["input_ids"].shape[1]:]
        assert out[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(out, skip_special_tokens=True) == answer
    del trainer
    with pytest.raises(ValueError, match="leave shards out"):
        twell.Trainer(out=tmp_path / "both", shards=shards, **given)
    (tmp_path / "talks.jsonl").write_text("\n".join(lines[:-1]))
    resumed = twell.Trainer(out=tmp_path / "chat", resume=True, steps=70)
    with pytest.raises(ValueError, match="cannot resume on other data"):
        resumed.step()


def test_one_call_at_a_time(shards, tmp_path):
    trainer = twell.Trainer(out=tmp_path / "calls", shards=shards, **SMALL)
    faults = []

    def use(metrics):
        for call in (trainer.step, trainer.save, trainer.validate, trainer.run):
            with pytest.raises(ValueError, match="has not returned yet"):
                call()
            faults.append(call)

    trainer.run(use)
    assert len(faults) >= 4 * SMALL["steps"]


def test_control_c_ends_tokenize(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} of many words and more\n" * 40000)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < start + 60:
            twell.tokenize(tmp_path / "text", tmp_path / "shards", vocab_size=300)
            shutil.rmtree(tmp_path / "shards")
    assert time.monotonic() < start + 30


def test_resume(shards, tmp_path):
    options = {**SMALL, "save_every": 0}
    whole = [row["ce"] for row in twell.Trainer(out=tmp_path / "whole", shards=shards, **options)]
    first = twell.Trainer(out=tmp_path / "cut", shards=shards, **options)
    losses = [first.step()["ce"] for _ in range(3)]
    first.save()
    losses.append(first.step()["ce"])  # lost
    del first
    second = twell.Trainer(out=tmp_path / "cut", resume=True)
    assert second.steps_done == 3
    assert losses[:3] + [row["ce"] for row in second] == whole
    # Nothing was saved: the run begins again.
    third = twell.Trainer(out=tmp_path / "unsaved", shards=shards, **options)
    third.step()
    del third
    again = twell.Trainer(out=tmp_path / "unsaved", resume=True)
    assert again.steps_done == 0 and again.step()["ce"] == whole[0]


def test_faults(shards, tmp_path):
    with pytest.raises(ValueError, match="there is no option widht"):
        twell.Trainer(out=tmp_path / "a", shards=shards, widht=32)
    for name, value, kind in [("steps", "many", "a whole number"), ("steps", 2.5, "a whole number"),
                              ("lr", "1", "a number"), ("gated", 1, "True or False"),
                              ("preset", 2, "a text")]:
        with pytest.raises(ValueError, match=f"option {name}: .* is not {kind}"):
            twell.Trainer(out=tmp_path / "a", shards=shards, **{name: value})
    with pytest.raises(ValueError, match="option moment_dtype: must be f32 or bf16, got 'f16'"):
        twell.Trainer(out=tmp_path / "a", shards=shards, moment_dtype="f16")
    for given, fault in [
        # `twell train` refuses them too.
        ({**SMALL, "tokens": 4096}, "give steps or tokens, not both"),
        ({**SMALL, "width": 18, "heads": 4}, "width 18 is not a multiple of 4 heads; give head_dim"),
        ({**SMALL, "seed": -1}, "option seed: -1 is negative"),
        ({**SMALL, "micro_batch": 0}, "option micro_batch: must be 1 to 65536, got 0"),
        ({**SMALL, "from_": ""}, "from_ must be a path"),
    ]:
        with pytest.raises(ValueError, match=fault):
            twell.Trainer(out=tmp_path / "a", shards=shards, **given)
    with pytest.raises(ValueError, match="out must be a path"):
        twell.Trainer(out="", shards=shards)
    with pytest.raises(ValueError, match="shards must be a path"):
        twell.Trainer(out=tmp_path / "a", shards="")
    with pytest.raises(ValueError, match="not a finite number"):
        twell.Trainer(out=tmp_path / "a", shards=shards, lr=float("nan"))
    with pytest.raises(ValueError, match="tokenizer.json"):
        twell.Trainer(out=tmp_path / "a", shards=tmp_path)
    with pytest.raises(ValueError, match="l1 makes no layer sparse with silu.*take activation relu"):
        twell.Trainer(out=tmp_path / "a", shards=shards, activation="silu", **SMALL)
    smooth = {**SMALL, "activation": "silu"}
    del smooth["l1"]
    assert twell.Trainer(out=tmp_path / "smooth", shards=shards, **smooth).step()["l1_coeff"] == 0.0
    trainer = twell.Trainer(out=tmp_path / "b", shards=shards, **SMALL)
    with pytest.raises(ValueError, match="before the first step"):
        trainer.save()
    trainer.step()
    with pytest.raises(ValueError, match="has begun already"):
        trainer.run()
    trainer.save()
    del trainer  # which held the folder
    with pytest.raises(ValueError, match="continue it with `twell train --resume"):
        twell.Trainer(out=tmp_path / "b", shards=shards, **SMALL)
