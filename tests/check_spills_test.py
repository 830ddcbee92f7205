#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/check_spills.py reads cuobjdump's report: names, architectures, the most of a kernel's
instances, what is allowed and what needs not be."""

import pathlib
import sys
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
"""


def errors(first=0, second=0, local=0, allowed=None):
    check_spills.ALLOWED = allowed or {}
    text = REPORT.format(first=first, second=second, local=local)
    wrong, count = check_spills.check([("unions.cu", text)])
    assert count == 3
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
        allowed = {"find_unions_kernel": (8, "a reason")}
        self.assertEqual(errors(first=8, second=4, allowed=allowed), [])
        self.assertEqual(len(errors(first=9, allowed=allowed)), 1)

    def test_an_entry_without_need_fails(self):
        (line,) = errors(allowed={"plain_kernel": (8, "a reason")})
        self.assertIn("needs none", line)


if __name__ == "__main__":
    unittest.main()
