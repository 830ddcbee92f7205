#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a kernel keeps values in local memory: registers that ptxas spilled, or arrays.

    scripts/check_spills.py build/release     all kernels that were built there
    scripts/check_spills.py --report FILE     the same from saved output of cuobjdump -res-usage

Reads the stack of each kernel from machine code with cuobjdump, of the CUDA toolkit or of .cache
(scripts/setup.sh --test); exit status 2 where there is none. ALLOWED names the kernels that may have one, how much, and why; an entry
that no kernel needs fails too.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# (kernel, most bytes): why that is right. A kernel is named as in its source.
_CTAS = "its launch bounds leave no more registers, so that several CTAs fit on an SM"
ALLOWED = {
    "attention_decode_group_kernel": (40, "at 255 registers; a group of heads shares each key it loads"),
    "expand_kernel": (16, _CTAS),
    "find_unions_kernel": (8, _CTAS),
    "gathered_gemm_sm90_kernel": (48, "at 168 registers, and only where columns have scales (e4m3)"),
    "head_norm_backward_kernel": (32, "an array: weights of queries and of keys, chosen by the head"),
    "kv_store_bytes_kernel": (88, "its parameters: a thread takes those of keys or of values"),
    "rms_norm_backward_kernel": (16, "at 255 registers, in the instance for the widest rows alone"),
    "squares_kernel": (16, "an array: the last, partial vector is filled value by value"),
}


def find_cuobjdump():
    candidates = [shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump"]
    candidates += sorted((ROOT / ".cache/cuobjdump").glob("lib/python*/site-packages/nvidia/*/bin/cuobjdump"))
    for path in candidates:
        if path and Path(path).is_file():
            if not os.access(path, os.X_OK):
                Path(path).chmod(0o755)
            return str(path)
    print("check_spills: no cuobjdump, so nothing was checked; it is part of the CUDA toolkit, and "
          "scripts/setup.sh --test fetches it", file=sys.stderr)
    sys.exit(2)


def kernel_name(mangled):
    """The function's own name: the last name on the nested path, before template arguments."""
    at = 2 if mangled.startswith("_Z") else 0
    if at < len(mangled) and mangled[at] == "N":
        at += 1
    name = mangled
    while True:
        digits = re.match(r"\d+", mangled[at:])
        if not digits:
            return name
        begin = at + digits.end()
        at = begin + int(digits.group())
        name = mangled[begin:at]


def kernels(report):
    """Yields (architecture, kernel, bytes of local memory) of cuobjdump's report."""
    architecture = name = None
    for line in report.splitlines():
        if match := re.match(r"arch = (\S+)", line.strip()):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            name = kernel_name(match.group(1))
        elif match := re.search(r"STACK:(\d+).*\bLOCAL:(\d+)", line):
            if name is not None:
                yield architecture, name, int(match.group(1)) + int(match.group(2))
            name = None


def check(reports):
    """Lines about what is wrong, and the number of kernels."""
    count, most, files = 0, {}, {}
    for file, report in reports:
        for architecture, name, used in kernels(report):
            count += 1
            if used > most.get(name, (0, ""))[0]:
                most[name] = (used, architecture)
                files[name] = file
    wrong = []
    for name, (used, architecture) in sorted(most.items()):
        allowed = ALLOWED.get(name, (0, ""))[0]
        if used > allowed:
            wrong.append(f"{files[name]}: {name} keeps {used} bytes per thread in local memory "
                         f"({architecture}), {allowed} are allowed")
    for name, (allowed, _) in sorted(ALLOWED.items()):
        if name not in most:
            wrong.append(f"{name} is allowed {allowed} bytes of local memory and needs none")
    return wrong, count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", nargs="?", type=Path, help="a build folder")
    parser.add_argument("--report", type=Path, help="a saved report of cuobjdump -res-usage")
    arguments = parser.parse_args()
    if arguments.report:
        reports = [(arguments.report.name, arguments.report.read_text())]
    elif arguments.build:
        tool = find_cuobjdump()
        objects = sorted(arguments.build.glob("library/**/*.cu.o"))
        if not objects:
            sys.exit(f"check_spills: no kernels under {arguments.build}/library")

        def report(path):
            run = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
            return path.name.removesuffix(".o"), run.stdout

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            reports = list(pool.map(report, objects))
    else:
        parser.error("a build folder, or --report")
    wrong, count = check(reports)
    if count == 0:
        wrong = ["no kernel in the report"]
    for line in wrong:
        print(line)
    print(f"spills: {count} kernels, {len(ALLOWED)} may use local memory, {len(wrong)} errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
