# SPDX-License-Identifier: Apache-2.0
"""The engine's objects against the same model in transformers."""

import json
import threading
from pathlib import Path

import pytest
import torch
from test_examples import save_model
from transformers import AutoTokenizer, LlamaForCausalLM

import twell


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(folder, "relu")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    return twell.Engine(checkpoint, device="cpu", threads=1, context=48)


@pytest.fixture(scope="module")
def reference(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def test_generates_what_transformers_does(engine, reference):
    model, tokenizer = reference
    prompts = ["one and two", "are three", "one"]
    results = engine.generate(prompts, max_tokens=8, temperature=0)
    for prompt, result in zip(prompts, results):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        want = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=0)
        want = [token for token in want[0, ids.shape[1] :].tolist() if token != 0]
        assert result.tokens == want
        assert result.prompt_tokens == ids.shape[1]
        assert result.text == engine.decode(result.tokens)


def test_streams_the_same_text(engine):
    options = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
    whole = engine.generate("one and", **options)
    pieces = list(engine.stream("one and", **options))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token for piece in pieces if piece.token is not None] == whole.tokens
    assert [piece.stop for piece in pieces] == [None] * (len(pieces) - 1) + [whole.stop]


def test_streams_side_by_side_and_cancelled(engine):
    alone = engine.generate("one and", max_tokens=10, temperature=0).text
    first = engine.stream("one and", max_tokens=10, temperature=0)
    other = engine.stream("two and", max_tokens=30, temperature=0)
    text = next(first).text
    next(other)
    other.close()
    assert text + "".join(piece.text for piece in first) == alone


def test_threads_share_the_engine(engine):
    want = [engine.generate(f"one and {i}", max_tokens=6, temperature=0).text for i in range(6)]
    got = [None] * 6

    def ask(i):
        got[i] = engine.generate(f"one and {i}", max_tokens=6, temperature=0).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def test_log_probabilities(engine, reference):
    model, _ = reference
    result = engine.generate("one and two", max_tokens=4, temperature=0, logprobs=2)
    tokens = engine.encode("one and two") + result.tokens
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    begin = len(tokens) - len(result.tokens)
    for i, (token, found) in enumerate(zip(result.tokens, result.log_probs)):
        assert found.log_prob == pytest.approx(want[begin + i - 1, token].item(), abs=1e-4)
        assert found.top[0][0] == token and len(found.top) == 2
    scored = engine.prompt_logprobs(tokens)
    assert [one.log_prob for one in scored] == pytest.approx(
        [want[i - 1, tokens[i]].item() for i in range(1, len(tokens))], abs=1e-4
    )
    pairs = [("one and two", " are"), (tokens[:2], tokens[2:4])]
    (_, greedy), (value, _) = engine.loglikelihood(pairs)
    assert isinstance(greedy, bool)
    assert value == pytest.approx(scored[1].log_prob + scored[2].log_prob, abs=1e-5)


def test_logits_and_weights_through_dlpack(engine, reference):
    model, _ = reference
    tokens = engine.encode("one and two are three")
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(torch.from_dlpack(engine.logits(tokens)), want, atol=1e-4)
    weights = engine.weights()
    parameters = dict(model.named_parameters())
    assert set(weights) == set(parameters)
    for name, view in weights.items():
        assert torch.equal(torch.from_dlpack(view), parameters[name])


def test_weights_in_8_bits(checkpoint, engine):
    eight = twell.Engine(checkpoint, device="cpu", threads=1, context=48, weights="int8")
    ids = engine.encode("the cat sat on the mat")
    want, got = (torch.from_dlpack(e.logits(ids)) for e in (engine, eight))
    assert 0 < (got - want).norm() / want.norm() < 0.05
    with pytest.raises(ValueError, match="weights in 8 bits cannot be viewed"):
        eight.weights()
    head = twell.Engine(checkpoint, device="cpu", threads=1, context=48, weights="int8", head="8bit")
    assert 0 < (torch.from_dlpack(head.logits(ids)) - got).norm() / got.norm() < 0.05
    with pytest.raises(ValueError, match="an output head in 8 bits needs projections in int8"):
        twell.Engine(checkpoint, device="cpu", head="8bit")
    with pytest.raises(ValueError, match="unknown type of the output head 'int8'"):
        twell.Engine(checkpoint, device="cpu", weights="int8", head="int8")
    with pytest.raises(ValueError, match="fp8 weights need a GPU"):
        twell.Engine(checkpoint, device="cpu", weights="fp8")
    with pytest.raises(ValueError, match="unknown type of weights 'int4'"):
        twell.Engine(checkpoint, device="cpu", weights="int4")


