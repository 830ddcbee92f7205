# SPDX-License-Identifier: Apache-2.0
"""Loads the shared library of the ops once."""

import ctypes
import pathlib

import torch

PATH = pathlib.Path(__file__).with_name("_ops.so")


def _load():
    if not PATH.exists():
        raise ImportError(
            f"{PATH} is missing: build the package with `pip install --no-build-isolation .` in "
            "its source folder"
        )
    try:
        torch.ops.load_library(str(PATH))
    except OSError as error:
        raise ImportError(
            f"the ops of twell do not load with torch {torch.__version__}: {error}; twell needs "
            "torch 2.10 or later, with CUDA if twell was built with it"
        ) from error
    return ctypes.CDLL(str(PATH))


library = _load()
ops = torch.ops.twell


def add_op_namespace_prefix(name: str) -> str:
    """The op's qualified name. A kernel of the Hub has another namespace in every build."""
    return f"twell::{name}"


def has_cuda() -> bool:
    """Whether the ops were built with CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix("ffn"), "CUDA")
