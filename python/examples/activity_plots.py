# SPDX-License-Identifier: Apache-2.0
"""Plots which neurons of a gated ReLU model fire on a text: how many per token and layer, how often
each neuron, and how many distinct ones a tile of tokens needs. # %% marks cells, which editors run
one by one as in a notebook. Needs matplotlib.

    python python/examples/activity_plots.py MODEL TEXT --out activity.png
"""

# %%
import argparse
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("model", help="a folder or a name on the Hub")
parser.add_argument("text", type=pathlib.Path, help="a text file")
parser.add_argument("--tokens", type=int, default=2048, help="of the text, at most")
parser.add_argument("--out", default="activity.png")
args = parser.parse_args()

# %% Which neurons fire on which token: the inputs of ReLU that are positive.
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
ids = tokenizer(args.text.read_text(), return_tensors="pt")["input_ids"][:, : args.tokens]
context = min(model.config.max_position_embeddings, ids.shape[1])
fired = {}


def keep(name):
    def hook(module, inputs, output):
        fired.setdefault(name, []).append((output > 0).flatten(0, 1))

    return hook


for name, module in model.named_modules():
    if name.endswith("mlp.gate_proj"):
        module.register_forward_hook(keep(name))
with torch.no_grad():
    for begin in range(0, ids.shape[1], context):
        model(ids[:, begin : begin + context])
layers = [torch.cat(parts) for parts in fired.values()]
if not layers:
    parser.error(f"{args.model} has no layer whose name ends with mlp.gate_proj")

# %% Three views of the same.
figure, (per_token, per_neuron, per_tile) = plt.subplots(1, 3, figsize=(15, 4))
per_token.boxplot([layer.sum(1).numpy() for layer in layers], showfliers=False)
per_token.set(xlabel="layer", ylabel="active neurons per token", title="Activity")
for i, layer in enumerate(layers):
    often = layer.float().mean(0).sort(descending=True).values
    per_neuron.plot(often.clamp_min(1e-5), label=f"layer {i}")
per_neuron.set(xlabel="neuron, by rank", ylabel="share of tokens it fires on", yscale="log",
               title="Often and seldom")
per_neuron.legend(fontsize=6)
sizes = [1, 2, 4, 8, 16, 32, 64, 128]
for i, layer in enumerate(layers):
    shares = [
        layer[: len(layer) // size * size].view(-1, size, layer.shape[1]).any(1).float().mean()
        for size in sizes if len(layer) >= size
    ]
    per_tile.plot(sizes[: len(shares)], shares, marker=".", label=f"layer {i}")
per_tile.set(xscale="log", xlabel="tokens of a tile", ylabel="share of neurons in their union",
             title="What a tile of tokens reads")
figure.tight_layout()
figure.savefig(args.out, dpi=120)
print(f"{args.out}: {len(layers)} layers, {len(layers[0])} tokens")
