# SPDX-License-Identifier: Apache-2.0
"""The wheel brings the `twell` command, which needs no Python to run."""

import pathlib
import subprocess
import sys

import pytest

import twell

COMMAND = pathlib.Path(sys.prefix) / "bin/twell"


@pytest.mark.skipif(not COMMAND.exists(), reason="the package is not installed from a wheel")
def test_trains_and_generates(tmp_path):
    def run(*arguments):
        return subprocess.run([COMMAND, *arguments], cwd=tmp_path, check=True, text=True,
                              capture_output=True).stdout

    assert twell.__version__ in run("--version")
    (tmp_path / "text.txt").write_text("one and two are three, and two and two are four. " * 400)
    run("train", "--data", "text.txt", "--out", "run", "--steps", "3", "--width", "32", "--ffn", "64",
        "--layers", "1", "--heads", "2", "--context", "32", "--vocab-size", "270", "--micro-batch", "1",
        "--validate-every", "0", "--device", "cpu", "--threads", "1")
    out = run("generate", "--checkpoint", "run", "--prompt", "one and", "--max-tokens", "4",
              "--temperature", "0", "--device", "cpu")
    engine = twell.Engine(str(tmp_path / "run"), device="cpu")
    assert engine.generate("one and", max_tokens=4, temperature=0).text in out
