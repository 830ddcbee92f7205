#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""dev/gpu counts a skipped test as failed, unless every machine skips it, and a program without a
result too. Its programs are stand-ins here, which write GoogleTest's report."""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
path = [a.split("json:", 1)[1] for a in sys.argv if "json:" in a][0]
if {report!r}:
    open(path, "w").write({report!r})
sys.exit({code} if os.environ["TWELL_REQUIRE_GPUS"] == "2" else 99)
"""


def report(skipped: str = "", tests: int = 1, failures: int = 0) -> str:
    test = {"name": "Case", "result": "SKIPPED" if skipped else "COMPLETED"}
    if skipped:
        test["skipped"] = [{"message": skipped}]
    return json.dumps({"tests": tests, "failures": failures,
                       "testsuites": [{"name": "Suite", "testsuite": [test]}]})


def run(folder: pathlib.Path, **programs: tuple[str, int]) -> tuple[int, str]:
    for name, (text, code) in programs.items():
        path = folder / f"{name}_cuda_test"
        path.write_text(STAND_IN.format(report=text, code=code))
        path.chmod(0o755)
    ran = subprocess.run([sys.executable, ROOT / "dev/gpu", "--build", folder, "--gpus", "2",
                          "--no-sanitizers"], capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


CASES = {
    "passes": ((report(), 0), 0, "1 ran, 0 failed"),
    "needs a GPU": ((report("no GPU: no CUDA-capable device is detected"), 0), 1, "no CUDA-capable"),
    "skips by design": ((report("x.cc:200: Skipped\n1030 rows run the same kernels"), 0), 0, "0 failed"),
    "fails": ((report(failures=1), 1), 1, "1 failed"),
    "dies": (("", 139), 1, "without a result"),
    "has no tests": ((report(tests=0), 0), 1, "1 failed"),
}


def main() -> int:
    for name, (program, code, text) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            got, output = run(pathlib.Path(folder), room=program)
        if got != code or text not in output:
            print(f"dev/gpu, a program that {name}: exit code {got}, expected {code}:\n{output}")
            return 1
    with tempfile.TemporaryDirectory() as folder:
        got, output = run(pathlib.Path(folder))
    if got != 2 or "nothing in" not in output:
        print(f"dev/gpu without programs: exit code {got}:\n{output}")
        return 1
    print(f"dev/gpu: {len(CASES) + 1} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
