# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on patched models: the ranks together train as one process does. Exits 1 if they do not.

    torchrun --nproc-per-node 2 python/tests/fsdp_check.py          a GPU per rank, or the CPU
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import twell

STEPS, LENGTH = 20, 128
# On a GPU one process trains under autocast and FSDP with bf16 weights, and differences of their
# roundings grow with the steps: an unpatched model's are 0.001 in step 5, 0.01 in step 10 and 0.04
# in step 20. So only the first steps are compared there.
COMPARED = 12


def make_model(gpu):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=256 if gpu else 64,
                         intermediate_size=1024 if gpu else 128, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, hidden_act="relu",
                         max_position_embeddings=LENGTH, use_cache=False)
    return LlamaForCausalLM(config)


def losses(model, device, texts, ranks, autocast):
    """Of each step, over all texts; rank r takes every ranks-th of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        ids = texts[(step % 4) * 4 :][:4]
        ids = ids[dist.get_rank() % ranks :: ranks].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        total = loss + 1e-5 * twell.l1(model)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            twell.update(model)
        loss = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        found.append(loss.item() / ranks)
    return torch.tensor(found)


def main():
    gpu = torch.cuda.is_available()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    start = make_model(gpu).to(device)
    texts = torch.randint(0, 32, (16, LENGTH)).cumsum(1) % 256

    # One process has all the texts; on a GPU autocast makes its weights bf16 where FSDP does too.
    alone = losses(twell.patch(copy.deepcopy(start), automatic=False), device, texts, 1, gpu)

    model = twell.patch(copy.deepcopy(start), automatic=False, by_neuron=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if gpu else MixedPrecisionPolicy()
    for i, layer in enumerate(model.model.layers):
        if i == 0:  # one layer is computed again in backward
            forward = layer.forward
            layer.forward = lambda *a, **k: checkpoint(forward, *a, use_reentrant=False, **k)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    together = losses(model, device, texts, ranks, False)

    worst = (together - alone)[: COMPARED if gpu else STEPS].abs().max().item()
    ok = worst < (0.03 if gpu else 1e-3) and together[-1] < together[0] - 0.1
    if rank == 0:
        runs = sorted({layer.execution for layer in twell.stats(model)})
        print(f"{'ok  ' if ok else 'FAIL'} FSDP2 on {ranks} x {device.type}, layers {runs}: loss "
              f"{together[0]:.4f} to {together[-1]:.4f}, largest difference to one process "
              f"{worst:.1e}", flush=True)
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
