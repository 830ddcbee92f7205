#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""Fits the costs of twell/ops/ffn/costs.cc to sweeps: prints its constants, how well each execution
is predicted, the same for each shape when it is left out of the fit, what auto would choose, and which
constants of the source differ.

    cd bench/results && sweeps=2026-11-23-sweeps.csv && python3 ../fit_gpu_costs.py \
        $sweeps:h200_fitted $sweeps:h200_before 2026-11-23-h200-medium-batch.csv \
        2026-11-27-h200-row-stream.csv \
        2026-11-22-h100-ffn-sweep-quick.jsonl -- $sweeps:h200_rules $sweeps:h100

FILE:SWEEP is one sweep of a file with columns SWEEP.NAME.

The first file is what the costs must predict. Of the others, these are fitted too: medium batches;
tile-union with 129 to 1,024 tokens on an H200, where the first file has medium batches; and up to 64
tokens on an H100, which tells waiting for memory from waiting for latencies. Files behind -- are
predicted, and not fitted.

few_row_bytes, of medium batches of up to 64 tokens, follows from the times of
2026-11-27-h200-few-tokens.csv, which are not fitted here.

Tiles wait for the largest union (largest_union, share of F). Where it is not known, the costs take the
mean, or twice the mean beside tiles of heavy rows; captured patterns without it are not fitted.

With a file of `twell bench ffn --sweep --jsonl` in front it says how well the engine estimated on that
device, and what auto made of it:

    python3 bench/fit_gpu_costs.py sweep.jsonl

The GPU is not always equally fast: behind long products it runs at lower clocks for a while, and in
long ones it is at its power limit, which depends on the data. Dense does not depend on the pattern,
so its time over the median of all patterns is the state of the GPU in a case. Sparse times are
divided by it, and up to 128 tokens cases that are over 4% off are left out of the fit. There captured
patterns make the median, because the GPU rests while they are prepared.

