#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch baseline of `twell bench forward`: the body (no output head) of a preset, bf16.

The same model as `twell bench forward --preset NAME`: Llama with a ReLU-gated feed-forward layer,
random weights, random tokens; eager and torch.compile. Prints one JSON line.
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = {"0.5b": 8, "1b": 18, "1.5b": 28, "2b": 38}
WIDTH, FFN, HEADS, HEAD_DIM, VOCAB, THETA, EPS = 2048, 5632, 32, 64, 49152, 10000.0, 1e-5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=EPS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=EPS)
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, HEAD_DIM).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, WIDTH))
        h = self.ffn_norm(x)
        return x + self.down(F.relu(self.gate(h)) * self.up(h))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Body(nn.Module):
    def __init__(self, layers, length):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)
        frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        angle = torch.outer(torch.arange(length).double(), frequency)
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())

    def forward(self, ids):
        x = self.embedding(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def median_seconds(run, runs):
    for _ in range(3):
        run()
    seconds = []
    for _ in range(runs):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=LAYERS, default="2b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--no-eager", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Body(LAYERS[arguments.preset], arguments.sequence_length)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        model = model.to(torch.bfloat16).eval()
        ids = torch.randint(0, VOCAB, (arguments.batch, arguments.sequence_length))
    tokens = arguments.batch * arguments.sequence_length
    row = {
        "bench": "forward",
        "framework": f"PyTorch {torch.__version__}",
        "gpu": torch.cuda.get_device_name(),
        "subject": f"preset {arguments.preset}, random weights and tokens",
        "sequences": arguments.batch,
        "length": arguments.sequence_length,
    }
    if not arguments.no_eager:
        row["eager_tokens_per_s"] = tokens / median_seconds(lambda: model(ids), arguments.runs)
    compiled = torch.compile(model)
    row["compiled_tokens_per_s"] = tokens / median_seconds(lambda: compiled(ids), arguments.runs)
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(row))


if __name__ == "__main__":
    main()
