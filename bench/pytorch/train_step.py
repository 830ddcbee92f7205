#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch baseline of a training step. Same model, objective, optimizer and batch as
twell/model/training_bench.cc (CPU: the `tiny` preset, float32) or `twell bench train` (CUDA: a
larger preset, bf16 autocast over float32 weights).

Prints the median of forward + backward, and of the whole step (with clipping and AdamW), in ms. On
the CPU it also prints the CPU time of all threads, which a busy machine disturbs less than elapsed
time if OMP_WAIT_POLICY=passive is set; on a GPU the peak of allocated memory, and a JSON line.
Run: python train_step.py [--threads 2] [--compile]
     python train_step.py --device cuda --preset 0.5b --micro-batch 8 --compile --l1 0
     torchrun --nproc-per-node 2 train_step.py --device cuda --preset 0.5b --compile --l1 0 --shard ddp
Several processes, one per GPU, share the optimizer's state as `twell bench train --gpus N` does:
DDP with ZeroRedundancyOptimizer (ddp), or FSDP2, which also shares weights and gradients (fsdp).
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

# vocabulary, width, FFN, layers, heads, length
PRESETS = {"tiny": (4096, 256, 1024, 4, 4, 256), "0.5b": (49152, 2048, 5632, 8, 32, 2048),
           "1b": (49152, 2048, 5632, 18, 32, 2048), "1.5b": (49152, 2048, 5632, 28, 32, 2048),
           "2b": (49152, 2048, 5632, 38, 32, 2048)}


class Layer(nn.Module):
    def __init__(self, width, ffn, heads, l1):
        super().__init__()
        self.heads, self.l1 = heads, l1
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(
            batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.ffn_norm(x)
        hidden = F.relu(self.gate(normed)) * self.up(normed)
        l1 = hidden.abs().sum(-1, dtype=torch.float32).mean() if self.l1 > 0 else 0.0
        return x + self.down(hidden), l1


def rotate(x, cos, sin):
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, vocab, width, ffn, layers, heads, length, l1):
        super().__init__()
        self.l1 = l1
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, ffn, heads, l1) for _ in range(layers))
        self.final_norm = nn.RMSNorm(width, eps=1e-5)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x, l1 = self.embedding(ids), 0.0
        for layer in self.layers:
            x, layer_l1 = layer(x, self.cos, self.sin)
            l1 = l1 + layer_l1 / len(self.layers)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.l1 * l1


def distribute(model, shard):
    adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if shard == "ddp":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                              parameters_as_bucket_view=True, **adamw)
    if shard == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), **adamw)


def median_ms(fn, warmup: int, repeats: int, wait) -> tuple[float, float]:
    """Medians of elapsed time and of the CPU time of all threads, in ms."""
    wall, cpu = [], []
    for _ in range(warmup):
        fn()
    for _ in range(repeats):
        wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        fn()
        wait()
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - cpu_start))
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=0, help="0: the preset's context")
    parser.add_argument("--l1", type=float, default=2e-5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--shard", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    vocab, width, ffn, layers, heads, length = PRESETS[args.preset]
    length = args.sequence_length or length
    with torch.device(args.device):
        model = Model(vocab, width, ffn, layers, heads, length, args.l1)
        ids = torch.randint(0, vocab, (args.micro_batch, length + 1))
    model, optimizer = distribute(model, args.shard if ranks > 1 else None)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if cuda:
        torch.set_float32_matmul_precision("high")
    loss = torch.compile(model) if args.compile else model

    def forward_backward():
        optimizer.zero_grad(set_to_none=cuda)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            value = loss(inputs, targets)
        value.backward()

    def step():
        forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    kind = "compiled" if args.compile else "eager"
    where = torch.cuda.get_device_name() if cuda else f"{args.threads} threads"
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    tokens = args.micro_batch * length * ranks
    first = ranks == 1 or torch.distributed.get_rank() == 0
    row = {"bench": "train", "pytorch": torch.__version__, "kind": kind, "device": where,
           "preset": args.preset, "micro_batch": args.micro_batch, "length": length, "l1": args.l1, "gpus": ranks if cuda else 0}
    if ranks > 1:
        row["shard"] = args.shard
    for name, fn in (("forward + backward", forward_backward), ("whole step", step)):
        ms, cpu_ms = median_ms(fn, 3 if cuda else 2, args.repeats, wait)
        if first:
            print(f"PyTorch {torch.__version__} {kind}, {ranks} x {where}, {name}: {ms:.1f} ms, "
                  f"{1e3 * tokens / ms:.0f} tokens/s, CPU {cpu_ms:.1f} ms")
        row[name.replace(" + ", "_").replace(" ", "_") + "_ms"] = ms
    if cuda and first:
        row["tokens_per_s"] = 1e3 * tokens / row["whole_step_ms"]
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak memory {row['peak_gib']:.1f} GiB")
        print(json.dumps(row))
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
