# SPDX-License-Identifier: Apache-2.0
"""The package's annotations are those that a program under `mypy --strict` needs."""

import os
import pathlib
import subprocess
import sys

import pytest

import twell

PROGRAM = '''
import torch
import twell
from twell import Engine, Generation, LayerStats, Plan, Trainer, tokenize


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    plan: Plan = Plan("auto")
    y, l1, _ = twell.ffn_train(x, w, None, w, plan, activation="relu2")
    return twell.ffn(x, w, w, w, plan) + y + l1


def patched(net: torch.nn.Linear) -> torch.nn.Linear:
    result: torch.nn.Linear = twell.patch(net)
    twell.update(result)
    stats: list[LayerStats] = twell.stats(result)
    dead: int = twell.reinit_dead(result)
    print(stats[0].nnz_per_token + dead, twell.l1(result))
    return twell.unpatch(twell.relufy(result))


def train() -> str:
    tokens, held_out = tokenize("docs", "shards", vocab_size=300)
    trainer = Trainer(out="run", shards="shards", steps=3, l1=1e-5)
    for metrics in trainer:
        print(metrics["ce"], tokens + held_out)
    trainer.run(lambda metrics: metrics["step"] < 2)
    value: float = trainer.validate()
    print(value, trainer.steps - trainer.steps_done)
    return trainer.save()


def use(folder: str) -> str:
    engine = Engine(folder, device="cpu")
    several: list[Generation] = engine.generate(["one", "two"], max_tokens=3)
    pieces = [piece.text for piece in engine.chat([{"role": "user", "content": "x"}], stream=True)]
    score: float = engine.loglikelihood([("a", "b")])[0][0]
    print(several[0].tokens, pieces, score, engine.config["hidden_act"])
    return engine.generate("one", temperature=0.0).text + engine.chat([]).text
'''
WRONG = {
    'x: int = twell.Engine("a").generate("b")': "Generation",
    'twell.Trainer(outs="x")': 'Missing named argument "out"',
}


def test_strict_program(tmp_path):
    pytest.importorskip("mypy")
    assert (pathlib.Path(twell.__file__).parent / "py.typed").is_file()
    (tmp_path / "user.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text("import twell\n" + "\n".join(WRONG))
    # torch's own sources take minutes; without them its types are Any.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")

    def check(name):
        return subprocess.run([sys.executable, "-m", "mypy", "--strict", name], cwd=tmp_path, text=True,
                              capture_output=True, env={**os.environ, "MYPYPATH": ""})

    done = check("user.py")
    assert done.returncode == 0, done.stdout
    done = check("wrong.py")
    for number, fault in enumerate(WRONG.values(), 2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"wrong.py:{number}: error")]
        assert lines and fault in lines[0], done.stdout
