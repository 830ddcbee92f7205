# SPDX-License-Identifier: Apache-2.0
"""The ops of this build, in the namespace that kernel-builder gave it (`_ops.py`)."""

import ctypes
import pathlib

from ._ops import add_op_namespace_prefix, ops

__all__ = ["add_op_namespace_prefix", "library", "ops"]

# Loaded by _ops already; for the one function that is no op.
library = ctypes.CDLL(str(next(pathlib.Path(__file__).parent.glob("_twell_*.so"))))
