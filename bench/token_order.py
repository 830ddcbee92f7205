#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far the order of tokens shrinks the unions that tile-union and hybrid compute: tokens whose
neurons are alike share a tile of 128. Prints, for each layer, the union of a tile in the order of the
text and its ratio in other orders:

  minhash      sorted by the smallest hash of a token's active neurons
  clusters L   sorted by clusters of the active neurons of layer L: 64 random tokens as pivots, three
               steps of k-means; within a cluster in the order of the text
  id           (with --checkpoint) sorted by token id
  embedding    (with --checkpoint) sorted by 64 clusters of the tokens' embeddings
  embedding N  (with --checkpoint) likewise, by N clusters
  projection   (with --checkpoint) sorted by the largest of 64 random projections of the first layer's
               input to the feed-forward block
  strongest L  (with --checkpoint) sorted by the neuron of layer L that fires most; L is 0 or 1

  bench/token_order.py --patterns FILE                         captured patterns (safetensors)
  bench/token_order.py --checkpoint DIR --text FILE            a model of transformers on a text

--tokens are ordered together; a smaller --window divides them. Needs numpy and scipy; --checkpoint
PyTorch and transformers too."""
import argparse
import json
import struct

import numpy as np
import scipy.sparse as sp

TILE, CLUSTERS, STEPS = 128, 64, 3


def read_patterns(path, tokens):
    """Layer -> [tokens, F] of zeros and ones; F is the largest index of all layers."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))

        def tensor(name):
            begin, end = header[name]["data_offsets"]
            file.seek(8 + length + begin)
            return np.frombuffer(file.read(end - begin), dtype=np.uint16).astype(np.int64)

        layers = sorted(int(n.split(".")[0][5:]) for n in header if n.endswith(".row_nnz"))
        columns = {layer: tensor(f"layer{layer}.col") for layer in layers}
        ffn = 1 + max(c.max() for c in columns.values())
        return {layer: matrix(tensor(f"layer{layer}.row_nnz")[:tokens], columns[layer], ffn)
                for layer in layers}


def matrix(row_nnz, columns, ffn):
    begin = np.concatenate([[0], np.cumsum(row_nnz)])
    return sp.csr_matrix((np.ones(begin[-1], np.float32), columns[:begin[-1]], begin),
                         shape=(len(row_nnz), ffn))


def run_model(checkpoint, text, tokens):
    """Patterns as above, keys of the tokens by name."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{checkpoint}/tokenizer.json")
    length = min(model.config.max_position_embeddings, 2048)
    with open(text, encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(8 * tokens).replace("\0", "\n"))["input_ids"]
    ids = np.array(ids[:min(len(ids), tokens) // length * length])
    patterns, keys = {}, {"id": ids}
    generator = torch.Generator().manual_seed(1)
    projections = torch.randn(model.config.hidden_size, 64, generator=generator).to(device)

    def keep(layer):
        def hook(_module, inputs, gate):
            def key(name, values):
                keys.setdefault(name, []).append(values.reshape(-1).cpu().numpy())
            if layer == 0:
                key("projection", (inputs[0].float() @ projections).argmax(-1))
            if layer < 2:
                key(f"strongest {layer}", gate.argmax(-1))
            fires = sp.csr_matrix((gate > 0).reshape(-1, gate.shape[-1]).cpu().numpy(),
                                  dtype=np.float32)
            patterns.setdefault(layer, []).append(fires)
        return hook

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate_proj.register_forward_hook(keep(layer))
    with torch.no_grad():
        for begin in range(0, len(ids), length):
            model.model(torch.tensor(ids[None, begin:begin + length], device=device))
    embedding = model.get_input_embeddings().weight.detach().float().cpu().numpy()
    for count in (CLUSTERS, 256):
        name = "embedding" if count == CLUSTERS else f"embedding {count}"
        keys[name] = clusters(embedding, 1, count)[ids]
    keys = {name: np.concatenate(parts) if isinstance(parts, list) else parts
            for name, parts in keys.items()}
    return {layer: sp.vstack(parts).tocsr() for layer, parts in patterns.items()}, keys


def union(pattern, order):
    """Mean over whole tiles."""
    sizes = [len(np.unique(pattern[order[i:i + TILE]].indices))
             for i in range(0, len(order) - TILE + 1, TILE)]
    return np.mean(sizes)


def clusters(rows, seed, number=CLUSTERS):
    """Spherical k-means of sparse or dense rows."""
    count = rows.shape[0]
    pivots = rows[np.random.default_rng(seed).choice(count, min(number, count), replace=False)]
    centres = np.asarray(pivots.todense() if sp.issparse(pivots) else pivots)
    for _ in range(STEPS + 1):
        centres = centres / (np.sqrt((centres ** 2).sum(1, keepdims=True)) + 1e-6)
        nearest = np.asarray(rows @ centres.T).argmax(1)
        members = sp.csr_matrix((np.ones(count, np.float32), (nearest, np.arange(count))),
                                shape=(len(centres), count))
        sums = members @ rows
        centres = np.asarray(sums.todense() if sp.issparse(sums) else sums)
    return nearest


def minhash(pattern, seed):
    hashes = np.random.default_rng(seed).permutation(pattern.shape[1])
    key = np.full(pattern.shape[0], pattern.shape[1])
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))
    np.minimum.at(key, rows, hashes[pattern.indices])
    return key


def sorted_within(key, window):
    return np.concatenate([begin + np.argsort(key[begin:begin + window], kind="stable")
                           for begin in range(0, len(key), window)])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--patterns")
    source.add_argument("--checkpoint")
    parser.add_argument("--text")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.checkpoint and not options.text:
        parser.error("--checkpoint goes with --text")
    keys = {}
    if options.patterns:
        patterns = read_patterns(options.patterns, options.tokens)
    else:
        patterns, keys = run_model(options.checkpoint, options.text, options.tokens)
    for layer, pattern in patterns.items():
        keys[f"clusters {layer}"] = clusters(pattern, options.seed)
    for layer, pattern in patterns.items():
        count = pattern.shape[0]
        text = union(pattern, np.arange(count))
        line = (f"layer {layer:2}: {count} tokens, {pattern.nnz / count:6.1f} active, "
                f"union {text:6.0f};")
        window = options.window or count
        orders = {"minhash": minhash(pattern, options.seed), **keys}
        for name, key in orders.items():
            if len(key) != count:
                continue  # captured on other tokens
            line += f" {name} {union(pattern, sorted_within(key, window)) / text:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
