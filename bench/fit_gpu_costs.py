#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the costs of twell/ops/ffn/dispatch.cc to a sweep: prints its constants, how well each execution
is predicted, and the same for each shape when it is left out of the fit.

    python3 bench/fit_gpu_costs.py bench/results/2026-11-23-h200-ffn-sweep.csv \
        bench/results/2026-11-23-h200-medium-batch.csv

With files of `twell bench ffn --sweep --jsonl` it says how well the engine estimated on that device,
and what auto made of it:

    python3 bench/fit_gpu_costs.py sweep.jsonl

Needs numpy and scipy. The sparse executions are linear in what is fitted, and all errors are
relative, so that short and long calls weigh the same. The features are those of the C++ functions of
the same names, on a device of 132 SMs."""

import csv
import json
import sys

import numpy
from scipy.optimize import minimize, nnls

SMS = 132
SMALL_AGAIN = 0.85  # of the first call of a small batch: the later ones read weights out of the L2
BATCH_FFN = 8448  # most neurons of a dense batch


def ceil(x):
    return float(numpy.ceil(x))


def read(path):
    with open(path) as file:
        lines = [line for line in file if not line.startswith("#")]
    rows = []
    for row in csv.DictReader(lines):
        numbers = ("width", "ffn", "tokens", "nnz_per_token", "union_share", "extra_tiles",
                   "dense_us", "sparse_us")
        rows.append({**row, **{name: float(row[name]) for name in numbers}})
    return rows


def independent_union(row, tokens):
    density = min(row["nnz_per_token"] / row["ffn"], 1.0)
    return row["ffn"] * (1.0 - (1.0 - density) ** tokens)


def few_cost(row):
    m, d, f = row["tokens"], row["width"], row["ffn"]
    workers, neurons, group = (SMS, 48, 16) if m <= 8 else (SMS // 4, 192, 64)
    calls = ceil(m / 64)
    m = ceil(m / calls)
    passes = ceil(f / (workers * neurons))
    taken = ceil(ceil(f / (workers * passes)) / group) * group
    active = independent_union(row, m)
    features = {"launches": 1.0, "first_bytes": 2 * d * passes * taken * workers,
                "active_bytes": 4 * d * active, "active": active, "pass": passes,
                "pass_width": passes * d}
    return {name: value * (1 + SMALL_AGAIN * (calls - 1)) for name, value in features.items()}


def dense_batch_cost(row):
    m, d, f = row["tokens"], row["width"], row["ffn"]
    return {"launches": 1.0, "bytes": 6 * d * f, "token_bytes": 6 * d * f * m}


def tile_union_cost(row):
    m, d, f = row["tokens"], row["width"], row["ffn"]
    density = min(row["nnz_per_token"] / f, 1.0)
    union = row["union_share"] * f if row["union_share"] >= 0 else independent_union(row, 128)
    token_tiles = ceil(m / 128)
    tiles = ceil(token_tiles * (1 + row["extra_tiles"]))
    padded = min(union + 32, f)
    blocks = ceil(padded / 64)
    chunks = max(ceil(blocks / 3), min(blocks, 128 // token_tiles))
    up_rounds = max(tiles * chunks / SMS, 1.0)
    rounds = 0.5 * ceil(2 * ceil(m / 256) * ceil(f / 256) / (SMS // 2))
    gate = rounds * 256 * 256 * d
    return {"launches": 1.0, "heavy_rows": float(round(row["extra_tiles"] * token_tiles) > 0),
            "gate": gate, "gate spill": gate * density,
            "up_steps": up_rounds * d, "up": up_rounds * 2 * 128 * padded / chunks * d,
            "down": (ceil(tiles * ceil(d / 256) / SMS) + 0.5) * 2 * 128 * 256 * padded,
            "spilled_value": m * f * density, "tile": tiles, "word": m * f}


MEDIUM_ACTIVATIONS = 12e6  # most tokens times F of a medium batch
# With fewer neurons of a CTA, the gate and up wait for x.
GATE_NEURONS, UP_NEURONS = 96, 32


# Computes what MediumBatchSchedule computes. Returns tiles, neurons of a segment, rounds, CTAs and
# clusters of up, and columns and CTAs of down.
def medium_schedule(tokens, width, ffn):
    tiles = max(ceil(tokens / 128), 1.0)
    least = None
    for of in (48, 64, 80, 96, 128, 160, 176, 192):
        segments = ceil(ffn / of)
        turns = ceil(tiles * segments / SMS)
        if segments <= 384 and (least is None or turns * (of + 64) < least):
            least, neurons, rounds = turns * (of + 64), of, turns
    up_split = 4 if tiles <= 3 else 2 if tiles <= 12 else 1
    clusters = SMS // 4 - 3 if up_split == 4 else SMS // up_split
    columns = 64 if tiles * ceil(width / 64) <= SMS else 128
    down_split = 2 if 2 * tiles * ceil(width / columns) <= SMS else 1
    return tiles, neurons, rounds, up_split, max(clusters // tiles, 1.0), columns, down_split


def medium_cost(row):
    m, d, f = row["tokens"], row["width"], row["ffn"]
    tiles, neurons, rounds, up_split, clusters, columns, down_split = medium_schedule(m, d, f)
    union = row["union_share"] * f if row["union_share"] >= 0 else independent_union(row, 128)
    chunk = min(max(ceil(ceil(union / clusters) / 16) * 16, 16.0), 192.0)
    up_turns = max(ceil(union / (chunk * clusters)), 1.0) * max(tiles * up_split / SMS, 1.0)
    down_turns = ceil(tiles * ceil(d / columns) * down_split / SMS)
    return {"gate_round": rounds, "gate_weight": rounds * max(neurons, GATE_NEURONS) * d,
            "first_bytes": 2 * d * f, "up_round": up_turns,
            "up_work": up_turns * d / up_split * max(chunk, UP_NEURONS),
            "row_bytes": 2 * tiles * union * d, "down_round": down_turns,
            "down_neuron": down_turns * union / down_split,
            "down_work": down_turns * union / down_split * (128 + columns), "image": m * union,
            "tile": tiles}


def dense_cost(row, parameters):
    flops_per_us, bytes_per_us, elementwise, launches, exponent, throttle = parameters
    m, d, f = row["tokens"], row["width"], row["ffn"]
    flops = 2 * ceil(m / 64) * 64 * d * f / (flops_per_us * 1e6)
    mean = (flops ** exponent + (2 * d * f / (bytes_per_us * 1e6)) ** exponent) ** (1 / exponent)
    gemm = mean * (1 + throttle * min(max(numpy.log(flops / 500), 0), 2))
    return 3 * gemm + 6 * m * f / (elementwise * 1e6) + launches


def fit(rows, features, time="sparse_us"):
    names = list(features(rows[0]))
    matrix = numpy.array([[features(row)[name] / row[time] for name in names] for row in rows])
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1
    weights, _ = nnls(matrix / scale, numpy.ones(len(rows)), maxiter=10000)
    return dict(zip(names, weights / scale))


def errors(rows, features, weights, time="sparse_us"):
    return numpy.array([
        numpy.log(sum(weights[name] * value for name, value in features(row).items()) / row[time])
        for row in rows])


def show(title, logs):
    within = numpy.mean(numpy.abs(logs) < numpy.log(1.1))
    print(f"{title}: {len(logs)} cases, {100 * within:.0f}% within 10%; 5th to 95th percentile "
          f"{numpy.exp(numpy.percentile(logs, 5)):.2f} to {numpy.exp(numpy.percentile(logs, 95)):.2f}")


def check(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    print(f"{path}: {rows[0]['gpu']}")
    for execution in ["dense", *sorted({row["sparse"] for row in rows})]:
        name = "dense" if execution == "dense" else "sparse"
        show(execution, numpy.array([numpy.log(row[f"{name}_estimate_us"] / row[f"{name}_us"])
                                     for row in rows if execution in ("dense", row["sparse"])]))
    against_dense = numpy.array([row["dense_us"] / row["auto_us"] for row in rows])
    over_best = numpy.array([row["auto_us"] / min(row["dense_us"], row["sparse_us"])
                             for row in rows])
    print(f"auto: {len(rows)} cases, {against_dense.min():.2f} of dense at worst, "
          f"{(against_dense < 0.97).sum()} below 0.97; {(over_best > 1.07).sum()} over 7% off the best")


def main():
    sweeps = [path for path in sys.argv[1:] if path.endswith(".jsonl")]
    for path in sweeps:
        check(path)
    if sweeps:
        return
    rows = [row for path in sys.argv[1:] for row in read(path)]
    if not rows:
        sys.exit(__doc__)
    start = [800, 4, 7, 13, 3, 0.05]
    medium = [row for row in rows
              if row["sparse"] == "medium-batch"
              and row["tokens"] * row["ffn"] <= MEDIUM_ACTIVATIONS]
    rows = [row for row in rows if row["sparse"] != "medium-batch"]

    batch = [row for row in rows
             if 9 <= row["tokens"] <= 64 and row["ffn"] <= BATCH_FFN and row["width"] > 512]
    gemms = [row for row in rows if not (9 <= row["tokens"] <= 64 and row["ffn"] <= BATCH_FFN)]

    def dense_logs(parameters):
        return numpy.array([numpy.log(dense_cost(row, parameters) / row["dense_us"])
                            for row in gemms[::3]])

    found = minimize(lambda p: numpy.mean(numpy.abs(dense_logs(p))), start, method="Nelder-Mead",
                     options={"maxiter": 600}).x
    show("dense", dense_logs(found))
    names = ("flops 1e6/us", "bytes 1e6/us", "elementwise 1e6/us", "launches us", "mean", "throttle")
    print("   " + ", ".join(f"{name} {value:.4g}" for name, value in zip(names, found)))
    weights = fit(batch, dense_batch_cost, "dense_us")
    show("dense batch", errors(batch, dense_batch_cost, weights, "dense_us"))
    print("   us per unit: " + ", ".join(f"{n} {w:.4g}" for n, w in weights.items()))
    for execution, features in (("decode-rows", few_cost), ("small-batch", few_cost),
                                ("tile-union", tile_union_cost), ("medium-batch", medium_cost)):
        chosen = [row for row in rows + medium if row["sparse"] == execution]
        if not chosen:
            continue
        weights = fit(chosen, features)
        show(execution, errors(chosen, features, weights))
        print("   us per unit: " + ", ".join(f"{n} {w:.4g}" for n, w in weights.items()))
        for shape in sorted({(row["width"], row["ffn"]) for row in chosen}):
            rest = [row for row in chosen if (row["width"], row["ffn"]) != shape]
            left_out = [row for row in chosen if (row["width"], row["ffn"]) == shape]
            show(f"   without D {shape[0]:.0f}, F {shape[1]:.0f}",
                 errors(left_out, features, fit(rest, features)))


if __name__ == "__main__":
    main()
