#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/check_spills.py reads cuobjdump's report: names, architectures, the most of a kernel's
instances, what is allowed and what needs not be; and misses no source."""

import os
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
import check_spills

REPORT = """
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN5twell10tile_union41_GLOBAL__N__4b20c265_9_unions_cu_505e234b18find_unions_kernelILNS1_7VariantE1EEEvi:
  REG:64 STACK:{first} SHARED:22192 LOCAL:0 CONSTANT[0]:784 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN5twell10tile_union41_GLOBAL__N__4b20c265_9_unions_cu_505e234b18find_unions_kernelILNS1_7VariantE0EEEvi:
  REG:64 STACK:{second} SHARED:22192 LOCAL:0 CONSTANT[0]:784 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z12plain_kernelPi:
  REG:8 STACK:0 SHARED:0 LOCAL:{local} CONSTANT[0]:784 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_80
 Function _Z12plain_kernelPi:
  REG:8 STACK:{older} SHARED:0 LOCAL:0 CONSTANT[0]:784 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def errors(first=0, second=0, local=0, older=0, allowed=None):
    check_spills.ALLOWED = {name: (most, "a reason") for name, most in (allowed or {}).items()}
    text = REPORT.format(first=first, second=second, local=local, older=older)
    wrong, count = check_spills.check([("unions.cu", text)])
    assert count == 4
    return wrong


class CheckSpills(unittest.TestCase):
    def test_no_stack_is_right(self):
        self.assertEqual(errors(), [])

    def test_every_instance_counts(self):
        for arguments in ({"first": 8}, {"second": 8}):
            (line,) = errors(**arguments)
            self.assertIn("unions.cu: find_unions_kernel keeps 8 bytes", line)
            self.assertIn("sm_90a", line)

    def test_arrays_in_local_memory_count(self):
        (line,) = errors(local=4)
        self.assertIn("plain_kernel keeps 4 bytes", line)

    def test_what_is_allowed_passes_and_not_a_byte_more(self):
        allowed = {"find_unions_kernel": {"sm_90a": 8}}
        self.assertEqual(errors(first=8, second=4, allowed=allowed), [])
        self.assertEqual(len(errors(first=9, allowed=allowed)), 1)

    def test_every_architecture_has_its_own_bound(self):
        (line,) = errors(older=4)
        self.assertIn("plain_kernel keeps 4 bytes per thread in local memory (sm_80)", line)
        allowed = {"plain_kernel": {"sm_80": 4, "sm_90a": 8}}
        self.assertEqual(errors(older=4, local=8, allowed=allowed), [])
        (line,) = errors(older=5, local=8, allowed=allowed)
        self.assertIn("sm_80), 4 are allowed", line)
        # One that is not named may have as much as any that is.
        self.assertEqual(errors(older=8, local=8, allowed={"plain_kernel": {"sm_90a": 8}}), [])

    def test_an_entry_without_need_fails(self):
        (line,) = errors(allowed={"plain_kernel": {"sm_90a": 8}})
        self.assertIn("8 bytes of local memory on sm_90a and needs none", line)
        (line,) = errors(older=4, allowed={"plain_kernel": {"sm_80": 4, "sm_90a": 8, "sm_120": 8}})
        self.assertIn("sm_90a", line)
        self.assertEqual(errors(older=4, allowed={"plain_kernel": {"sm_80": 4, "sm_90a": 0}}), [])

    def test_a_source_that_was_not_built_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            build = root / "build"
            made = "library/CMakeFiles/twell_ops_a.dir/"
            files = ("twell/ops/a/deep.cu", "twell/ops/a/one.cu", "twell/ops/a/two.cu", "twell/top.cu",
                     "bench/b.cu", "tests/c.cu", f"build/{made}ops/a/deep.cu.o", f"build/{made}ops/a/gone.cu.o",
                     f"build/{made}ops/a/one.cu.o", f"build/{made}units/ops_a_0_portable.cu.o",
                     "build/library/units/ops_a_0_portable.cu",
                     "build/bench/CMakeFiles/twell_bench.dir/b.cu.o")
            for age, file in enumerate(files):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).touch()
                os.utime(root / file, (age, age))
            (build / "library/units/ops_a_0_portable.cu").write_text(
                '#include "twell/ops/a/one.cu"\n#include "twell/ops/a/two.cu"\n')
            objects = check_spills.objects_of(build, root)
            # one.cu was compiled by itself before; the unit that has it now is newer, so it counts.
            self.assertEqual(objects, {
                build / made / "ops/a/deep.cu.o": ["twell/ops/a/deep.cu"],
                build / made / "units/ops_a_0_portable.cu.o": ["twell/ops/a/one.cu", "twell/ops/a/two.cu"],
                build / "bench/CMakeFiles/twell_bench.dir/b.cu.o": ["bench/b.cu"]})
            built = [source for sources in objects.values() for source in sources]
            (line,) = check_spills.missing(built, build, root)
            self.assertTrue(line.startswith("twell/top.cu is not built"))


if __name__ == "__main__":
    unittest.main()
