#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares training runs with different L1 coefficients: condenses their metrics.jsonl into one CSV
file, and draws that file as SVG. Needs only Python's standard library.

  plot_recipe.py condense 0=runs/a 1e-4=runs/b 1e-4-dense=runs/c > recipe.csv
  plot_recipe.py plot recipe.csv recipe.svg

A run is named after its coefficient; the suffix `-dense` marks the run with dense execution only. A
row is the mean of WINDOW steps; its dead neurons are those of the last step."""
import csv
import json
import math
import pathlib
import sys

from panels import COLOURS, Panel, write

WINDOW = 20  # divides the 100 steps between validations, so that a window ends at each
BLACK = "#111111"  # dense runs
UNIT = "million tokens"


def condense(runs: list[str]) -> None:
    writer = None
    for run in runs:
        name, _, folder = run.partition("=")
        rows = [json.loads(line) for line in open(pathlib.Path(folder) / "metrics.jsonl")]
        steps = [row for row in rows if row["step"] > 0]
        for begin in range(0, len(steps), WINDOW):
            part = steps[begin:begin + WINDOW]
            layers = list(zip(*(row["layers"] for row in part)))
            row = {"run": name, "step": part[-1]["step"], "tokens": part[-1]["tokens"],
                   "ce": f"{mean(r['ce'] for r in part):.4f}",
                   "val_ce": next((f"{r['val_ce']:.4f}" for r in part if "val_ce" in r), ""),
                   "tokens_per_s": f"{mean(r['tokens_per_s'] for r in part):.0f}",
                   "hybrid_layers": sum(l["execution"] == "hybrid" for l in part[-1]["layers"]),
                   "nnz": f"{mean(r['nnz'] for r in part):.1f}"}
            for i, layer in enumerate(layers):
                row[f"nnz_{i}"] = f"{mean(l['nnz'] for l in layer):.1f}"
            for i, layer in enumerate(layers):
                row[f"dead_{i}"] = layer[-1]["dead"]
            row["dead_share"] = f"{mean(l[-1]['dead_share'] for l in layers):.4f}"
            if writer is None:
                writer = csv.DictWriter(sys.stdout, row.keys(), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def plot(source: str, target: str) -> None:
    runs = {}
    for row in csv.DictReader(open(source)):
        runs.setdefault(row["run"], []).append(row)
    tokens = {name: [int(r["tokens"]) / 1e6 for r in rows] for name, rows in runs.items()}
    end = max(tokens[name][-1] for name in runs)
    held_out = [float(r["val_ce"]) for rows in runs.values() for r in rows if r["val_ce"]]
    lowest = min(float(r["ce"]) for rows in runs.values() for r in rows)
    loss = Panel(0, "Cross-entropy (line: training, dots: held out)", UNIT, (0, end),
                 (math.floor(2 * lowest) / 2, math.ceil(max(held_out))))
    active = Panel(1, "Active neurons per token, mean of layers", UNIT, (0, end), (4, 4000),
                   log=True)
    panels = [loss, active]
    dead = None
    if all("dead_share" in row for rows in runs.values() for row in rows):
        dead = Panel(2, "Dead neurons, %, mean of layers", UNIT, (0, end), (0, 100))
        panels.append(dead)
    dense = [name for name in runs if name.endswith("-dense")]
    drawn = {}
    for i, name in enumerate([name for name in runs if name not in dense] + dense):
        drawn[name] = (BLACK, "dashed") if name in dense else (COLOURS[i % len(COLOURS)], "")
        for panel in panels:  # drawn first, so that it hides no line
            panel.label(i, f"L1 {name.replace('-dense', ', dense')}", *drawn[name])
    for name, (colour, style) in drawn.items():
        rows, xs = runs[name], tokens[name]
        loss.line([(x, float(r["ce"])) for x, r in zip(xs, rows)], colour, style)
        active.line([(x, float(r["nnz"])) for x, r in zip(xs, rows)], colour, style)
        if dead is not None:
            dead.line([(x, 100 * float(r["dead_share"])) for x, r in zip(xs, rows)], colour, style)
        if name not in dense:  # their dots would hide those of the automatic run
            loss.dots([(x, float(r["val_ce"])) for x, r in zip(xs, rows) if r["val_ce"]], colour)
    for name in dense:
        auto = {r["step"]: float(r["ce"]) for r in runs[name.removesuffix("-dense")]}
        points = [(x, auto[r["step"]] - float(r["ce"]))
                  for x, r in zip(tokens[name], runs[name]) if r["step"] in auto]
        bound = 1.2 * max(abs(y) for _, y in points)
        panel = Panel(len(panels), f"Training loss, automatic less dense, L1 {name[:-6]}", UNIT,
                      (0, end), (-bound, bound))
        panel.line(points, BLACK)
        panels.append(panel)
    write(panels, target)


def main() -> None:
    if len(sys.argv) >= 3 and sys.argv[1] == "condense":
        condense(sys.argv[2:])
    elif len(sys.argv) == 4 and sys.argv[1] == "plot":
        plot(*sys.argv[2:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
