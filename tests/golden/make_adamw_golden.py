# SPDX-License-Identifier: Apache-2.0
"""Writes twell/ops/adamw/adamw_golden.inc: torch.optim.AdamW over several steps.

Needs PyTorch. Run from the repository root: python tests/golden/make_adamw_golden.py
Inputs are multiples of 1/64, exact in text and in float32.
"""

import pathlib

import torch

SIZE, STEPS = 19, 5
LR = [1e-3, 8e-4, 2e-2, 5e-3, 1e-3]


def c_array(name, tensor):
    values = ", ".join(f"{v:.9g}" if "." in f"{v:.9g}" or "e" in f"{v:.9g}" else f"{v:.9g}.0"
                       for v in tensor.flatten().tolist())
    return f"constexpr float {name}[] = {{" + values.replace(",", "f,") + "f};\n"


def main():
    torch.manual_seed(7)
    weight = torch.randint(-128, 129, (SIZE,)).float() / 64
    grads = torch.randint(-64, 65, (STEPS, SIZE)).float() / 64
    grads[:, 3] = 0.0
    grads[2, 5] = 1e4
    out = "// SPDX-License-Identifier: Apache-2.0\n"
    out += "// Made by tests/golden/make_adamw_golden.py; do not edit.\n"
    out += f"// torch.optim.AdamW, betas 0.9 0.95, eps 1e-8, weight decay 0.1.\n"
    out += f"constexpr int kSize = {SIZE};\nconstexpr int kSteps = {STEPS};\n"
    out += f"constexpr double kLearningRate[] = {{{', '.join(map(str, LR))}}};\n"
    out += c_array("kInitial", weight) + c_array("kGrads", grads)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([param], lr=LR[0], betas=(0.9, 0.95), eps=1e-8,
                                  weight_decay=0.1, foreach=False)
    weights = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR[step]
        param.grad = grads[step].clone()
        optimizer.step()
        weights.append(param.detach().clone())
    state = optimizer.state[param]
    out += c_array("kWeights", torch.stack(weights))
    out += c_array("kExpAvg", state["exp_avg"]) + c_array("kExpAvgSq", state["exp_avg_sq"])
    path = pathlib.Path(__file__).parents[2] / "twell/ops/adamw/adamw_golden.inc"
    path.write_text(out)


if __name__ == "__main__":
    main()
