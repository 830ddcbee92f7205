# SPDX-License-Identifier: Apache-2.0
"""Diagrams beside each other in an SVG file, with Python's standard library alone."""
import math
import pathlib

COLOURS = ["#8c95a6", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00"]
WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 300, 48, 44, 66  # of a panel, its margins, between panels


class Panel:
    """The axes of the index-th diagram from the left, and what is drawn between them. Values of a
    logarithmic axis (log: upwards; log_x) are positive."""

    def __init__(self, index: int, title: str, unit: str, xs, ys, log: bool = False,
                 log_x: bool = False):
        self.x0, self.y0 = LEFT + index * (WIDTH + GAP), TOP
        self.xs, self.ys, self.log, self.log_x = xs, ys, log, log_x
        self.out = [f'<text x="{self.x0}" y="{TOP - 14}" class="title">{title}</text>']
        for value in ticks(*xs, log_x, 2):
            x, bottom = self.at(value, ys[0])
            self.out.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="x">{value:g}</text>')
        for value in ticks(*ys, log):
            x, y = self.at(xs[0], value)
            self.out.append(f'<path d="M{x:.1f} {y:.1f}h{WIDTH}" class="grid"/>'
                            f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" class="y">{value:g}</text>')
        self.out.append(f'<text x="{self.x0 + WIDTH}" y="{TOP + HEIGHT + 32}" class="y">'
                        f"{unit}</text>")

    def at(self, x: float, y: float):
        return (self.x0 + WIDTH * share(x, *self.xs, self.log_x),
                self.y0 + HEIGHT * (1 - min(max(share(y, *self.ys, self.log), 0), 1)))

    def line(self, points, colour: str, style: str = "") -> None:
        """What lies above the axes is left out."""
        shown = (self.at(x, y) for x, y in points if y < self.ys[1])
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        self.out.append(f'<polyline points="{path}" stroke="{colour}" class="{style}"/>')

    def dots(self, points, colour: str) -> None:
        for x, y in (self.at(*p) for p in points):
            self.out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')

    def label(self, line: int, text: str, colour: str, style: str = "",
              right: int = WIDTH) -> None:
        """A line of the legend at the top, which ends `right` pixels from the panel's left side."""
        x, y = self.x0 + right - 36, TOP + 18 + 16 * line
        self.out.append(f'<rect x="{x - 120}" y="{y - 12}" width="155" height="16" fill="white"/>'
                        f'<text x="{x}" y="{y}" class="y">{text}</text>'
                        f'<polyline points="{x + 6},{y - 4} {x + 32},{y - 4}" stroke="{colour}" '
                        f'class="{style}"/>')


def share(value: float, low: float, high: float, log: bool) -> float:
    """How far a value is on the way from low to high."""
    if log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def ticks(low: float, high: float, log: bool, base: int = 10) -> list[float]:
    if log:
        powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
        for factors in ((1,), (1, 2, 5)):  # the latter where the former gives too few
            values = [f * float(base)**e for e in powers for f in factors
                      if 0.999 * low <= f * float(base)**e <= 1.001 * high]
            if len(values) > 2:
                break
        return values
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def write(panels: list[Panel], target: str) -> None:
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 16
    style = ("text{font:12px sans-serif;fill:#2e3440}.title{font-weight:bold}.x{text-anchor:middle}"
             ".y{text-anchor:end}.grid{stroke:#d8dee9}polyline{fill:none;stroke-width:1.6}"
             ".dashed{stroke-width:1.2;stroke-dasharray:4 4}")
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 46}">',
             f"<style>{style}</style>", '<rect width="100%" height="100%" fill="white"/>']
    lines += [element for panel in panels for element in panel.out] + ["</svg>"]
    pathlib.Path(target).write_text("\n".join(lines) + "\n")
