#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One training step of the `tiny` preset in PyTorch on the CPU, float32: what a user would run
instead. Same model, objective, optimizer and batch as twell/model/training_bench.cc.

Prints the median of forward + backward, and of the whole step (with clipping and AdamW), in ms.
CPU is of all threads; with OMP_WAIT_POLICY=passive it holds up better than time on a busy machine.
Run: python train_step.py [--threads 2] [--compile]
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, FFN, LAYERS, HEADS, BATCH, LENGTH = 4096, 256, 1024, 4, 4, 8, 256
L1_COEFF = 2e-5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.attention_norm(x)).view(
            BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        normed = self.ffn_norm(x)
        hidden = F.relu(self.gate(normed)) * self.up(normed)
        return x + self.down(hidden), hidden.abs().sum(-1).mean()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x, l1 = self.embedding(ids), 0.0
        for layer in self.layers:
            x, layer_l1 = layer(x, self.cos, self.sin)
            l1 = l1 + layer_l1 / LAYERS
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + L1_COEFF * l1


def median_ms(fn, warmup: int, repeats: int) -> tuple[float, float]:
    """Of the time, and of the CPU time of all threads."""
    wall, cpu = [], []
    for _ in range(warmup):
        fn()
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        fn()
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - cpu_start))
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss = torch.compile(model) if args.compile else model

    def forward_backward():
        optimizer.zero_grad(set_to_none=False)
        loss(inputs, targets).backward()

    def step():
        forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    kind = "compiled" if args.compile else "eager"
    tokens = BATCH * LENGTH
    for name, fn in (("forward + backward", forward_backward), ("whole step", step)):
        ms, cpu_ms = median_ms(fn, 2, args.repeats)
        print(f"PyTorch {torch.__version__} {kind}, {args.threads} threads, {name}: {ms:.1f} ms, "
              f"{1e3 * tokens / ms:.0f} tokens/s, CPU {cpu_ms:.1f} ms")


if __name__ == "__main__":
    main()