def test_products_in_bf16(checkpoint, engine):
    with pytest.raises(ValueError, match="unknown type of products 'int8': f32 or bf16"):
        twell.Engine(checkpoint, device="cpu", compute="int8")
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text().split():
        with pytest.raises(ValueError, match="no products of bf16 .*: compute in f32, the default"):
            twell.Engine(checkpoint, device="cpu", compute="bf16")
        return
    # Only prompts of more than 16 tokens are multiplied in bf16.
    ids = (engine.encode("one and two are three") * 10)[:40]
    rounded = twell.Engine(checkpoint, device="cpu", threads=1, context=48, compute="bf16")
    want, got = (torch.from_dlpack(e.logits(ids)) for e in (engine, rounded))
    assert 0 < (got - want).norm() / want.norm() < 2**-6


def test_chat(engine):
    messages = [{"role": "user", "content": "one and two"}]
    answer = engine.chat(messages, max_tokens=5, temperature=0)
    prompt = "user: one and two assistant:"
    assert answer.text == engine.generate(prompt, max_tokens=5, temperature=0).text
    pieces = engine.chat(messages, stream=True, max_tokens=5, temperature=0)
    assert "".join(piece.text for piece in pieces) == answer.text


def test_stop_texts(engine):
    whole = engine.generate("one and", max_tokens=12, temperature=0).text
    stop = [c for c in whole if c.isascii()][-1]  # others may stand for bytes that are no text
    cut = engine.generate("one and", max_tokens=12, temperature=0, stop=stop)
    assert cut.text == whole[: whole.index(stop)] and cut.stop == "stop string"


def test_faults(engine, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="device 'tpu'"):
        twell.Engine(checkpoint, device="tpu")
    with pytest.raises(ValueError, match="config.json"):
        twell.Engine(tmp_path)
    with pytest.raises(ValueError, match="temperature"):
        engine.generate("one", temperature=-1.0)
    with pytest.raises(ValueError, match="there is no option max_token; the options are max_tokens"):
        engine.generate("one", max_token=3)
    with pytest.raises(TypeError, match="max_tokens: unexpected str '3'"):
        engine.generate("one", max_tokens="3")
    with pytest.raises(TypeError, match="a text or a list of token ids, got None"):
        engine.generate(None)
    same = [engine.generate(p, max_tokens=2).text for p in ([5, 6], torch.tensor([5, 6]))]
    assert same[0] == same[1]
    with pytest.raises(ValueError, match="999999"):
        engine.generate([999999])
    with pytest.raises(ValueError):
        engine.generate("one " * 100)
    with pytest.raises(ValueError, match="longer than the model's context"):
        twell.Engine(checkpoint, device="cpu", context=10**6)


def test_penalties_and_biases(engine):
    options = {"max_tokens": 12, "temperature": 0}
    plain = engine.generate("one and two", **options)
    for penalty in ("presence_penalty", "frequency_penalty"):
        tokens = engine.generate("one and two", **options, **{penalty: -1e6}).tokens
        assert len(set(tokens)) == 1
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        tokens = engine.generate("one and two", **options, **{penalty: 1e6}).tokens
        assert len(set(tokens)) == len(tokens)
    biased = engine.generate("one and two", **options, logit_bias={plain.tokens[0]: -100, 5: 100})
    assert set(biased.tokens) == {5}
    with pytest.raises(ValueError, match="bias of token 5 must be from -100 to 100, got 101"):
        engine.generate("one", logit_bias={5: 101})
    with pytest.raises(ValueError, match="repetition penalty"):
        engine.generate("one", repetition_penalty=0)
    with pytest.raises(TypeError, match="logit_bias"):
        engine.generate("one", logit_bias=[5])


def test_guessed_tokens_change_no_text(engine, checkpoint):
    guessing = twell.Engine(checkpoint, device="cpu", threads=1, context=48, speculate=8)
    prompts = ["one and two one and two one", "are three"]
    for options in ({"temperature": 0}, {"temperature": 0.3, "seed": 4, "frequency_penalty": 0.1}):
        want = engine.generate(prompts, max_tokens=24, **options)
        got = guessing.generate(prompts, max_tokens=24, **options)
        assert [one.tokens for one in got] == [one.tokens for one in want]
        assert [one.stop for one in got] == [one.stop for one in want]
    with pytest.raises(ValueError, match="speculate: from 0 to 64 tokens, got 65"):
        twell.Engine(checkpoint, device="cpu", speculate=65)


def test_grammars(engine):
    grammar = 'root ::= ("one" | "three") (" two"){2}'
    try:
        results = engine.generate(["one", "two", "are"], max_tokens=40, grammar=grammar)
    except ValueError as error:
        if "this build has no grammars" in str(error):
            pytest.skip(str(error))
        raise
    for result in results:
        assert result.stop == "end of text"
        assert result.text in ("one two two", "three two two")
    assert "".join(p.text for p in engine.stream("one", grammar=grammar)) in ("one two two", "three two two")
    with pytest.raises(ValueError, match='"not" is not supported'):
        engine.generate("one", json_schema={"not": {"const": 1}})
    with pytest.raises(ValueError, match="missing"):
        engine.generate("one", grammar="root ::= missing")
    with pytest.raises(ValueError, match="does not go with"):
        engine.generate("one", grammar=grammar, json_schema="{}")
    with pytest.raises(TypeError, match="json_schema"):
        engine.generate("one", json_schema=1)
