#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what compare.py printed: time and error of layers over their active neurons.

    python bench/peer/plot.py RESULTS.txt OUT.svg

Captured patterns only: lines that begin with the name of a pattern file. Needs only Python's
standard library."""
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from panels import COLOURS, Panel, write  # noqa: E402

VARIANTS = {"dense": (COLOURS[0], ""), "published": (COLOURS[3], ""),
            "published, 128": (COLOURS[5], "dashed"), "this engine": (COLOURS[1], "")}
ROW = re.compile(r"l1_\S+ layer\d+ +([\d.]+) active \(most +\d+\)  (.+?) +([\d.]+) +[\d.]+x +(\S+) +"
                 r"\S+$")


def read(path):
    """{section: {variant: [(active, ms, error)]}}, by the heading above the rows."""
    rows, section = {}, None
    for line in pathlib.Path(path).read_text().splitlines():
        if "of one layer," in line:
            section = "training" if line.startswith("Forward and backward") else "inference"
        found = ROW.match(line)
        if found and found[2] in VARIANTS:
            active, ms, error = (float(found[i]) for i in (1, 3, 4))
            rows.setdefault(section, {}).setdefault(found[2], []).append((active, ms, error))
    return rows


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rows = read(sys.argv[1])
    unit, xs = "active neurons of a token, mean", (2, 160)
    panels = [Panel(0, "Inference, ms (16,384 tokens)", unit, xs, (0, 6), log_x=True),
              Panel(1, "Forward and backward, ms", unit, xs, (0, 8), log_x=True),
              Panel(2, "Error of an inference against float32, relative", unit, xs, (1e-3, 1), log=True,
                    log_x=True)]
    for number, (name, (colour, style)) in enumerate(VARIANTS.items()):
        for panel, section, value in zip(panels, ("inference", "training", "inference"), (1, 1, 2)):
            points = sorted((row[0], row[value]) for row in rows[section].get(name, []))
            if not points:
                continue
            panel.label(number, name, colour, style, right=170)
            panel.line(points, colour, style)
            panel.dots(points, colour)
    write(panels, sys.argv[2])


if __name__ == "__main__":
    main()