Needs numpy and scipy. All errors are relative, so that short and long calls weigh the same."""

import csv
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy.optimize import least_squares

SMS = 132
H200, H100 = 4.917, 3.352  # bytes of device memory per picosecond, by clock and width
CLUSTERS = SMS // 4 - 2
L2 = 50.0  # MB
SPARSE_SHARE = 0.93  # sparse runs if its cost is below this share of dense,
MEDIUM_SHARE, UNION_SHARE = 0.935, 0.95  # or of these where unions are counted,
UNSPLIT_SHARE = 0.90  # or of this one where a medium batch counted one over UNEVEN times the mean
BATCH_FFN = 8448  # most neurons of a dense batch
UNEVEN = 1.25
STREAM_WIDTH = 4096  # most columns of row-stream
STEADY = 0.04  # repeated times of the same kernels differ by less, as logarithms
MEDIUM_ACTIVATIONS = 12e6  # most tokens times F of a medium batch


# --- Reading ---------------------------------------------------------------------------------------


def launch_of(row):
    if row["sparse"] != "tile-union":
        return row["sparse"]
    medium = 64 < row["tokens"] <= 2048 and row["tokens"] * row["ffn"] <= MEDIUM_ACTIVATIONS
    return "medium-batch" if medium else "tile-union"


# The active neurons of n tokens together grow like n to this power, by -log(1 - share of F).
def growth(row):
    one, union = row["nnz_per_token"] / row["ffn"], row["union_share"]
    tokens = 128 / (1 + row["extra_tiles"])
    if not 0 < one < union < 1 or tokens < 2:
        return 1.0
    return min(max(math.log(math.log1p(-union) / math.log1p(-one)) / math.log(tokens), 0.0), 1.0)


def read(path):
    path, _, sweep = path.partition(":")
    with open(path) as file:
        if path.endswith(".jsonl"):
            rows = [json.loads(line) for line in file]
        elif sweep:
            lines = file.read().splitlines()
            gpu = next(line for line in lines if line.startswith(f"# {sweep} "))
            cases = csv.DictReader(line for line in lines if not line.startswith("#"))
            rows = [{name.removeprefix(sweep + "."): value for name, value in case.items()
                     if "." not in name or name.startswith(sweep + ".")} | {"gpu": gpu}
                    for case in cases if case[f"{sweep}.dense_us"]]
        else:
            gpu = file.readline()  # a comment that names the GPU
            rows = [{**row, "gpu": gpu} for row in csv.DictReader(file)]
    words = ("pattern", "sparse", "auto", "gpu", "date", "cpu", "bench", "twell")
    rows = [{k: v if k in words else float(v) for k, v in row.items()} for row in rows]
    dense, grown = {}, {}
    for row in rows:
        # Sweeps from before the registry call all dense executions dense, and medium batches tile-union.
        if row.get("auto", "").startswith("dense"):
            row["auto"] = "dense"
        row["bandwidth"] = H100 if "H100" in row.get("gpu", "") else H200
        row["shape"] = (row["width"], row["ffn"])
        row["case"] = (*row["shape"], row["tokens"])
        if "random" not in row["pattern"] or row["tokens"] > 128:
            dense.setdefault(row["case"], []).append(row["dense_us"])
        if row["union_share"] >= 0 and row["tokens"] >= 256:
            grown.setdefault((*row["shape"], row["pattern"]), growth(row))
    for row in rows:
        row["state"] = row["dense_us"] / np.median(dense.get(row["case"], [row["dense_us"]]))
        row.setdefault("largest_union", -1.0)  # in sweeps from before it was counted
        row["growth"] = grown.get((*row["shape"], row["pattern"]), 1.0)
        row["launch"] = launch_of(row)
        row["steady"] = row["tokens"] > 128 or abs(math.log(row["state"])) < STEADY
    return rows


def columns(rows):
    def column(name):
        return np.array([row[name] for row in rows], float)

    c = SimpleNamespace(m=column("tokens"), d=column("width"), f=column("ffn"),
                        nnz=column("nnz_per_token"), extra=column("extra_tiles"),
                        growth=column("growth"), bandwidth=column("bandwidth"))
    c.density = np.minimum(c.nnz / c.f, 1.0)
    share = column("union_share")
    c.union = np.where(share >= 0, share * c.f, union_of(c, np.minimum(c.m, 128)))
    several = c.m > 128
    largest = np.where(several, column("largest_union") * c.f, -1)
    unknown = several & (share >= 0) & (largest < 0)
    largest = np.where(unknown & (c.extra > 0), np.minimum(2 * c.union, c.f), largest)
    c.largest = np.maximum(largest, c.union)
    return c


# --- Costs in us: those of the C++ functions of the same names ---------------------------------------


def ceil(x):
    return np.ceil(x)


def union_of(c, tokens):
    return c.f * (1 - (1 - c.density) ** (tokens ** c.growth))


def move(c, megabytes, share):
    return megabytes / (share * c.bandwidth)


def dense_cost(p, c):
    flops = 2 * ceil(c.m / 64) * 64 * c.d * c.f / (p["flops"] * 1e6)
    read_us = move(c, 2e-6 * c.d * c.f, p["bytes"])
    gemm = (flops ** p["mean"] + read_us ** p["mean"]) ** (1 / p["mean"])
    gemm *= 1 + p["throttle"] * np.clip(np.log(flops / 500), 0, 2)
    return 3 * gemm + move(c, 6e-6 * c.m * c.f, p["elementwise"]) + p["launches"]


def dense_rows_cost(p, c):
    return p["launches"] + move(c, 6e-6 * c.d * c.f, p["bytes"])


def dense_batch_cost(p, c):
    return p["launches"] + p["token"] * c.m + move(c, 6e-6 * c.d * c.f, p["bytes"])


def decode_rows_cost(p, c):
    passes = ceil(c.f / (SMS * 48))
    neurons = np.maximum(ceil(c.f / (SMS * passes)), 16)
    groups = ceil(neurons / 16) * ceil(c.d / 2048)
    active = union_of(c, c.m)
    return (p["launches"] + passes * (p["pass"] + p["group"] * groups) + p["active"] * active / SMS
            + move(c, 2e-6 * c.d * c.f, p["first_bytes"])
            + move(c, 4e-6 * c.d * active, p["active_bytes"]))


def row_stream_cost(p, c):
    return (p["launches"] + p["token"] * c.m
            + move(c, 2e-6 * c.d * c.f + 4e-6 * c.d * union_of(c, c.m), p["bytes"]))


def small_batch_cost(p, c):
    calls = ceil(c.m / 64)
    passes = ceil(c.f / (CLUSTERS * 192))
    neurons = ceil(ceil(c.f / (CLUSTERS * passes)) / 64) * 64
    chunks = ceil(c.d / 256)
    active = union_of(c, ceil(c.m / calls))
    down = ceil(ceil(c.d / 64) / (2 * CLUSTERS)) * active / 256
    one = (p["launches"] + passes * (p["round"] + chunks * (p["chunk"] + p["x"] * (c.d > 2048)))
           + p["down_step"] * down
           + move(c, 128e-6 * SMS * passes * chunks * neurons, p["first_bytes"])
           + move(c, 4e-6 * c.d * active, p["active_bytes"]))
    return calls * one


# Computes what MediumBatchSchedule computes.
def medium_schedule(tokens, width, ffn):
    tiles = max(math.ceil(tokens / 128), 1)
    least = None
    for of in (48, 64, 80, 96, 128, 160, 176, 192):
        segments = math.ceil(ffn / of)
        turns = math.ceil(tiles * segments / SMS)
        if segments <= 384 and (least is None or turns * (of + 64) < least):
            least, neurons, rounds = turns * (of + 64), of, turns
    split = 4 if tiles <= 3 else 2 if tiles <= 12 else 1
    clusters = SMS // 4 - 3 if split == 4 else SMS // split
    cols = 64 if tiles * math.ceil(width / 64) <= SMS else 128
    parts = 2 if 2 * tiles * math.ceil(width / cols) <= SMS else 1
    return tiles, neurons, rounds, split, max(clusters // tiles, 1), cols, parts


def medium_batch_cost(p, c):
    if not hasattr(c, "schedule"):
        c.schedule = np.array([medium_schedule(*case) for case in zip(c.m, c.d, c.f)], float).T
    tiles, neurons, rounds, split, clusters, cols, parts = c.schedule
    gate = rounds * (p["gate_round"] + p["gate_weight"] * c.d * np.maximum(neurons, 96))
    chunk = np.clip(ceil(ceil(c.largest / clusters) / 16) * 16, 16, 192)
    turns = np.maximum(ceil(c.largest / (chunk * clusters)), 1) * np.maximum(tiles * split / SMS, 1)
    up = turns * (p["up_round"] + c.d / split * p["up_work"] * np.maximum(chunk, 32))
    rounds = ceil(tiles * ceil(c.d / cols) * parts / SMS)
    union = np.where(rounds > 1, c.union, c.largest)
    down = rounds * (p["down_round"] + union / parts
                     * (p["down_neuron"] + p["down_work"] * (128 + cols)))
    return (gate + up + down + p["image"] * c.m * c.union + p["tile"] * tiles
            + move(c, 2e-6 * c.d * c.f, p["first_bytes"])
            + move(c, 2e-6 * c.d * tiles * c.union,
                   np.where(c.m <= 64, p["few_row_bytes"], p["row_bytes"])))


def tile_union_cost(p, c):
    plain = ceil(c.m / 128)
    blocks = np.minimum(c.union + 32, c.f) / 64
    most = np.minimum(c.largest + 32, c.f) / 64
    tiles = np.maximum(np.round(c.m / 128 * (1 + c.extra)), plain)
    items = np.maximum(ceil(ceil(blocks) / 3), np.minimum(ceil(blocks), np.floor(128 / plain)))
    steps = ceil(c.d / 64)
    gate = 0.5 * ceil(2 * ceil(c.m / 256) * ceil(c.f / 256) / (SMS // 2)) * p["gate_step"] * steps
    product = steps * p["up_block"] * blocks / items
    entries = 128 * np.minimum(c.nnz, c.f / 16) / items
    up = np.maximum(tiles * items / SMS, 1) * np.maximum(product, p["entry"] * entries)
    megabytes = 2e-6 * c.d * c.union
    missed = np.clip((megabytes - 2 * L2) / (2 * L2), 0, 1)
    up += move(c, tiles * megabytes * missed, p["missed_bytes"])
    rounds = tiles * ceil(c.d / 256) / SMS
    down = p["down_block"] * np.maximum(np.where(rounds > 1, ceil(rounds) + 0.5, 0) * blocks, most)
    heavy = p["heavy"] * np.log2(tiles) + p["heavy_block"] * (most - blocks) / np.maximum(rounds, 1)
    us = gate + up + down
    us *= 1 + p["throttle"] * np.maximum(np.log(us / 300), 0)
    return (us + p["launches"] + p["tile"] * tiles + np.where(tiles > plain, heavy, 0)
            + move(c, 2e-6 * c.d * c.f, p["first_bytes"]))


COSTS = {
    "dense": (dense_cost, {"flops": 800, "bytes": 0.85, "mean": 3, "throttle": 0.08,
                           "elementwise": 1.2, "launches": 13}),
    "dense-rows": (dense_rows_cost, {"launches": 8, "bytes": 0.8}),
    "dense-batch": (dense_batch_cost, {"launches": 4.5, "token": 0.04, "bytes": 0.77}),
    "decode-rows": (decode_rows_cost, {"launches": 2, "pass": 4, "group": 1.2, "active": 0.4,
                                       "first_bytes": 2, "active_bytes": 0.4}),
    "row-stream": (row_stream_cost, {"launches": 7, "token": 0.4, "bytes": 0.8}),
    "small-batch": (small_batch_cost, {"launches": 2, "round": 4, "chunk": 0.5, "x": 0.1,
                                       "down_step": 0.5, "first_bytes": 1, "active_bytes": 1}),
    "medium-batch": (medium_batch_cost, {
        "gate_round": 3, "gate_weight": 4e-5, "up_round": 5, "up_work": 7e-5, "down_round": 1.5,
        "down_neuron": 0.004, "down_work": 2.4e-5, "image": 3.4e-6, "tile": 0.4, "first_bytes": 2,
        "row_bytes": 1.5, "few_row_bytes": 0.63}),
    "tile-union": (tile_union_cost, {
        "launches": 20, "gate_step": 0.67, "up_block": 0.2, "entry": 0.01, "down_block": 1, "tile": 0.2,
        "throttle": 0.05, "heavy": 2, "heavy_block": 0.8, "missed_bytes": 2, "first_bytes": 2}),
}


# --- Fitting -----------------------------------------------------------------------------------------


def fit(cost, start, rows):
    c, us = columns(rows), np.array([row["us"] for row in rows])
    names, first = list(start), np.log(list(start.values()))

    def logs(x):
        return np.log(cost(dict(zip(names, np.exp(x))), c) / us)

    found = least_squares(logs, first, loss="soft_l1", f_scale=0.05, max_nfev=300,
                          bounds=(first - 6, first + 6))
    return dict(zip(names, np.exp(found.x)))


def errors(cost, p, rows):
    return np.log(cost(p, columns(rows)) / np.array([row["us"] for row in rows]))


def describe(logs):
    within = 100 * np.mean(np.abs(logs) < math.log(1.1))
    return (f"{within:3.0f}% within 10%, median {100 * (np.exp(np.median(np.abs(logs))) - 1):4.1f}%, "
            f"worst {np.exp(logs[np.argmax(np.abs(logs))]):.2f}")


# What each execution is fitted to: rows with their `us`.
def fitted_rows(rows, more):
    def sparse(launch, of):
        return [{**row, "us": row["sparse_us"] / row["state"]} for row in of
                if row["launch"] == launch and row["steady"]]

    of = {launch: sparse(launch, rows) for launch in COSTS if not launch.startswith("dense")}
    of["medium-batch"] += [{**row, "us": row["auto_us"] / row["state"]} for row in rows
                           if row["sparse"] == "small-batch" and row["auto"] == "tile-union"]
    few = [row for row in more if row["bandwidth"] != H200 and row["tokens"] <= 64]
    of["decode-rows"] += sparse("decode-rows", few)
    of["small-batch"] += sparse("small-batch", few)
    of["row-stream"] = sparse("row-stream", more)
    for row in more:
        medium = row["sparse"] == "medium-batch" and row["tokens"] * row["ffn"] <= MEDIUM_ACTIVATIONS
        union = row["sparse"] == "tile-union" and row["tokens"] <= 1024
        known = "random" in row["pattern"] or row["largest_union"] >= 0 or row["tokens"] <= 128
        if row["bandwidth"] == H200 and (medium or union) and known:
            of[row["sparse"]].append({**row, "us": row["sparse_us"] / row["state"]})
    # Dense once per shape and number of tokens: of cuBLASLt, and of the kernels for few tokens,
    # which auto runs in some cases.
    cases = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    for launch in ("dense", "dense-rows", "dense-batch"):
        of[launch] = []
    for case in cases.values():
        row, tokens = case[0], case[0]["tokens"]
        ran = [r["auto_us"] / r["state"] for r in case if r["auto"] == "dense"]
        batch = 9 <= tokens <= 64 and row["ffn"] <= BATCH_FFN
        kind = "dense-rows" if tokens <= 8 else "dense-batch" if batch else "dense"
        if kind == "dense":
            ran = [r["dense_us"] / r["state"] for r in case]
        if ran:
            of[kind].append({**row, "us": np.median(ran)})
    return of


def report(launch, rows):
    cost, start = COSTS[launch]
    p = fit(cost, start, rows)
    print(f"{launch}: {len(rows)} cases, {describe(errors(cost, p, rows))}")
    print("    " + ", ".join(f"{name} {value:.4g}" for name, value in p.items()))
    left_out = []
    for shape in sorted({row["shape"] for row in rows}):
        here = [row for row in rows if row["shape"] == shape]
        without = fit(cost, p, [row for row in rows if row["shape"] != shape])
        logs = errors(cost, without, here)
        left_out.append(logs)
        print(f"    D {shape[0]:.0f}, F {shape[1]:.0f}: {describe(errors(cost, p, here))};"
              f" left out: {describe(logs)}")
    print(f"    each shape left out: {describe(np.concatenate(left_out))}")
    return p


# --- What auto would choose --------------------------------------------------------------------------


# Launches that take the call, dense first, as in the registry.
def candidates(row):
    tokens = row["tokens"]
    dense = "dense"
    if tokens <= 8:
        dense = "dense-rows"
    elif tokens <= 64 and row["ffn"] <= BATCH_FFN:
        dense = "dense-batch"
    few = ["decode-rows", "row-stream"][:1 + (row["width"] <= STREAM_WIDTH)] if tokens <= 8 else ["small-batch"] if tokens <= 128 else []
    medium = 9 <= tokens <= 2048 and tokens * row["ffn"] <= MEDIUM_ACTIVATIONS
    return [dense, *few, *(["medium-batch"] if medium else []), "tile-union"]


# The time that auto took, by what ran.
def auto_launch(row):
    if row["auto"] != "tile-union" or row["sparse"] == "medium-batch":
        return row["auto"]
    if row["sparse"] == "small-batch":
        return "medium-batch"
    same = abs(math.log(row["auto_us"] / row["sparse_us"])) < STEADY
    return row["launch"] if same else "tile-union"


# The dense layer as the engine runs it takes dense_us, which is cuBLASLt's, but for up to 64 tokens.
# `ran` is what its kernels took there.
def choices(rows, p, ran):
    c = columns(rows)
    costs = {launch: COSTS[launch][0](p[launch], c) for launch in COSTS}
    against, over, skipped = [], [], 0
    for i, row in enumerate(rows):
        dense, *sparse = candidates(row)
        best = min(sparse, key=lambda launch: costs[launch][i])
        unsplit = row["extra_tiles"] == 0 and row["largest_union"] > UNEVEN * row["union_share"]
        share = SPARSE_SHARE
        if best == "medium-batch" and row["largest_union"] >= 0:
            share = MEDIUM_SHARE
        if best == "tile-union" and row["largest_union"] >= 0:
            share = UNSPLIT_SHARE if unsplit and row["tokens"] <= 2048 else UNION_SHARE
        choice = best if costs[best][i] < share * costs[dense][i] else dense
        times = {dense: row["dense_us"], row["launch"]: row["sparse_us"]}
        if row["case"] in ran:
            times[dense] = min(row["dense_us"], ran[row["case"]] * row["state"])
        if row["auto"] != "dense":
            times.setdefault(auto_launch(row), row["auto_us"])
        if choice not in times:
            skipped += 1
            continue
        against.append((times[dense] / times[choice], row, choice))
        over.append((times[choice] / min(times.values()), row, choice))
    slower = sum(ratio < 0.97 for ratio, *_ in against)
    off = sum(ratio > 1.07 for ratio, *_ in over)
    worst, row, choice = min(against, key=lambda case: case[0])
    print(f"auto by these costs: {len(against)} cases ({skipped} without the time of its choice), {slower}"
          f" below 0.97 of dense ({worst:.2f} at worst: D {row['width']:.0f}, F {row['ffn']:.0f},"
          f" {row['tokens']:.0f} tokens, {row['pattern']}, {choice}), {off} over 7% off the best"
          f" ({100 * off / len(over):.1f}%)")


# --- The source --------------------------------------------------------------------------------------

STRUCTS = {"dense": "dense", "dense-rows": "dense_rows", "dense-batch": "dense_batch",
           "decode-rows": "decode", "row-stream": "stream", "small-batch": "small", "medium-batch": "medium",
           "tile-union": "tile_union"}


def compare_with_source(p):
    source = (Path(__file__).resolve().parent.parent / "twell/ops/ffn/costs.cc").read_text()
    different = []
    for launch, struct in STRUCTS.items():
        body = re.search(r"struct \{([^{}]*)\} " + struct + ";", source)[1]
        has = dict(re.findall(r"(\w+) = ([-+.e\d]+)", re.sub("//.*", "", body)))
        different += [f"{launch} {name} {has.get(name)}, fitted {value:.4g}"
                      for name, value in p[launch].items()
                      if abs(float(has.get(name, "nan")) / value - 1) > 1e-3 or name not in has]
    print("costs.cc: " + ("; ".join(different) if different else "the same constants"))


# --- How well the engine estimated -------------------------------------------------------------------


def check(path):
    rows = read(path)
    print(f"{path}: {rows[0]['gpu']}")
    for execution in ["dense", *sorted({row["sparse"] for row in rows})]:
        name = "dense" if execution == "dense" else "sparse"
        logs = np.array([math.log(row[f"{name}_estimate_us"] / row[f"{name}_us"]) for row in rows
                         if execution in ("dense", row["sparse"])])
        print(f"{execution}: {len(logs)} cases, {describe(logs)}")
    against = np.array([row["dense_us"] / row["auto_us"] for row in rows])
    over = np.array([row["auto_us"] / min(row["dense_us"], row["sparse_us"]) for row in rows])
    print(f"auto: {len(rows)} cases, {against.min():.2f} of dense at worst, {(against < 0.97).sum()} below"
          f" 0.97; {(over > 1.07).sum()} over 7% off the best")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1].endswith(".jsonl"):
        for path in sys.argv[1:]:
            check(path)
        return
    paths = sys.argv[1:]
    at = paths.index("--") if "--" in paths else len(paths)
    rows = read(paths[0])
    more = [row for path in paths[1:at] for row in read(path)]
    of = fitted_rows(rows, more)
    p = {launch: report(launch, of[launch]) for launch in of}
    for path in [paths[0], *paths[at + 1:]]:
        rows = read(path)
        of = fitted_rows(rows, [])
        print(f"{path}:")
        for launch in filter(of.get, of):
            print(f"    {launch}: {describe(errors(COSTS[launch][0], p[launch], of[launch]))}")
        ran = {row["case"]: row["us"] for kind in ("dense-rows", "dense-batch") for row in of[kind]}
        choices(rows, p, ran)
    compare_with_source(p)


if __name__ == "__main__":
    main()
