# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on checkpoints: its models `twell` and `twell-hf`.

    twell-lm-eval run --model twell --model_args checkpoint=DIR --tasks arc_easy --batch_size 16

`twell-lm-eval` (or `python -m twell.lm_eval`) is lm-eval's own command with these models added, since
lm-eval finds no models of other packages by itself. In a program, `import twell.lm_eval` adds them.
"""

from __future__ import annotations

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .engine import Engine
from .patch import patch


def _checkpoint(checkpoint: str | None, pretrained: str | None) -> str:
    """The folder; `pretrained` is what lm-eval's own models call it."""
    if (checkpoint is None) == (pretrained is None):
        raise ValueError(
            "name the folder of the checkpoint once: --model_args checkpoint=FOLDER (or pretrained=FOLDER)"
        )
    return checkpoint or pretrained


@register_model("twell")
class TwellLM(TemplateLM):
    """Log-likelihoods, rolling ones and generation by the engine, without transformers.

    checkpoint: folder of a checkpoint or of a training run.
    batch_size: requests that are computed at once.
    max_gen_toks: most new tokens where a task does not say.
    context, ffn, threads, weights, head: as for `twell.Engine`.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        device: str | None = None,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        context: int = 0,
        ffn: str = "auto",
        threads: int = 0,
        pretrained: str | None = None,
        weights: str = "stored",
        head: str = "stored",
    ):
        super().__init__()
        checkpoint = _checkpoint(checkpoint, pretrained)
        # lm-eval's command asks for cuda:0 where nobody says otherwise; its model hf then takes the CPU.
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        slots = int(batch_size) if str(batch_size).isdigit() else max_batch_size or 16
        self.engine = Engine(
            checkpoint,
            device,
            threads=threads,
            slots=slots,
            context=context,
            ffn=ffn,
            weights=weights,
            head=head,
        )
        self.max_length = self.engine.context
        self.max_gen_toks = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        return self.engine.eos_token

    @property
    def prefix_token_id(self) -> int:
        try:
            return self.engine.encode("")[0]
        except ValueError:  # the tokenizer has no end-of-text token, but config.json may
            return self.eot_token_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
        return self.engine.encode(string, add_special_tokens is not False) if string else []

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        # Only the end of a text that is too long is scored, as by `hf`. The last token is scored, but
        # not fed, so one token more than the context fits.
        pairs = []
        for _, context, continuation in requests:
            continuation = continuation[-self.max_length :]
            room = self.max_length + 1 - len(continuation)
            pairs.append((context[-room:], continuation))
        results = self.engine.loglikelihood(pairs)
        for (key, _, _), result in zip(requests, results):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        results = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            results.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests, disable_tqdm=False):
        prompts, options = [], []
        for context, wanted in (request.args for request in requests):
            until = wanted.get("until") or []
            new_tokens = int(wanted.get("max_gen_toks", self.max_gen_toks))
            sampled = wanted.get("do_sample", float(wanted.get("temperature", 0.0)) > 0.0)
            room = max(self.max_length - new_tokens, 1)
            prompts.append(self.tok_encode(context)[-room:])
            options.append({
                "max_tokens": new_tokens,
                "temperature": float(wanted.get("temperature", 1.0)) if sampled else 0.0,
                "top_p": float(wanted.get("top_p", 1.0)),
                "top_k": int(wanted.get("top_k", 0)),
                "stop": [until] if isinstance(until, str) else list(until),
            })
        texts = [result.text for result in self.engine.generate_each(prompts, options)]
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


@register_model("twell-hf")
class PatchedLM(HFLM):
    """lm-eval's model of transformers (`hf`) with the feed-forward layers patched.

    checkpoint: folder or name on the Hub of a ReLU model.
    policy: "auto", "dense" or "sparse"; see `twell.patch`.
    dtype: bfloat16 on a GPU and float32 on the CPU, which are what the ops take.
    Other arguments are those of `hf`.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        policy: str = "auto",
        device: str | None = None,
        pretrained: str | None = None,
        **kwargs,
    ):
        checkpoint = _checkpoint(checkpoint, pretrained)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if device.startswith("cpu") else torch.bfloat16
        super().__init__(pretrained=checkpoint, device=device, dtype=dtype, **kwargs)
        patch(self.model, policy)


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
