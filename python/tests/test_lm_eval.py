# SPDX-License-Identifier: Apache-2.0
"""lm-eval's requests on a patched model and on the same model unpatched."""

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from test_examples import save_model  # noqa: E402

import twell  # noqa: E402
import twell.lm_eval  # noqa: E402


def requests(kind, arguments):
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


@pytest.mark.parametrize("name", ["twell", "twell-hf"])
def test_same_answers_as_transformers(name, tmp_path):
    save_model(tmp_path, "relu")
    hf = {"batch_size": 2, "max_length": 64, "device": "cpu"}
    own = {"batch_size": 2, "device": "cpu"} if name == "twell" else hf
    key = "checkpoint" if name == "twell" else "pretrained"  # both take both
    tested = get_model(name)(**{key: str(tmp_path)}, **own)
    plain = get_model("hf")(pretrained=str(tmp_path), dtype="float32", **hf)
    if name == "twell-hf":
        assert len(twell.stats(tested.model)) == 2
    long = "one and two are three " * 6  # of more than 64 tokens the last are scored
    pairs = requests(
        "loglikelihood", [("one", " two"), ("one and two ", "are"), ("", "ab"), (long, "four")]
    )
    for (a, greedy_a), (b, greedy_b) in zip(tested.loglikelihood(pairs), plain.loglikelihood(pairs)):
        assert a == pytest.approx(b, abs=1e-4) and greedy_a == greedy_b
    texts = requests("loglikelihood_rolling", [(long,), ("a",)])
    assert tested.loglikelihood_rolling(texts) == pytest.approx(
        plain.loglikelihood_rolling(texts), abs=1e-3
    )
    prompts = requests(
        "generate_until",
        [("one and", {"until": ["\n"], "max_gen_toks": 4, "do_sample": False})] * 3,
    )
    assert tested.generate_until(prompts) == plain.generate_until(prompts)


@pytest.mark.parametrize("name", ["twell", "twell-hf"])
def test_names_a_checkpoint_once(name):
    for folders in ({}, {"checkpoint": "a", "pretrained": "b"}):
        with pytest.raises(ValueError, match="pretrained=FOLDER"):
            get_model(name)(**folders)


def test_windows_of_long_texts(tmp_path):
    save_model(tmp_path, "relu")
    # The device that lm-eval's command names by default; without a GPU the CPU is taken.
    model = get_model("twell")(checkpoint=str(tmp_path), device="cuda:0")
    (value,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", [("one and two " * 20,)]))
    assert value < -240  # at least a nat per token of a random model
    (short,) = model.generate_until(
        requests("generate_until", [("one and two " * 20, {"until": "q", "max_gen_toks": 3})])
    )
    assert len(short) <= 12
