# SPDX-License-Identifier: Apache-2.0
"""`python -m twell.doctor`: what this installation can do, checked by running it. Exits 1 if
something does not work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _try_ops(device: str, dtype) -> str:
    """What the ops do on a device, in one line."""
    import torch

    import twell

    torch.manual_seed(0)
    x = torch.randn(256, 64, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.randn(128, 64, device=device, dtype=dtype, requires_grad=True)
               for _ in range(3)]
    y, l1, counts = twell.ffn_train(x, *weights)
    (y.float().sum() + l1).backward()
    gate, up, down = (w.detach().double() for w in weights)
    exact = x.detach().double()
    exact = (torch.relu(exact @ gate.t()) * (exact @ up.t())) @ down
    error = ((y.double() - exact).norm() / exact.norm()).item()
    with torch.no_grad():
        again = twell.ffn(x, *weights)
    error = max(error, ((again.double() - exact).norm() / exact.norm()).item())
    if not error < (1e-5 if dtype == torch.float32 else 2e-2):
        raise RuntimeError(f"the result is off by {error:.1e}")
    return f"works, error {error:.0e}, {counts[1] / counts[0]:.0f} of 128 neurons active per token"


def main() -> int:
    print(f"Python {platform.python_version()}, torch {_version('torch')}, "
          f"transformers {_version('transformers')}, lm-eval {_version('lm_eval')}")
    try:
        import torch

        from . import __version__
        from ._library import PATH, has_cuda
    except ImportError as error:
        print(f"FAIL {error}")
        return 1
    print(f"twell {__version__}: {PATH}")
    failed = 0
    devices = [("cpu", torch.float32)]
    if not has_cuda():
        print("GPU: this build of twell has no CUDA ops (no toolkit was found when it was built)")
    elif not torch.cuda.is_available():
        print("GPU: none that PyTorch can use")
    else:
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            kernels = "all executions" if (major, minor) == (9, 0) else "dense and row-fused"
            print(f"GPU {i}: {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}, "
                  f"{kernels}")
            devices.append((f"cuda:{i}", torch.bfloat16))
    try:
        from . import _engine  # noqa: F401

        print("engine: loads")
    except ImportError as error:
        print(f"FAIL engine: {error}")
        failed = 1
    for device, dtype in devices:
        try:
            print(f"ops on {device}: {_try_ops(device, dtype)}")
        except Exception as error:  # noqa: BLE001  (reported, whatever it is)
            print(f"FAIL ops on {device}: {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
