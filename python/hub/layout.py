# SPDX-License-Identifier: Apache-2.0
"""Lays out the ops as a kernel of the Hugging Face hub.

    python python/hub/layout.py OUT
        the source tree that kernel-builder builds: build.toml, torch-ext/, flake.nix, the card, and
        copies of the sources that build.toml names with all that they include
    python python/hub/layout.py OUT --library build/release/python/hub/cpu/_twell_*.so
        also OUT/build/VARIANT from a library that this repository's CMake made (target
        twell_hub_cpu or twell_hub_cuda), for kernels.get_local_kernel(OUT). Not for uploads: it
        needs the libraries of this machine's distribution.

Needs Python 3.11 and, for --library, torch. Downloads nothing.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tomllib

HUB = pathlib.Path(__file__).resolve().parent
ROOT = HUB.parents[1]
MODULES = ("ops.py", "patch.py", "plan.py")  # of the package, as they are
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def with_includes(sources: list[str]) -> set[str]:
    """The sources and this repository's headers that they include, at any depth."""
    found: set[str] = set()
    waiting = list(sources)
    while waiting:
        name = waiting.pop()
        if name in found or not (ROOT / name).is_file():
            continue  # others' headers, or one that kernel-builder writes
        found.add(name)
        waiting += INCLUDE.findall((ROOT / name).read_text())
    return found


def fmt_headers() -> pathlib.Path:
    asked = subprocess.run(["pkg-config", "--variable=includedir", "fmt"], capture_output=True, text=True)
    folder = pathlib.Path(asked.stdout.strip() or "/usr/include") / "fmt"
    if not (folder / "format.h").is_file():
        raise SystemExit(f"layout: no headers of fmt in {folder}; scripts/setup.sh installs them")
    return folder


def card(config: dict) -> str:
    general = config["general"]
    text = (HUB / "CARD.md").read_text()
    text = text.replace("{{ repo_id }}", general["hub"]["repo-id"])
    return text.replace("{{ version }}", str(general["version"]))


def lay_out(out: pathlib.Path) -> dict:
    """Writes the source tree into a new or empty folder. Returns build.toml's content."""
    config = tomllib.loads((HUB / "build.toml").read_text())
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"layout: {out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("build.toml", "CARD.md", "flake.nix"):
        shutil.copy(HUB / name, out)
    shutil.copy(ROOT / "LICENSE", out)
    (out / "README.md").write_text(card(config))
    shutil.copytree(HUB / "torch-ext", out / "torch-ext", ignore=shutil.ignore_patterns("__pycache__"))
    for name in MODULES:
        shutil.copy(ROOT / "python/twell" / name, out / "torch-ext/twell")
    sources = [name for part in config["kernel"].values() for name in part["src"]]
    missing = [name for name in sources if not (ROOT / name).is_file()]
    if missing:
        raise SystemExit(f"layout: build.toml names {', '.join(missing)}, which do not exist")
    for name in with_includes(sources):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, out / name)
    shutil.copytree(fmt_headers(), out / "third_party/fmt")
    return config


def add_variant(out: pathlib.Path, library: pathlib.Path, config: dict) -> pathlib.Path:
    """Writes OUT/build/VARIANT around a library. Returns its folder."""
    import torch

    named = re.fullmatch(r"(_twell_(cpu|cuda)_\w+)\.abi3\.so", library.name)
    if not named:
        raise SystemExit(f"layout: {library} was not made by the target twell_hub_cpu or twell_hub_cuda")
    module, backend = named[1], named[2]
    device = backend if backend == "cpu" else "cu" + torch.version.cuda.replace(".", "")
    stable = config["torch"]["stable-abi"]["cuda"].replace(".", "")
    folder = out / "build" / f"torch-stable-abi{stable}-{device}-{platform.machine()}-linux"
    shutil.copytree(out / "torch-ext/twell", folder)
    shutil.copy(library, folder)
    (folder / "_ops.py").write_text(
        f'''import torch

from . import {module}  # noqa: F401

ops = torch.ops.{module}


def add_op_namespace_prefix(name: str) -> str:
    return f"{module}::{{name}}"
'''
    )
    general = config["general"]
    archs = {arch for part in config["kernel"].values() for arch in part.get("cuda-capabilities", ())}

    def digest(path: pathlib.Path) -> str:
        return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()

    metadata = {
        "id": module,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": sorted(archs)} if backend == "cuda" else {}),
        "digest": {
            "algorithm": "sha256",
            "files": {path.name: digest(path) for path in sorted(folder.iterdir())},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--library", type=pathlib.Path, nargs="*", default=[])
    arguments = parser.parse_args()
    config = lay_out(arguments.out)
    print(f"{arguments.out}: kernel '{config['general']['name']}', version {config['general']['version']}")
    for library in arguments.library:
        print(add_variant(arguments.out, library, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
