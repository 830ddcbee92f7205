#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden logits of the model families, from transformers in float64 (in which its norms, its softmax
and its rotations still work in float32).

Writes, for each variant, a folder tests/golden/families/<variant>/ with config.json and
model.safetensors (or shards) as transformers saves them, in the dtype of the variant, and
golden.safetensors: for each length T in LENGTHS "ids.T" [T] int32 and "logits.T" [T, V] float32.
Needs torch, transformers, safetensors.  Run: python make_family_golden.py
"""
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

OUT = pathlib.Path(__file__).parent / "families"
VOCAB = 24
LENGTHS = (1, 7, 33)
CONTEXT = 48

SIZES = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
             rms_norm_eps=1e-5, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
             attn_implementation="eager")


def rope(kind, **rest):
    return {"rope_type": kind, "rope_theta": 10000.0, **rest}


def old_style(config):
    """As transformers before version 5 wrote it."""
    rope_parameters = config.pop("rope_parameters")
    config["rope_theta"] = rope_parameters.pop("rope_theta")
    kind = rope_parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope_parameters}
    config["torch_dtype"] = config.pop("dtype")


def sparse(config):
    """As the published sparse models are, with the left-over activation."""
    old_style(config)
    config["model_type"] += "_sparse_relu"
    config["architectures"] = ["Sparse" + config["architectures"][0]]
    config["hidden_act"] = "silu"
    config.update(sparsity_l1_coeff=2e-5, sparsity_gated_mlp=True, sparsity_do_track=True,
                  sparsity_new_intermediate_size=None, sparsity_use_hybrid_kernel=False)


# name: (config, model, arguments, dtype, changes to config.json, bytes per shard)
VARIANTS = {
    "llama3": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=16, hidden_act="silu", tie_word_embeddings=False, eos_token_id=[2, 5],
        rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=32)),
        torch.bfloat16, old_style, None),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, dict(
        num_key_value_heads=4, hidden_act="gelu", rope_parameters=rope("linear", factor=2.5)),
        torch.float16, None, 6000),
    "llama_dynamic": (LlamaConfig, LlamaForCausalLM, dict(
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
        rope_parameters=rope("dynamic", factor=4.0)), torch.float32, None, None),
    "llama_yarn": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=16, hidden_act="quick_gelu", rope_parameters=rope(
            "yarn", factor=4.0, original_max_position_embeddings=12, beta_fast=8.0, beta_slow=0.5,
            mscale=1.3, mscale_all_dim=0.4, truncate=False)), torch.bfloat16, None, None),
    "smollm2": (LlamaConfig, LlamaForCausalLM, dict(
        num_attention_heads=2, num_key_value_heads=1, hidden_act="silu", tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
        torch.bfloat16, old_style, None),
    "mistral": (MistralConfig, MistralForCausalLM, dict(
        head_dim=12, hidden_act="silu", sliding_window=33, rope_parameters=rope("default")),
        torch.bfloat16, None, 8000),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(
        hidden_act="silu", tie_word_embeddings=True, rope_parameters=rope(
            "yarn", factor=4.0, original_max_position_embeddings=12)), torch.float16, None, None),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(
        head_dim=32, hidden_act="silu", tie_word_embeddings=False, rope_parameters=rope("default")),
        torch.bfloat16, None, None),
    "llama_sparse": (LlamaConfig, LlamaForCausalLM, dict(
        hidden_act="relu", tie_word_embeddings=True, rope_parameters=rope("default")),
        torch.bfloat16, sparse, None),
    "qwen2_sparse": (Qwen2Config, Qwen2ForCausalLM, dict(
        hidden_act="relu", tie_word_embeddings=False, rope_parameters=rope("default")),
        torch.bfloat16, sparse, None),
}


def build(config_class, model_class, arguments, dtype):
    config = config_class(**{**SIZES, **arguments})
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return model.to(dtype)


def add_tracker(folder):
    """A counter beside the weights, as training code of the sparse models may leave it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.tracker.last_activated"] = torch.zeros(24, dtype=torch.int64)
    save_file(tensors, path, metadata={"format": "pt"})


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        config_class, model_class, arguments, dtype, edit, shard = variant
        torch.manual_seed(seed)
        model = build(config_class, model_class, arguments, dtype)
        folder = OUT / name
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        # Load the saved model: converting the one above also rounded its rotary frequencies.
        model = model_class.from_pretrained(folder, dtype=torch.float64,
                                            attn_implementation="eager").eval()
        if edit:
            path = folder / "config.json"
            config = json.loads(path.read_text())
            edit(config)
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if edit is sparse:
            add_tracker(folder)
        golden = {}
        for length in LENGTHS:
            ids = torch.randint(0, VOCAB, (1, length))
            with torch.no_grad():
                golden[f"logits.{length}"] = model(input_ids=ids).logits[0].float().contiguous()
            golden[f"ids.{length}"] = ids[0].int()
        save_file(golden, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
