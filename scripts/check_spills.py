#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a kernel keeps values in local memory: registers that ptxas spilled, or arrays.

    scripts/check_spills.py build/release     all kernels that were built there
    scripts/check_spills.py --report FILE     the same from saved output of cuobjdump -res-usage

Reads the stack of each kernel from machine code with cuobjdump, of the CUDA toolkit or of .cache
(scripts/setup.sh --test); exit status 2 where there is none. Every *.cu of SOURCES must have been
built. ALLOWED names the kernels that may have a stack, how much on which architecture, and why; an
entry that no kernel needs fails too. Its figures are those of the compiler COMPILER: what another
one does differently is printed, and no error.
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

COMPILER = "13.0"
SOURCES = ["twell/**/*.cu", "bench/*.cu"]

# {kernel: ({architecture: most bytes}, why that is right)}. A kernel is named as in its source; an
# architecture that is not named may have as much as any that is.
_PER_TILE = "one value, read once per tile, in e4m3 alone: all registers are given out"
_CTAS = "its launch bounds leave no more registers, so that several CTAs fit on an SM"
ALLOWED = {
    "attention_decode_single_kernel": ({"sm_80": 8, "sm_86": 0, "sm_89": 0, "sm_90": 0, "sm_100": 0, "sm_120": 0},
                                       _CTAS),
    "expand_kernel": ({"sm_80": 8, "sm_86": 0, "sm_89": 0, "sm_90": 8, "sm_100": 32, "sm_120": 0}, _CTAS),
    "find_unions_kernel": ({"sm_80": 0, "sm_86": 0, "sm_89": 0, "sm_90": 0, "sm_100": 8, "sm_120": 16}, _CTAS),
    "gate_gemm_sm90_kernel": ({"sm_90a": 8}, _PER_TILE),
    "gathered_gemm_sm90_kernel": ({"sm_90a": 48},
                                  "at 168 registers, and only where columns have scales (e4m3)"),
    "piece_kernel": ({"sm_80": 0, "sm_90": 0, "sm_100": 8}, "at 39 registers, by ptxas' own choice"),
    "qkv_sm90_kernel": ({"sm_90a": 8}, _PER_TILE),
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


def allowed_on(name, architecture):
    most = ALLOWED.get(name, ({}, ""))[0]
    return most.get(architecture, max(most.values(), default=0))


def check(reports):
    """Lines about what is wrong, and the number of kernels."""
    count, most, files = 0, {}, {}
    for file, report in reports:
        for architecture, name, used in kernels(report):
            count += 1
            if used > most.get((name, architecture), -1):
                most[name, architecture] = used
                files[name, architecture] = file
    wrong = []
    for (name, architecture), used in sorted(most.items()):
        allowed = allowed_on(name, architecture)
        if used > allowed:
            wrong.append(f"{files[name, architecture]}: {name} keeps {used} bytes per thread in local "
                         f"memory ({architecture}), {allowed} are allowed")
    built = {architecture for _, architecture in most}
    for name, (bytes_on, _) in sorted(ALLOWED.items()):
        for architecture, allowed in bytes_on.items():
            if architecture in built and allowed > 0 and most.get((name, architecture), 0) == 0:
                wrong.append(f"{name} is allowed {allowed} bytes of local memory on {architecture} "
                             "and needs none")
    return wrong, count


def sources_of(path, build):
    """The sources of an object: library/CMakeFiles/X.dir/ops/a.cu.o is that of twell/ops/a.cu, and
    library/CMakeFiles/X.dir/units/b.cu.o that of the sources which library/units/b.cu includes."""
    folder, _, rest = path.relative_to(build).as_posix().partition("/CMakeFiles/")
    source = rest.partition("/")[2].removesuffix(".o")
    unit = build / folder / source
    if source.startswith("units/"):
        return re.findall(r'^#include "(.*)"$', unit.read_text(), re.M) if unit.is_file() else []
    return [f"{'twell' if folder == 'library' else folder}/{source}"]


def objects_of(build, root=ROOT):
    """{object: its sources} of sources that still are, each in the newest object made of it."""
    newest = {}
    for path in sorted(build.glob("**/*.cu.o"), key=lambda path: path.stat().st_mtime):
        newest |= {source: path for source in sources_of(path, build) if (root / source).is_file()}
    objects = {}
    for source, path in newest.items():
        objects.setdefault(path, []).append(source)
    return objects


def missing(sources, build, root=ROOT):
    """The sources of SOURCES that were not built."""
    wanted = {path.relative_to(root).as_posix() for pattern in SOURCES for path in root.glob(pattern)}
    return [f"{source} is not built in {build}" for source in sorted(wanted - set(sources))]


def compiler_of(build):
    for path in build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        if match := re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', path.read_text()):
            return match.group(1)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", nargs="?", type=Path, help="a build folder")
    parser.add_argument("--report", type=Path, help="a saved report of cuobjdump -res-usage")
    arguments = parser.parse_args()
    wrong, compiler = [], COMPILER
    if arguments.report:
        reports = [(arguments.report.name, arguments.report.read_text())]
    elif arguments.build:
        tool = find_cuobjdump()
        objects = objects_of(arguments.build)
        if not objects:
            sys.exit(f"check_spills: no kernels under {arguments.build}")
        built = [source for sources in objects.values() for source in sources]
        wrong, compiler = missing(built, arguments.build), compiler_of(arguments.build)

        def report(path):
            run = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
            return ", ".join(objects[path]), run.stdout

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            reports = list(pool.map(report, sorted(objects)))
    else:
        parser.error("a build folder, or --report")
    lines, count = check(reports)
    if count == 0:
        lines = ["no kernel in the report"]
    for line in wrong + lines:
        print(line)
    print(f"spills: {count} kernels in {len(reports)} objects, {len(ALLOWED)} may use local memory, "
          f"{len(wrong) + len(lines)} errors")
    if lines and compiler != COMPILER:
        print(f"spills: of nvcc {compiler}, while the figures allowed are of {COMPILER}: no error")
        lines = []
    return 1 if wrong or lines else 0


if __name__ == "__main__":
    sys.exit(main())
