#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden values of training steps, from PyTorch and transformers in float64.

Writes, for each variant of a small Llama with a ReLU gate, a folder beside this script:
  <variant>/config.json, model.safetensors   the starting weights, saved by transformers (float32)
  <variant>.safetensors                      tokens, losses, logits and gradients of the first step,
                                             weights after the last one (rounded to float32)
and minicpm, the same with a FATReLU and with embeddings, residuals and logits scaled as in MiniCPM-S,
and documents.safetensors, the same for tied_gqa with several documents in a sequence, which end
with token 0 and do not attend to each other.
Needs torch, transformers, safetensors.  Run: python make_step_golden.py
"""
import json
import pathlib
import shutil

import torch
from make_family_golden import THRESHOLD, minicpm, replace_parts
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
VOCAB, SEQUENCES, LENGTH, STEPS = 32, 3, 10, 4
END = 0  # ends a document
VARIANTS = (("tied_gqa", True, 2, 1), ("untied_mha", False, 4, 2))
LEARNING_RATE, WEIGHT_DECAY, CLIP, L1_COEFF = 3e-3, 0.1, 1.0, 0.05


def build(tied: bool, kv_heads: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=6, hidden_act="relu",
        max_position_embeddings=16, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        initializer_range=0.15, attn_implementation="eager", bos_token_id=None, eos_token_id=0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        # All tokens share one direction, and gates have weights of different sizes against it, so
        # that neurons range from busy to dead.
        model.model.embed_tokens.weight[:, 0] += 0.5
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[:, 0] -= torch.linspace(-0.2, 1.5, 32)
    return model


def document_mask(inputs):
    """0 where a query sees a key of its own document that does not follow it, else -infinity."""
    ended = (inputs == END).long().cumsum(-1)
    document = torch.nn.functional.pad(ended[:, :-1], (1, 0))  # its number within the sequence
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[:, None]


def run(model: LlamaForCausalLM, inputs, targets, masked: bool, kink: float) -> dict:
    """Losses of every step, logits and gradients of the first, weights after the last."""
    hidden, gates = [], []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        layer.mlp.gate_proj.register_forward_hook(lambda *args: gates.append(args[2].detach()))
    parameters = dict(model.named_parameters())
    matrices = [p for p in parameters.values() if p.dim() == 2]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY},
         {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    out = {"ce": [], "l1": [], "grad_norm": []}
    for step in range(STEPS):
        hidden.clear()
        mask = document_mask(inputs[step]) if masked else None
        logits = model(input_ids=inputs[step], attention_mask=mask).logits
        ce = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[step].flatten(), ignore_index=-1, reduction="sum")
        ce = ce / targets[step].numel()
        l1 = torch.stack([h.abs().sum(-1).mean() for h in hidden]).mean()
        (ce + L1_COEFF * l1).backward()
        if step == 0:
            out["logits"] = logits.detach()
            out["active"] = torch.stack([(h != 0).sum((0, 1)) for h in hidden])
            for name, parameter in parameters.items():
                out["grad." + name] = parameter.grad.detach().clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        for key, value in (("ce", ce), ("l1", l1), ("grad_norm", norm)):
            out[key].append(value.detach())
    for key in ("ce", "l1", "grad_norm"):
        out[key] = torch.stack(out[key])
    for name, parameter in parameters.items():
        out["after." + name] = parameter.detach()
    # No gate may be so close to the ReLU's kink that float32 rounding could switch a neuron.
    assert min((gate - kink).abs().min() for gate in gates) > 3e-6, "choose another seed"
    return out


def write(name: str, model: LlamaForCausalLM, tokens, masked=False, kink=0.0) -> None:
    inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    targets[:, 0, -2:] = -1  # a sequence that ends early
    out = run(model.double(), inputs, targets, masked, kink)
    out = {k: v.float() if v.is_floating_point() else v.int() for k, v in out.items()}
    out["inputs"], out["targets"] = inputs.int(), targets.int()
    out["active"] = (out["active"] > 0).to(torch.uint8)
    save_file({k: v.contiguous() for k, v in out.items()}, HERE / f"{name}.safetensors")


def save(model: LlamaForCausalLM, folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def write_minicpm() -> None:
    model = build(tied=True, kv_heads=2, seed=4)
    save(model, HERE / "minicpm")
    path = HERE / "minicpm" / "config.json"
    config = json.loads(path.read_text())
    minicpm(config)
    path.write_text(json.dumps(config, indent=2) + "\n")
    replace_parts(model, minicpm)
    tokens = torch.randint(0, VOCAB, (STEPS, SEQUENCES, LENGTH + 1))
    write("minicpm", model, tokens, kink=THRESHOLD)


def main() -> None:
    for variant, tied, kv_heads, seed in VARIANTS:
        model = build(tied, kv_heads, seed)
        save(model, HERE / variant)
        tokens = torch.randint(0, VOCAB, (STEPS, SEQUENCES, LENGTH + 1))
        write(variant, model, tokens)
    write_minicpm()

    model = LlamaForCausalLM.from_pretrained(HERE / "tied_gqa", attn_implementation="eager")
    torch.manual_seed(5)
    tokens = torch.randint(1, VOCAB, (STEPS, SEQUENCES, LENGTH + 1))
    for step in range(STEPS):  # long documents, short ones, of one token, and an end at the end
        tokens[step, 0, 3 + step] = END
        tokens[step, 1, [0, 4, 5]] = END
        tokens[step, 2, -2 - step % 2] = END
    write("documents", model, tokens, masked=True)


if __name__ == "__main__":
    main()
