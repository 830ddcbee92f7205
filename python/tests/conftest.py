# SPDX-License-Identifier: Apache-2.0
import signal

import pytest
import torch

# A shell's background jobs ignore it, and so would the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Layers of tests are small, and other tests run beside these.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()
