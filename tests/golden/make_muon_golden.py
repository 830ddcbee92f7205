# SPDX-License-Identifier: Apache-2.0
"""Writes twell/ops/muon/muon_golden.inc: Muon in float64 over several steps, of a wide, a tall and a
square matrix, and checks it against torch.optim.Muon, which orthogonalises in bf16.

Needs PyTorch 2.9 or later. Run from the repository root: python tests/golden/make_muon_golden.py
Inputs are multiples of 1/64, exact in text and in float32.
"""

import math
import pathlib

import torch

SHAPES = [(3, 8), (9, 4), (5, 5)]
LR = [4e-3, 2e-2, 1e-3]
DECAY, MOMENTUM = 0.1, 0.95
A, B, C = 3.4445, -4.775, 2.0315


def orthogonalise(u):
    x = u / (u.norm() + 1e-7)
    for _ in range(5):
        if u.shape[0] > u.shape[1]:
            gram = x.T @ x
            x = A * x + x @ (B * gram + C * gram @ gram)
        else:
            gram = x @ x.T
            x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def steps(weight, grads):
    w, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for lr, grad in zip(LR, grads):
        g = grad.double()
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        o = orthogonalise(MOMENTUM * m + (1 - MOMENTUM) * g)
        w = w * (1 - lr * DECAY) - lr * 0.2 * math.sqrt(max(w.shape)) * o
    return w, m


def torch_steps(weight, grads):
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([param], lr=LR[0], weight_decay=DECAY, momentum=MOMENTUM,
                                 adjust_lr_fn="match_rms_adamw")
    for lr, grad in zip(LR, grads):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def c_array(name, tensors):
    values = ", ".join(f"{v:.9g}f" if "." in f"{v:.9g}" or "e" in f"{v:.9g}" else f"{v:.9g}.0f"
                       for t in tensors for v in t.flatten().tolist())
    return f"constexpr float {name}[] = {{{values}}};\n"


def main():
    torch.manual_seed(7)
    weights = [torch.randint(-128, 129, s).float() / 64 for s in SHAPES]
    grads = [torch.randint(-64, 65, (len(LR), *s)).float() / 64 for s in SHAPES]
    after, moments = [], []
    for weight, grad in zip(weights, grads):
        w, m = steps(weight, grad)
        moved = (w - weight).norm()
        off = ((torch_steps(weight, grad) - w).norm() / moved).item()
        assert off < 0.04, f"torch.optim.Muon is {off:.3f} of the step away"
        after.append(w)
        moments.append(m)
    out = "// SPDX-License-Identifier: Apache-2.0\n"
    out += "// Made by tests/golden/make_muon_golden.py; do not edit.\n"
    out += f"// Muon in float64, momentum {MOMENTUM}, weight decay {DECAY}, matrices one behind the other.\n"
    out += f"constexpr int kShapes[][2] = {{{', '.join(f'{{{r}, {c}}}' for r, c in SHAPES)}}};\n"
    out += f"constexpr double kLearningRate[] = {{{', '.join(map(str, LR))}}};\n"
    # The gradients of a matrix: all of its steps.
    out += c_array("kInitial", weights) + c_array("kGrads", grads)
    out += c_array("kWeights", after) + c_array("kExpAvg", moments)
    path = pathlib.Path(__file__).parents[2] / "twell/ops/muon/muon_golden.inc"
    path.write_text(out)


if __name__ == "__main__":
    main()
