# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on patched models: its model `twell`.

    twell-lm-eval run --model twell --model_args checkpoint=DIR --tasks arc_easy --batch_size 16

`twell-lm-eval` (or `python -m twell.lm_eval`) is lm-eval's own command with that model added, since
lm-eval finds no models of other packages by itself. In a program, `import twell.lm_eval` adds it.
"""

from __future__ import annotations

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .patch import patch


@register_model("twell")
class TwellLM(HFLM):
    """lm-eval's model of transformers (log-likelihoods, rolling ones, generation, in batches) with
    the feed-forward layers patched.

    checkpoint: folder or name on the Hub of a ReLU model.
    policy: "auto", "dense" or "sparse"; see `twell.patch`.
    dtype: bfloat16 on a GPU and float32 on the CPU, which are what the ops take.
    Other arguments are those of lm-eval's model `hf`.
    """

    def __init__(self, checkpoint: str, policy: str = "auto", device: str | None = None, **kwargs):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if device.startswith("cpu") else torch.bfloat16
        super().__init__(pretrained=checkpoint, device=device, dtype=dtype, **kwargs)
        patch(self.model, policy)


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
