#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""dev/gpu counts a skipped test as failed, unless every machine skips it, and a program without a
result too; a program runs in parts beside others, but for the tests that measure memory. Its programs are
stand-ins here, which write GoogleTest's report."""

import os
import pathlib
import subprocess
import sys
import tempfile
from xml.sax.saxutils import quoteattr

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAND_IN = """#!/usr/bin/env python3
import os, sys
path = [a.split("xml:", 1)[1] for a in sys.argv if "xml:" in a][0]
with open(__file__ + ".runs", "a") as runs:
    print(os.environ["GTEST_SHARD_INDEX"], *[a for a in sys.argv if "filter" in a], file=runs)
if {report!r}:
    open(path, "w").write({report!r})
ready = os.environ["TWELL_REQUIRE_GPUS"] == {gpus!r} and os.environ["TWELL_SOURCE_DIR"] == {root!r}
sys.exit({code} if ready else 99)
"""


def report(skipped: str = "", tests: int = 1, failures: int = 0) -> str:
    inner = ""
    if skipped:
        inner = f"<skipped message={quoteattr(skipped)}/>"
    if failures:
        inner = f"<failure message={quoteattr('/elsewhere/sum_cuda_test.cc:7' + chr(10) + 'Expected 3')}/>"
    cases = "".join(f"""<testcase name="Case{i}" file="/elsewhere/src/twell/ops/sum/sum_cuda_test.cc"
        status="run" time="0.5" classname="Suite">{inner}</testcase>""" for i in range(tests))
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def run(folder: pathlib.Path, *arguments: str, gpus: str = "2",
        **programs: tuple[str, int]) -> tuple[int, str]:
    for name, (text, code) in programs.items():
        path = folder / f"{name}_cuda_test"
        path.write_text(STAND_IN.format(report=text, code=code, gpus=gpus, root=str(ROOT)))
        path.chmod(0o755)
    ran = subprocess.run([sys.executable, ROOT / "dev/gpu", "--build", folder, "--gpus", gpus,
                          "--no-sanitizers", *arguments], capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


NEEDS_TWO = report("needs 2 GPUs, there are 1")
CASES = {
    "passes": ((report(), 0), "2", 0, "1 ran, 0 failed"),
    "has a room": ((report(tests=3), 0), "2", 0, f"{'twell/ops/sum':<36} {1.5:7.1f} s  ok  3 tests, 0 failed"),
    "is in a folder twell": ((report().replace("src/twell/ops/sum", "twell/tests/first"), 0), "2", 0,
                             f"\n{'tests/first':<36} "),
    "needs a GPU": ((report("no GPU: no CUDA-capable device is detected"), 0), "2", 1, "no CUDA-capable"),
    "skips by design": ((report("x.cc:200: Skipped\n1030 rows run the same kernels"), 0), "2", 0, "0 failed"),
    "needs two GPUs of one": ((NEEDS_TWO, 0), "1", 0, "1 tests, 0 failed, 1 skipped"),
    "needs two GPUs of two": ((NEEDS_TWO, 0), "2", 1, "1 failed"),
    "fails": ((report(failures=1), 1), "2", 1, "failed: Suite.Case0: sum_cuda_test.cc:7 Expected 3"),
    "ends badly": ((report(), 139), "2", 1, "ended with 139, but no test failed"),
    "ends within its report": (("<testsuites>", 1), "2", 1, "without a result"),
    "dies": (("", 139), "2", 1, "without a result"),
    "has no tests": ((report(tests=0), 0), "2", 1, "1 failed"),
}


def parts() -> str:
    """What --jobs runs: the parts of a long program, and alone what measures memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        code, output = run(folder, "--jobs", "3", model=(report(), 0), room=(report(), 0))
        runs = {p.name: sorted(p.read_text().splitlines()) for p in folder.glob("*.runs")}
        empty, without = run(folder, "--jobs", "3", model=(report(tests=0), 0))
    memory = "--gtest_filter={}TrainingCudaPlan.IsWhatAPassTakes"
    want = {"model_cuda_test.runs": sorted(["0 " + memory.format("")] +
                                           [f"{i} " + memory.format("-") for i in range(4)]),
            "room_cuda_test.runs": ["0"]}
    if code != 0 or runs != want or "5 tests, 0 failed" not in output:
        return f"exit code {code}, ran {runs}, not {want}:\n{output}"
    if empty != 1 or "has no such test" not in without:
        return f"a memory test that is not there: exit code {empty}:\n{without}"
    return ""


def sanitizers() -> str:
    """Every tool over a small room, all but what takes a tool minutes; one that finds something fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tool = folder / "compute-sanitizer"
        tool.write_text("#!/bin/sh\necho $2 of $7; [ $2 != $FINDS ]\n")
        tool.chmod(0o755)
        program = folder / "ops_bias_cuda_test"
        program.write_text(STAND_IN.format(report=report(), code=0, gpus="1", root=str(ROOT)))
        program.chmod(0o755)
        for finds, code in (("none", 0), ("racecheck", 1), ("synccheck", 1)):
            env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FINDS": finds}
            ran = subprocess.run([sys.executable, ROOT / "dev/gpu", "--build", folder, "--jobs", "2"],
                                 capture_output=True, text=True, env=env)
            log = (folder / "dev_gpu.log").read_text()
            if (ran.returncode != code or "sanitizers ops_bias" not in ran.stdout or
                    any(f"\n{tool} of {program}" not in log for tool in ("memcheck", "racecheck", "synccheck")) or
                    log.count("-*DecodeLayersCuda*") != 1):
                return f"exit code {ran.returncode}, expected {code}:\n{ran.stdout}{ran.stderr}{log}"
    return ""


def main() -> int:
    for name, (program, gpus, code, text) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            got, output = run(pathlib.Path(folder), gpus=gpus, room=program)
        if got != code or text not in output:
            print(f"dev/gpu, a program that {name}: exit code {got}, expected {code}:\n{output}")
            return 1
    if fault := parts():
        print(f"dev/gpu --jobs: {fault}")
        return 1
    if fault := sanitizers():
        print(f"dev/gpu with sanitizers: {fault}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        many = {f"room{i}": (report(failures=1), 1) for i in range(30)}
        got, output = run(pathlib.Path(folder), **many)
        log = (pathlib.Path(folder) / "dev_gpu.log").read_text()
    if got != 1 or output.count("Expected 3") != 20 or log.count("== room") != 30:
        print(f"dev/gpu, 30 programs that fail: exit code {got}:\n{output}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        got, output = run(pathlib.Path(folder))
    if got != 2 or "nothing in" not in output:
        print(f"dev/gpu without programs: exit code {got}:\n{output}")
        return 1
    print(f"dev/gpu: {len(CASES) + 5} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
