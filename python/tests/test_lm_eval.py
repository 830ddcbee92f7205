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


def test_same_answers_as_unpatched(tmp_path):
    save_model(tmp_path, "relu")
    shared = {"batch_size": 2, "max_length": 64, "device": "cpu"}
    patched = get_model("twell")(checkpoint=str(tmp_path), **shared)
    plain = get_model("hf")(pretrained=str(tmp_path), dtype="float32", **shared)
    assert len(twell.stats(patched.model)) == 2
    pairs = requests("loglikelihood", [("one", " two"), ("one and two", " are"), ("a", "b")])
    for (a, greedy_a), (b, greedy_b) in zip(
        patched.loglikelihood(pairs), plain.loglikelihood(pairs)
    ):
        assert a == pytest.approx(b, abs=1e-4) and greedy_a == greedy_b
    texts = requests("loglikelihood_rolling", [("one and two are three " * 8,), ("a",)])
    assert patched.loglikelihood_rolling(texts) == pytest.approx(
        plain.loglikelihood_rolling(texts), abs=1e-3
    )
    prompts = requests(
        "generate_until",
        [("one and", {"until": ["\n"], "max_gen_toks": 4, "do_sample": False})] * 3,
    )
    assert patched.generate_until(prompts) == plain.generate_until(prompts)
