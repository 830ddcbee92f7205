# SPDX-License-Identifier: Apache-2.0
"""The ops as a kernel of the Hugging Face hub: its source tree, and a CPU build of it loaded beside
the package."""

import importlib.util
import pathlib
import subprocess

import pytest
import torch
from test_patch import model, relative, tokens

import twell

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build/release"
spec = importlib.util.spec_from_file_location("layout", ROOT / "python/hub/layout.py")
layout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layout)


def test_tree_is_complete(tmp_path):
    layout.lay_out(tmp_path)
    for name in ("build.toml", "flake.nix", "CARD.md", "torch-ext/torch_binding.cpp",
                 "torch-ext/twell/__init__.py", "torch-ext/twell/patch.py", "third_party/fmt/format.h"):
        assert (tmp_path / name).is_file()
    assert (tmp_path / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")
    assert "{{" not in (tmp_path / "README.md").read_text()
    rust = pytest.importorskip("kernels._rust")  # parses build.toml as kernel-builder does
    rust.Build.open(tmp_path)
    with pytest.raises(SystemExit, match="is not empty"):
        layout.lay_out(tmp_path)


def symbols(path, kind):
    out = subprocess.run(["nm", "-P", kind, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in out.splitlines()}


def test_named_sources_need_no_others():
    """Every function of the library that the objects of build.toml's sources call is in one of
    them."""
    parts = layout.tomllib.loads((layout.HUB / "build.toml").read_text())["kernel"].values()
    defined, wanted = set(), set()
    for name in (name for part in parts for name in part["src"]):
        rooms = RELEASE.glob(f"*/CMakeFiles/twell_*.dir/{name.split('/', 1)[1]}.o")
        found = [path for path in rooms if "twell_hub_" not in str(path)]
        if not found:
            pytest.skip(f"no object of {name} in build/release: CUDA builds alone have it")
        defined |= symbols(found[0], "--defined-only")
        wanted |= symbols(found[0], "--undefined-only")
    missing = {name for name in wanted - defined if name.startswith("_ZN") and "5twell" in name}
    missing -= {name for name in missing if "choose_train_cpu" in name or "saved_bytes_cpu" in name}
    assert not missing


def test_loads_beside_the_package(tmp_path):
    kernels = pytest.importorskip("kernels")
    library = max(RELEASE.glob("python/hub/cpu/_twell_cpu_*.so"), default=None,
                  key=lambda path: path.stat().st_mtime)
    if library is None:
        pytest.skip("not built: cmake --build build/release --target twell_hub_cpu")
    folder = layout.add_variant(tmp_path, library, layout.lay_out(tmp_path))
    assert folder.name.startswith("torch-stable-abi210-cpu-")
    kernel = kernels.get_local_kernel(tmp_path, backend="cpu")
    assert kernel.ops._ops.ffn is not torch.ops.twell.ffn

    ids = tokens()
    plain = model()
    want = plain(ids, labels=ids)
    want.loss.backward()
    gradient = plain.model.layers[0].mlp.up_proj.weight.grad.clone()
    plain.zero_grad()
    patched = kernel.patch(plain)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    got = compiled(ids, labels=ids)
    got.loss.backward()
    assert relative(got.logits, want.logits) < 1e-5
    assert relative(patched.model.layers[0].mlp.up_proj.weight.grad, gradient) < 1e-5
    kernel.update(patched)
    assert kernel.stats(patched)[0].tokens == 48
    assert not twell.stats(kernel.unpatch(patched))
