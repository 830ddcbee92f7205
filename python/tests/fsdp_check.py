# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on patched models: the ranks together train as one does. Exits 1 if they do not.

    torchrun --nproc-per-node 2 python/tests/fsdp_check.py

A GPU per rank; ranks share GPUs where there are fewer, through Gloo; the CPU where there are none.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import twell

STEPS, LENGTH = 20, 128


def make_model(gpu):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=256 if gpu else 64,
                         intermediate_size=1024 if gpu else 128, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, hidden_act="relu",
                         max_position_embeddings=LENGTH, use_cache=False)
    return LlamaForCausalLM(config)


def losses(model, device, texts, ranks):
    """Of each step, over all texts; rank r takes every ranks-th of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    patched = bool(twell.stats(model))
    found = []
    for step in range(STEPS):
        ids = texts[(step % 4) * 4 :][:4]
        ids = ids[dist.get_rank() % ranks :: ranks].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        (loss + 1e-5 * twell.l1(model) if patched else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if patched and step == 2:
            twell.update(model)
        loss = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        found.append(loss.item() / ranks)
    return torch.tensor(found)


def shard(model, mesh, gpu):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if gpu else MixedPrecisionPolicy()
    for i, layer in enumerate(model.model.layers):
        if i == 0:  # one layer is computed again in backward
            forward = layer.forward
            layer.forward = lambda *a, **k: checkpoint(forward, *a, use_reentrant=False, **k)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    # NCCL refuses two ranks on one GPU.
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    meshes = init_device_mesh(device.type, (ranks, 1), mesh_dim_names=("together", "alone"))
    start = make_model(gpus > 0).to(device)
    texts = torch.randint(0, 32, (16, LENGTH)).cumsum(1) % 256

    def train(patched, mesh):
        model = copy.deepcopy(start)
        if patched:
            twell.patch(model, policy="sparse", automatic=False, by_neuron=False)
        curve = losses(shard(model, meshes[mesh], gpus > 0), device, texts, meshes[mesh].size())
        return curve, sorted({layer.execution for layer in twell.stats(model)})

    def parts(patched):
        """The curve of all ranks, how far it is from one rank's with all texts, executions."""
        curve, runs = train(patched, "together")
        return curve, (curve - train(patched, "alone")[0]).abs().max().item(), runs

    curve, worst, runs = parts(patched=True)
    # In bf16 the ranks' gradients are rounded before they are added, which grows with the steps.
    limit = 0.01 + 2 * parts(patched=False)[1] if gpus else 1e-3
    ok = worst < limit and curve[-1] < curve[0] - 0.1
    if rank == 0:
        print(f"{'ok  ' if ok else 'FAIL'} FSDP2 on {ranks} x {device.type} ({dist.get_backend()}), "
              f"layers {runs}: loss {curve[0]:.4f} to {curve[-1]:.4f}, largest difference to one rank "
              f"{worst:.1e}, limit {limit:.1e}", flush=True)
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
