# SPDX-License-Identifier: Apache-2.0
"""Trains a small sparse language model in plain PyTorch, on the bytes of text files; on a GPU where
PyTorch has one. Prints the loss of every 50th step and each layer's activity since the print before.

    python python/examples/train_small.py README.md docs/*.md --steps 300
"""

import argparse
import pathlib

import torch
from torch import nn

import twell


class FeedForward(nn.Module):
    """A feed-forward layer as twell.patch takes it: these names, ReLU, no biases."""

    def __init__(self, width, neurons):
        super().__init__()
        self.gate_proj = nn.Linear(width, neurons, bias=False)
        self.up_proj = nn.Linear(width, neurons, bias=False)
        self.down_proj = nn.Linear(neurons, width, bias=False)
        self.act_fn = nn.ReLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width, neurons):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, bias=False, batch_first=True)
        self.mlp = FeedForward(width, neurons)

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, width=128, neurons=512, layers=3, context=128):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, neurons) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.tokens(ids) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, mask.to(x.dtype))
        return self.norm(x) @ self.tokens.weight.t()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--l1", type=float, default=1e-2, help="coefficient of the L1 term")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(b"\n".join(p.read_bytes() for p in args.files)), device=device)
    if len(text) < 1024:
        parser.error(f"{len(text)} bytes of text are too few; name more files")

    torch.manual_seed(0)
    model = twell.patch(Model().to(device), automatic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - 129, (16, 1), device=device)
        window = text[starts + torch.arange(129, device=device)].long()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(window[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        (loss + args.l1 * twell.l1(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps:
            twell.update(model)
            layers = twell.stats(model)
            print(f"step {step}: loss {loss.item():.3f}; " + "; ".join(
                f"{s.nnz_per_token:.0f} of {s.neurons} active, {s.execution}" for s in layers))


if __name__ == "__main__":
    main()
