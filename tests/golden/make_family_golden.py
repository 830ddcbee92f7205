#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden logits of the model families, from transformers in float64 (in which its norms, its softmax
and its rotations still work in float32).

Writes, for each variant, a folder tests/golden/families/<variant>/ with config.json and
model.safetensors (or shards) as transformers saves them, in the dtype of the variant, and
golden.safetensors: for each length T in LENGTHS "ids.T" [T] int32 and "logits.T" [T, V] float32;
"cross_entropy" [1] float64, the mean over ids.33 in nats; "greedy" [CONTEXT] int32, ids.7 continued
by the most likely tokens. What transformers does not have (ProSparse, Bamboo, PhoneLM, MiniCPM) is one
of its models with a part replaced as the model's description says.
Needs torch, transformers, safetensors.  Run: python make_family_golden.py [VARIANT...]
"""
import json
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
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


def without_layer_types(config):
    """As transformers before version 4.53 wrote it: max_window_layers alone says where a window is."""
    old_style(config)
    del config["layer_types"]


def mix_dtypes(config):
    """The tensors are mixed by mix_tensors()."""


def sparse(config):
    """As the published sparse models are, with the left-over activation."""
    old_style(config)
    config["model_type"] += "_sparse_relu"
    config["architectures"] = ["Sparse" + config["architectures"][0]]
    config["hidden_act"] = "silu"
    config.update(sparsity_l1_coeff=2e-5, sparsity_gated_mlp=True, sparsity_do_track=True,
                  sparsity_new_intermediate_size=None, sparsity_use_hybrid_kernel=False)


THRESHOLD = 0.1


class FatReLU(nn.Module):
    def forward(self, x):
        return torch.where(x > THRESHOLD, x, 0.0)


class DoubleReLU(nn.Module):
    """The layer of Bamboo and TurboSparse, without their predictors."""
    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x):
        return self.down_proj(F.relu(self.gate_proj(x)) * F.relu(self.up_proj(x)))


class RoundedRotary(nn.Module):
    """PhoneLM keeps cos and sin in 8 bits, as 127ths of the largest."""
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        return tuple((part * 127).round() / 127 for part in self.rotary(x, position_ids))


def prosparse(config):
    old_style(config)
    config.update(model_type="sparsellama", architectures=["SparseLlamaForCausalLM"],
                  hidden_act="fatrelu", hidden_act_param=THRESHOLD)


def bamboo(config):
    old_style(config)
    config.update(model_type="bamboo", architectures=["BambooForCausalLM"])


def phonelm(config):
    old_style(config)
    config.update(model_type="phonelm", architectures=["PhoneLMForCausalLM"])
    del config["mlp_bias"], config["head_dim"]


SCALE_EMB, SCALE_DEPTH, DIM_MODEL_BASE = 12, 1.4, 6


def minicpm(config):
    old_style(config)
    config.update(model_type="minicpm", architectures=["MiniCPMForCausalLM"],
                  hidden_act="fatrelu", hidden_act_param=THRESHOLD, scale_emb=SCALE_EMB,
                  scale_depth=SCALE_DEPTH, dim_model_base=DIM_MODEL_BASE)
    del config["mlp_bias"], config["tie_word_embeddings"]


def scale_output(module, scale):
    module.register_forward_hook(lambda module, inputs, output: output * scale)


def scale_as_minicpm(model):
    """Embeddings, what attention and feed-forward layers add, and logits."""
    scale_output(model.model.embed_tokens, SCALE_EMB)
    scale_output(model.lm_head, DIM_MODEL_BASE / model.config.hidden_size)
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            scale_output(module, SCALE_DEPTH / len(model.model.layers) ** 0.5)


def replace_parts(model, edit):
    for layer in model.model.layers:
        if edit in (prosparse, minicpm):
            layer.mlp.act_fn = FatReLU()
        if edit is bamboo:
            layer.mlp = DoubleReLU(layer.mlp)
    if edit is minicpm:
        scale_as_minicpm(model)
    if edit is phonelm:
        model.model.rotary_emb = RoundedRotary(model.model.rotary_emb)


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
    "mistral_window": (MistralConfig, MistralForCausalLM, dict(
        head_dim=8, hidden_act="silu", sliding_window=9, rope_parameters=rope("default")),
        torch.bfloat16, old_style, None),
    "qwen2_window": (Qwen2Config, Qwen2ForCausalLM, dict(
        num_attention_heads=2, num_key_value_heads=1, hidden_act="silu", use_sliding_window=True,
        sliding_window=6, max_window_layers=1, rope_parameters=rope("default")),
        torch.bfloat16, without_layer_types, None),
    "qwen3_window": (Qwen3Config, Qwen3ForCausalLM, dict(
        head_dim=8, hidden_act="relu", attention_bias=True, use_sliding_window=True,
        sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope("default")), torch.bfloat16, None, None),
    "llama_biases": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=8, hidden_act="silu", attention_bias=True, mlp_bias=True,
        rope_parameters=rope("default")), torch.bfloat16, None, None),
    "llama_biases_relu": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=8, hidden_act="relu", attention_bias=True, mlp_bias=True, intermediate_size=83,
        rope_parameters=rope("default")), torch.bfloat16, old_style, None),
    "llama_ffn_83": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=8, hidden_act="relu", intermediate_size=83, rope_parameters=rope("default")),
        torch.bfloat16, None, None),
    "llama_mixed_dtypes": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=8, hidden_act="relu", attention_bias=True, rope_parameters=rope("default")),
        torch.float32, mix_dtypes, None),
    "arcee": (ArceeConfig, ArceeForCausalLM, dict(
        head_dim=8, hidden_act="relu2", rope_parameters=rope(
            "yarn", factor=4.0, original_max_position_embeddings=12)), torch.bfloat16, None, None),
    "prosparse": (LlamaConfig, LlamaForCausalLM, dict(
        head_dim=8, hidden_act="relu", intermediate_size=40, rope_parameters=rope("default")),
        torch.bfloat16, prosparse, None),
    "bamboo": (MistralConfig, MistralForCausalLM, dict(
        head_dim=8, hidden_act="relu", sliding_window=9, rope_parameters=rope("default")),
        torch.bfloat16, bamboo, None),
    "phonelm": (LlamaConfig, LlamaForCausalLM, dict(
        hidden_act="relu", rope_parameters=rope("default")), torch.bfloat16, phonelm, None),
    "minicpm": (LlamaConfig, LlamaForCausalLM, dict(
        hidden_act="relu", intermediate_size=40, num_hidden_layers=3, rms_norm_eps=0.01,
        tie_word_embeddings=True, rope_parameters=rope("default")), torch.bfloat16, minicpm, None),
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


def mix_tensors(folder):
    """Stores one tensor in float32, the next in float16, the next in bfloat16."""
    path = folder / "model.safetensors"
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    tensors = {name: tensor.to(dtypes[i % 3]).contiguous()
               for i, (name, tensor) in enumerate(sorted(load_file(path).items()))}
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


def continued(model, ids):
    """ids [1, T] continued by the most likely tokens, each clearly likelier than the second."""
    while ids.shape[1] < CONTEXT:
        best = logits_of(model, ids)[-1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4, "choose another seed"
        ids = torch.cat([ids, best.indices[:1, None]], dim=1)
    return ids


def main():
    chosen = sys.argv[1:] or list(VARIANTS)
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        if name not in chosen:
            continue
        shutil.rmtree(OUT / name, ignore_errors=True)
        config_class, model_class, arguments, dtype, edit, shard = variant
        torch.manual_seed(seed)
        model = build(config_class, model_class, arguments, dtype)
        folder = OUT / name
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if edit is mix_dtypes:
            mix_tensors(folder)
        # Load the saved model: converting the one above also rounded its rotary frequencies.
        model = model_class.from_pretrained(folder, dtype=torch.float64,
                                            attn_implementation="eager").eval()
        replace_parts(model, edit)
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
            logits = logits_of(model, ids)
            golden[f"logits.{length}"] = logits.float().contiguous()
            golden[f"ids.{length}"] = ids[0].int()
            if length == 7:
                golden["greedy"] = continued(model, ids)[0].int()
            if length == 33:
                golden["cross_entropy"] = F.cross_entropy(logits[:-1], ids[0, 1:]).reshape(1)
        save_file(golden, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
