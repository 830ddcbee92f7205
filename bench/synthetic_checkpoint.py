#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with random weights, of whose neurons about one in 200, or --active, fires on any input,
to measure a server or `twell bench decode` without a trained model. As in bench/synthetic_model.h, one
component of the residual stream is constant, and the gates' weights for it are a negative bias.

  synthetic_checkpoint.py OUT --layers 38 --tokenizer TOKENIZER.json      (2b; 8 layers: 0.5b)
  synthetic_checkpoint.py OUT --layers 32 --width 4096 --ffn 11008 --vocab 32000 --active 0.1 \\
      --activation drelu                                 (layers of the published 7B ReLU models)

Needs PyTorch and safetensors; runs on a GPU where there is one."""
import argparse
import json
import math
import pathlib
import shutil
import statistics

import torch
from safetensors.torch import save_file

BIAS, OUTPUT_SCALE, INIT_STD = -0.37109375, 0.05, 0.02
THRESHOLD = 0.01  # of fatrelu, as in ProSparse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--activation", choices=("relu", "relu2", "fatrelu", "drelu"), default="relu")
    parser.add_argument("--active", type=float, default=0.00494, help="share of neurons that fire")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="tokenizer.json to copy")
    arguments = parser.parse_args()
    width, ffn = arguments.width, arguments.ffn
    # dReLU also needs a positive up projection, as half of them are: so twice as many gates fire.
    share = arguments.active * (2 if arguments.activation == "drelu" else 1)
    if not 0 < share < 0.5:
        parser.error(f"--active {arguments.active}: at most half of the gates can be positive")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows, columns, scale=1.0):
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(0.0, INIT_STD * scale, generator=generator)

    # Gates are normal with this deviation; those above zero, or the threshold, fire. The norm turns the
    # constant c into c / sqrt(1 + c^2 / D).
    deviation = INIT_STD * math.sqrt(width)
    beyond = -statistics.NormalDist().inv_cdf(share) * deviation
    if arguments.activation == "fatrelu":
        beyond -= THRESHOLD
    wanted = beyond / -BIAS
    constant = wanted / math.sqrt(max(1e-3, 1.0 - wanted * wanted / width))
    weights = {"model.embed_tokens.weight": normal(arguments.vocab, width, 1.0 / INIT_STD),
               "model.norm.weight": torch.ones(width, dtype=torch.bfloat16, device=device)}
    weights["model.embed_tokens.weight"][:, 0] = constant
    for layer in range(arguments.layers):
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(width, width)
        # Nothing is added to the constant component.
        weights[f"{at}self_attn.o_proj.weight"] = normal(width, width, OUTPUT_SCALE)
        weights[f"{at}self_attn.o_proj.weight"][0] = 0.0
        weights[f"{at}mlp.gate_proj.weight"] = normal(ffn, width)
        weights[f"{at}mlp.gate_proj.weight"][:, 0] = BIAS
        weights[f"{at}mlp.up_proj.weight"] = normal(ffn, width)
        weights[f"{at}mlp.down_proj.weight"] = normal(width, ffn, OUTPUT_SCALE)
        weights[f"{at}mlp.down_proj.weight"][0] = 0.0
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(width, dtype=torch.bfloat16, device=device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu() for name, value in weights.items()}, arguments.out / "model.safetensors",
              metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu",
              "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": arguments.layers,
              "num_attention_heads": arguments.heads, "num_key_value_heads": arguments.heads,
              "head_dim": width // arguments.heads, "vocab_size": arguments.vocab,
              "max_position_embeddings": arguments.context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16"}
    if arguments.activation == "drelu":
        config |= {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "sliding_window": None}
    else:
        config["hidden_act"] = arguments.activation
    if arguments.activation == "fatrelu":
        config["hidden_act_param"] = THRESHOLD
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if arguments.tokenizer:
        shutil.copy(arguments.tokenizer, arguments.out / "tokenizer.json")


if __name__ == "__main__":
    main()
