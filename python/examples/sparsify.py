# SPDX-License-Identifier: Apache-2.0
"""Makes a pretrained model with SiLU or GELU sparse with transformers' Trainer: first ReLU takes over
in small steps, then the model trains with an L1 term.

    python python/examples/sparsify.py MODEL TEXT... --out FOLDER --steps 2000

MODEL is a folder or a name on the Hub; TEXT are text files. FOLDER gets the sparse model, which
examples/generate.py takes.
"""

import argparse
import pathlib

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import twell


class Ramp(TrainerCallback):
    """Raises the share of ReLU in the activation from 0 to 1 in equal parts over a number of steps."""

    def __init__(self, model, steps):
        self.model, self.steps = model, steps
        twell.relufy(model, 0.0)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step <= self.steps:
            twell.relufy(self.model, min(state.global_step / max(self.steps, 1), 1.0))


class Windows(torch.utils.data.Dataset):
    def __init__(self, ids, length):
        self.windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=2000, help="with the L1 term")
    parser.add_argument("--ramp", type=int, default=200, help="steps in which ReLU takes over")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--l1", type=float, default=1e-4, help="coefficient of the L1 term")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ids = tokenizer("\n".join(p.read_text() for p in args.text))["input_ids"]
    if len(ids) < args.length:
        parser.error(f"{len(ids)} tokens of text are fewer than one window of {args.length}")
    data = Windows(ids, args.length)

    def train(steps, callbacks):
        arguments = TrainingArguments(
            args.out, max_steps=steps, per_device_train_batch_size=args.batch,
            learning_rate=args.lr, logging_steps=10, report_to=[], save_strategy="no",
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()

    if args.ramp:
        train(args.ramp, [Ramp(model, args.ramp - 1)])
    twell.relufy(model)
    twell.patch(model)
    train(args.steps, [twell.SparsityCallback(args.l1, ramp_steps=args.steps // 4)])
    twell.unpatch(model)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
