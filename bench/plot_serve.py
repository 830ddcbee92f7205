#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/serve_throughput.py beside what the kernels alone predict: prints a table, and draws
throughput and latencies as SVG. Needs only Python's standard library.

  plot_serve.py ROWS.jsonl OUT.svg

ROWS.jsonl has rows of `serve_throughput.py --concurrency --label dense` and `--label auto`, and of
`twell bench decode` and `twell bench forward` on the same model, prompts and lengths. A load of N
requests with P prompt and n new tokens takes N P / F + (n - 1) S for N n tokens, where S is the time
of a decode step of N sequences, and F the tokens per second of a forward pass over as many prompts,
or the next fewer that were measured."""
import json
import sys

from panels import COLOURS, Panel, write

MODES = {"dense": ("dense", COLOURS[0]), "auto": ("sparse", COLOURS[1])}  # label: (key, colour)
LATENCIES = (("first_token_ms", "Time to the first token, ms"),
             ("between_tokens_ms", "Time between tokens, ms"))


def predicted(row, decode, forward):
    """Tokens per second of a row of the server, or None where a benchmark is missing."""
    load, mode = row["load"], MODES[row["label"]][0]
    passes = [sequences for sequences in forward if sequences <= load]
    if load not in decode or not passes:
        return None
    step = load / decode[load][f"{mode}_tokens_per_s"]
    rate = forward[max(passes)][mode]["body"]["tokens_per_s"]
    seconds = load * row["prompt"] / rate + (row["new_tokens"] - 1) * step
    return load * row["new_tokens"] / seconds


def table(rows):
    print(f"{'requests':>8} {'':>6} {'tokens/s':>9} {'predicted':>10} {'of it':>6} "
          f"{'first token ms':>16} {'between tokens ms':>18}\n{'':>43} "
          f"{'p50':>8} {'p95':>7} {'p50':>10} {'p95':>7}")
    for row in rows:
        expected = f"{row['predicted']:10.0f} {row['tokens_per_s'] / row['predicted']:6.2f}" \
            if row["predicted"] else f"{'-':>10} {'-':>6}"
        print(f"{row['load']:8} {row['label']:>6} {row['tokens_per_s']:9.0f} {expected} "
              f"{row['first_token_ms_p50']:8.1f} {row['first_token_ms_p95']:7.1f} "
              f"{row['between_tokens_ms_p50']:10.2f} {row['between_tokens_ms_p95']:7.2f}")


def plot(rows, target):
    loads = [row["load"] for row in rows]
    xs = (min(loads), max(max(loads), 2 * min(loads)))

    def panel(index, title, values):
        return Panel(index, title, "requests at a time", xs, (0.8 * min(values), 1.6 * max(values)),
                     log=True, log_x=True)

    measured = [1e-3 * row["tokens_per_s"] for row in rows]
    expected = [1e-3 * row["predicted"] for row in rows if row["predicted"]]
    panels = [panel(0, "Thousand tokens per second (dots: predicted)", measured + expected)]
    panels += [panel(1 + i, f"{title} (p50, p95 dashed)",
                     [row[f"{name}_{p}"] for row in rows for p in ("p50", "p95")])
               for i, (name, title) in enumerate(LATENCIES)]
    for line, (label, (_, colour)) in enumerate(MODES.items()):
        of_mode = [row for row in rows if row["label"] == label]
        for panel in panels:
            panel.label(line, label, colour, right=160)
        panels[0].line([(row["load"], 1e-3 * row["tokens_per_s"]) for row in of_mode], colour)
        panels[0].dots([(row["load"], 1e-3 * row["predicted"]) for row in of_mode
                        if row["predicted"]], colour)
        for panel, (name, _) in zip(panels[1:], LATENCIES):
            panel.line([(row["load"], row[f"{name}_p50"]) for row in of_mode], colour)
            panel.line([(row["load"], row[f"{name}_p95"]) for row in of_mode], colour, "dashed")
    write(panels, target)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    all_rows = [json.loads(line) for line in open(sys.argv[1])]
    decode = {row["batch"]: row for row in all_rows if row["bench"] == "decode"}
    forward = {row["sequences"]: row for row in all_rows
               if row["bench"] == "forward" and "body" in row["dense"]}  # not those of a CPU
    rows = sorted((row for row in all_rows if row["bench"] == "serve" and row["label"] in MODES),
                  key=lambda row: (row["load"], row["label"] == "auto"))
    for row in rows:
        row["predicted"] = predicted(row, decode, forward)
    table(rows)
    plot(rows, sys.argv[2])


if __name__ == "__main__":
    main()
