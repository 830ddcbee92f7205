#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares training runs with different L1 coefficients: condenses their metrics.jsonl into one CSV
file, and draws that file as SVG. Needs only Python's standard library.

  plot_recipe.py condense 0=runs/a 1e-4=runs/b 1e-4-dense=runs/c > recipe.csv
  plot_recipe.py plot recipe.csv recipe.svg

A run is named after its coefficient; the suffix `-dense` marks the run with dense execution only. A
row is the mean of WINDOW steps."""
import csv
import json
import math
import pathlib
import sys

WINDOW = 20  # divides the 100 steps between validations, so that a window ends at each
COLOURS = ["#8c95a6", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00"]
BLACK = "#111111"  # dense runs
WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 300, 48, 44, 66  # of a panel, its margins, between panels


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
            if writer is None:
                writer = csv.DictWriter(sys.stdout, row.keys(), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


class Panel:
    """Axes at (x, y), linear or logarithmic upwards, and what is drawn between them."""

    def __init__(self, index: int, title: str, xs, ys, log: bool = False):
        self.x0, self.y0 = LEFT + index * (WIDTH + GAP), TOP
        self.xs, self.ys, self.log = xs, ys, log
        self.out = [f'<text x="{self.x0}" y="{TOP - 14}" class="title">{title}</text>']
        for value in ticks(*xs, False):
            x, bottom = self.at(value, ys[0])
            self.out.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="x">{value:g}</text>')
        for value in ticks(*ys, log):
            x, y = self.at(xs[0], value)
            self.out.append(f'<path d="M{x:.1f} {y:.1f}h{WIDTH}" class="grid"/>'
                            f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" class="y">{value:g}</text>')
        self.out.append(f'<text x="{self.x0 + WIDTH}" y="{TOP + HEIGHT + 32}" class="y">'
                        "million tokens</text>")

    def at(self, x: float, y: float):
        low, high = self.ys
        if self.log:
            low, high, y = math.log(low), math.log(high), math.log(y)
        return (self.x0 + WIDTH * (x - self.xs[0]) / (self.xs[1] - self.xs[0]),
                self.y0 + HEIGHT * (1 - (min(max(y, low), high) - low) / (high - low)))

    def line(self, points, colour: str, style: str = "") -> None:
        """What lies above the axes is left out."""
        shown = (self.at(x, y) for x, y in points if y < self.ys[1])
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        self.out.append(f'<polyline points="{path}" stroke="{colour}" class="{style}"/>')

    def dots(self, points, colour: str) -> None:
        for x, y in (self.at(*p) for p in points):
            self.out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')

    def label(self, line: int, text: str, colour: str, style: str = "") -> None:
        x, y = self.x0 + WIDTH - 36, TOP + 18 + 16 * line
        self.out.append(f'<rect x="{x - 120}" y="{y - 12}" width="155" height="16" fill="white"/>'
                        f'<text x="{x}" y="{y}" class="y">{text}</text>'
                        f'<polyline points="{x + 6},{y - 4} {x + 32},{y - 4}" stroke="{colour}" '
                        f'class="{style}"/>')


def ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        return [10.0**e for e in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def plot(source: str, target: str) -> None:
    runs = {}
    for row in csv.DictReader(open(source)):
        runs.setdefault(row["run"], []).append(row)
    tokens = {name: [int(r["tokens"]) / 1e6 for r in rows] for name, rows in runs.items()}
    end = max(tokens[name][-1] for name in runs)
    held_out = [float(r["val_ce"]) for rows in runs.values() for r in rows if r["val_ce"]]
    lowest = min(float(r["ce"]) for rows in runs.values() for r in rows)
    loss = Panel(0, "Cross-entropy (line: training, dots: held out)", (0, end),
                 (math.floor(2 * lowest) / 2, math.ceil(max(held_out))))
    active = Panel(1, "Active neurons per token, mean of layers", (0, end), (4, 4000), log=True)
    panels = [loss, active]
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
        if name not in dense:  # their dots would hide those of the automatic run
            loss.dots([(x, float(r["val_ce"])) for x, r in zip(xs, rows) if r["val_ce"]], colour)
    for name in dense:
        auto = {r["step"]: float(r["ce"]) for r in runs[name.removesuffix("-dense")]}
        points = [(x, auto[r["step"]] - float(r["ce"]))
                  for x, r in zip(tokens[name], runs[name]) if r["step"] in auto]
        bound = 1.2 * max(abs(y) for _, y in points)
        panel = Panel(len(panels), f"Training loss, automatic less dense, L1 {name[:-6]}",
                      (0, end), (-bound, bound))
        panel.line(points, BLACK)
        panels.append(panel)
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 16
    style = ("text{font:12px sans-serif;fill:#2e3440}.title{font-weight:bold}.x{text-anchor:middle}"
             ".y{text-anchor:end}.grid{stroke:#d8dee9}polyline{fill:none;stroke-width:1.6}"
             ".dashed{stroke-width:1.2;stroke-dasharray:4 4}")
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 46}">',
             f"<style>{style}</style>", '<rect width="100%" height="100%" fill="white"/>']
    lines += [element for panel in panels for element in panel.out] + ["</svg>"]
    pathlib.Path(target).write_text("\n".join(lines) + "\n")


def main() -> None:
    if len(sys.argv) >= 3 and sys.argv[1] == "condense":
        condense(sys.argv[2:])
    elif len(sys.argv) == 4 and sys.argv[1] == "plot":
        plot(*sys.argv[2:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
