# SPDX-License-Identifier: Apache-2.0
"""Generates text with a sparse model of transformers, patched, and prints each layer's activity.

    python python/examples/generate.py MODEL "The answer is" --tokens 64
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import twell


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a folder or a name on the Hub")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if cuda else torch.float32
    )
    model = twell.patch(model.to("cuda" if cuda else "cpu").eval())
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    twell.update(model)
    for layer in twell.stats(model):
        print(f"{layer.name}: {layer.inference_nnz_per_token:.1f} of {layer.neurons} neurons "
              f"active, {layer.execution}")


if __name__ == "__main__":
    main()
