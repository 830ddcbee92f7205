# SPDX-License-Identifier: Apache-2.0
"""The published TwELL code beside this engine, on one GPU and in one process.

    python bench/peer/compare.py --peer CHECKOUT --patterns FILE [--patterns FILE]
    python bench/peer/compare.py --peer CHECKOUT --checkpoint DIR --text FILE [--model]

CHECKOUT is a clone of github.com/SakanaAI/sparser-faster-llms, whose CUDA sources are compiled when
first used (some minutes). Needs this project's Python package built with CUDA, and transformers.

Layers (--patterns, --checkpoint): inference, and forward with backward. Every row has times (median
of events, weights of all layers in turn so that none stays in the L2), and errors against the same
layer in float32 on the same bf16 operands: the relative error of the whole result and of its worst
token. A pattern file's gates are solved so that exactly the captured neurons fire on its first 2,048
tokens, which then repeat; a checkpoint's layers get the inputs that they have on the text.
"published, 128" keeps up to 128 neurons a tile of 256 instead of 32; it is left out for a checkpoint,
where a layer of 3,866 active neurons of one token ended it with an illegal memory access.
Edges: what either does with sizes and inputs off its path.
--model: the body of the checkpoint, 64 x 2,048 random tokens as the published benchmark, unless
--batch says otherwise: speed and energy.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

import torch

import twell


def events(run, repeats=12, warmup=3):
    """Milliseconds: median, p10, p90."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


def error(got, want):
    """Relative error of the whole, and of the worst row against the mean row's norm."""
    got, want = got.float().reshape(-1, got.shape[-1]), want.float().reshape(-1, want.shape[-1])
    rows = (got - want).norm(dim=1)
    whole = (rows.norm() / want.norm().clamp_min(1e-30)).item()
    worst = (rows.max() / want.norm(dim=1).mean().clamp_min(1e-30)).item()
    return whole, worst


class Layer:
    """Operands of one layer, bf16: x [M, D], gate, up and down [F, D]."""

    def __init__(self, name, x, gate, up, down):
        self.name = name
        self.x, self.gate, self.up, self.down = (t.bfloat16().contiguous() for t in (x, gate, up, down))
        fired = self.in_chunks(lambda x: (x @ self.gate.float().t() > 0).sum(1))
        self.active, self.most = fired.float().mean().item(), int(fired.max())

    def in_chunks(self, run):
        return torch.cat([run(part.float()) for part in self.x.split(2048)])

    def in_f32(self):
        gate, up, down = self.gate.float(), self.up.float(), self.down.float()
        return self.in_chunks(lambda x: (torch.relu(x @ gate.t()) * (x @ up.t())) @ down)


def dense(x, gate, up, down):
    return (torch.relu(x @ gate.t()) * (x @ up.t())) @ down


class Peer:
    """The published ops."""

    def __init__(self, folder):
        sys.path.insert(0, str(folder))
        from custom_models.hybrid_modules.sparse_ops_loader import load_sparse_ops
        from custom_models.twell_modules import twell as module

        begin = time.perf_counter()
        builds = [threading.Thread(target=load_sparse_ops),
                  threading.Thread(target=lambda: module.get_ext(["twell_mlp"]))]
        for build in builds:
            build.start()
        for build in builds:
            build.join()
        print(f"the published code was compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        self.module = module
        self.layers = 0

    def mlp(self, gate, up, down, **options):
        self.layers += 1
        return self.module.TwELLGatedMLP(self.layers, gate, up, down, **options)

    @staticmethod
    def train(x, gate, up, down):
        y, _, l1 = torch.ops.sparse_ops.ff_forward_gated(x[None], gate, up, down)[:3]
        return y[0], l1


# ---- layers ----


def pattern_layers(file, tokens, width, ffn):
    from safetensors.torch import load_file

    captured = {name: tensor.int() for name, tensor in load_file(file).items()}
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(width, width, device="cuda"))[0] * width**0.5
    for name in sorted(n.split(".")[0] for n in captured if n.endswith(".row_nnz")):
        counts = captured[f"{name}.row_nnz"][:width]
        columns = captured[f"{name}.col"][: counts.sum()]
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        sign = -torch.ones(width, ffn, device="cuda")
        sign[rows.cuda(), columns.long().cuda()] = 1.0
        sign *= 0.5 + torch.rand_like(sign)
        gate = sign.t() @ x / width  # x / sqrt(D) is orthogonal, so x gate^T = sign
        up, down = (torch.randn(ffn, width, device="cuda") * 0.02 for _ in range(2))
        label = f"{pathlib.Path(file).stem.removeprefix('activation_patterns_')} {name}"
        yield Layer(label, x.repeat(tokens // width, 1), gate, up, down)


def checkpoint_model(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    model.config.use_cache = False
    return model


def checkpoint_layers(model, folder, text, tokens, length=2048):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(pathlib.Path(text).read_text()[: 16 * tokens])["input_ids"][:tokens]
    assert len(ids) == tokens, f"{text} has {len(ids)} tokens, fewer than {tokens}"
    inputs = {}
    hooks = [layer.mlp.register_forward_pre_hook(
        lambda module, args, k=k: inputs.__setitem__(k, args[0].flatten(0, -2).clone()))
        for k, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        model.model(torch.tensor(ids, device="cuda").view(-1, length))
    for hook in hooks:
        hook.remove()
    for k, layer in enumerate(model.model.layers):
        mlp = layer.mlp
        yield Layer(f"trained layer {k}", inputs[k], mlp.gate_proj.weight.data,
                    mlp.up_proj.weight.data, mlp.down_proj.weight.data.t())


def attempt(run):
    """The result, or why there is none."""
    try:
        result = run()
        torch.cuda.synchronize()
        return result, None
    except Exception as failure:  # a CUDA error ends the process at its next call
        if "illegal" in str(failure) or "launch failure" in str(failure):
            raise
        return None, str(failure).strip().splitlines()[0][:100]


def measure_layers(peer, layers, rows, wide_too):
    print(f"\nInference of one layer, {layers[0].x.shape[0]} tokens, D {layers[0].x.shape[1]}, F "
          f"{layers[0].gate.shape[0]}; ms, ratio to dense, error of all and of the worst token")
    for layer in layers:
        operands = (layer.x, layer.gate, layer.up, layer.down)
        want = layer.in_f32()
        plan = twell.Plan()
        with torch.no_grad():
            twell.ffn(*operands, plan)
            plan.update(layer.x.shape[1], layer.gate.shape[0], True, cuda=True)
            mlp = peer.mlp(*operands[1:])
            wide = peer.mlp(*operands[1:], compression_factor=2, flex_kernels=True)
            variants = {
                "dense": lambda: dense(*operands),
                "dense compiled": lambda: compiled_dense(*operands),
                "published": lambda: mlp(layer.x),
                "this engine": lambda: twell.ffn(*operands, plan),
            }
            if wide_too:
                variants["published, 128"] = lambda: wide(layer.x)
            measure(layer, "inference", variants, want, rows, lambda got: [got])
            mlp.destroy()
            wide.destroy()


def measure_training(peer, layers, rows):
    print(f"\nForward and backward of one layer, {layers[0].x.shape[0]} tokens; ms, ratio to dense, "
          "largest error of y and the four gradients against float32")
    for layer in layers:
        operands = [t.clone().requires_grad_() for t in (layer.x, layer.gate, layer.up, layer.down)]
        d_y = torch.randn_like(layer.x)
        want = in_f32(operands, d_y)
        plan = twell.Plan()
        for _ in range(2):
            counts = twell.ffn_train(*operands, plan)[2]
            plan.update(layer.x.shape[1], layer.gate.shape[0], True, cuda=True)

        def both(forward):
            y, _ = forward(*operands)
            return [y.detach(), *torch.autograd.grad(y, operands, d_y)]

        variants = {
            "dense": lambda: both(lambda *t: (dense(*t), None)),
            "dense compiled": lambda: both(lambda *t: (compiled_dense(*t), None)),
            "published": lambda: both(peer.train),
            "this engine": lambda: both(lambda *t: twell.ffn_train(*t, plan)[:2]),
        }
        measure(layer, "training", variants, want, rows, lambda got: got)
        del want, operands, counts
        torch.cuda.empty_cache()


def in_f32(operands, d_y):
    """y and the gradients in float32, a part of the tokens at a time."""
    wide = [t.detach().float().requires_grad_() for t in operands[1:]]
    ys, d_xs = [], []
    for x, d in zip(operands[0].split(2048), d_y.split(2048)):
        x = x.detach().float().requires_grad_()
        y = dense(x, *wide)
        y.backward(d.float())
        ys.append(y.detach())
        d_xs.append(x.grad)
    return [torch.cat(ys), torch.cat(d_xs), *(t.grad for t in wide)]


def measure(layer, what, variants, want, rows, results):
    want = [want] if torch.is_tensor(want) else want
    base = None
    for name, run in variants.items():
        got, why = attempt(run)
        row = {"what": what, "layer": layer.name, "active": round(layer.active, 1),
               "most": layer.most, "variant": name}
        if why is None:
            errors = [error(g, w) for g, w in zip(results(got), want)]
            del got
            ms = events(run)
            base = base or ms[0]
            row |= {"ms": [round(t, 4) for t in ms], "ratio": round(base / ms[0], 3),
                    "error": max(e[0] for e in errors), "worst token": errors[0][1]}
            print(f"{layer.name:24} {layer.active:7.1f} active (most {layer.most:5d})  {name:15} "
                  f"{ms[0]:8.3f}  {row['ratio']:5.2f}x  {row['error']:.1e}  {row['worst token']:.1e}",
                  flush=True)
        else:
            row["refused"] = why
            print(f"{layer.name:24} {layer.active:7.1f} active (most {layer.most:5d})  {name:15} "
                  f"{why}", flush=True)
        rows.append(row)


EDGES = [  # name, tokens, D, F, active neurons of every token
    ("a token of all neurons", 2048, 2048, 5632, 24),
    ("1,000 tokens", 1000, 2048, 5632, 24),
    ("one token", 1, 2048, 5632, 24),
    ("D 2560, F 6912", 2048, 2560, 6912, 24),
    ("D 4096, F 11008", 2048, 4096, 11008, 24),
    ("F 5640", 2048, 2048, 5640, 24),
    ("64 active of one tile", 2048, 2048, 5632, 64),
]


def edge(variant, number, peer_folder):
    """What one of the two does with a size or an input off its path, as one line."""
    name, tokens, width, ffn, active = EDGES[number]
    torch.manual_seed(1)
    x = torch.randn(tokens, width, device="cuda")
    x[:, 0] = 8.0
    gate = torch.randn(ffn, width, device="cuda") * 1e-3
    gate[:, 0] = -1.0
    gate[:active, 0] = 1.0  # neighbouring neurons, as the first of a tile
    if name.startswith("a token"):
        x[7, 0] = -8.0  # where the others are silent, this one fires
    up, down = (torch.randn(ffn, width, device="cuda") * 0.02 for _ in range(2))
    layer = Layer(name, x, gate, up, down)
    operands = (layer.x, layer.gate, layer.up, layer.down)
    want = layer.in_f32()
    with torch.no_grad():
        if variant == "published":
            mlp = Peer(peer_folder).mlp(*operands[1:])
            got, why = attempt(lambda: mlp(layer.x))
        else:
            got, why = attempt(lambda: twell.ffn(*operands, twell.Plan()))
        return why or "{:.1e} (worst token {:.1e})".format(*error(got, want))


def edges(args, rows):
    """Each in a process of its own: an assertion of the published code ends the process."""
    print("\nEdges: error of the whole result against float32, or how it ended")
    for number, case in enumerate(EDGES):
        for variant in "published", "this engine":
            ran = subprocess.run(
                [sys.executable, __file__, "--peer", args.peer, "--edge", variant, str(number)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
            text = last.removeprefix("edge: ") if ran.returncode == 0 else (
                f"the process ended with {ran.returncode}: {last[-100:]}")
            print(f"{case[0]:24} {variant:12} {text}", flush=True)
            rows.append({"what": "edge", "layer": case[0], "variant": variant, "outcome": text})


# ---- a whole model ----


@contextlib.contextmanager
def energy():
    """Joules of the GPU while it is open, in its result."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    result = {}
    begin = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    yield result
    torch.cuda.synchronize()
    result["joules"] = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - begin) / 1e3


def measure_model(peer, model, args, rows):
    batch, length = args.batch, 2048
    generator = torch.Generator(device="cuda").manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator, device="cuda")
    mlps = [layer.mlp for layer in model.model.layers]
    print(f"\nBody of {args.checkpoint}, {batch} x {length} random tokens: K tokens/s, mJ per token")
    base = None

    def run():
        with torch.inference_mode():
            return model.model(ids).last_hidden_state

    def time_it(name, result_of):
        nonlocal base
        got, why = attempt(result_of)
        if why:
            print(f"{name:28} {why}")
            rows.append({"what": "model", "variant": name, "refused": why})
            return None
        ms = events(run, repeats=args.repeats, warmup=2)
        with energy() as used:
            for _ in range(args.repeats):
                run()
        base = base or ms[0]
        row = {"what": "model", "variant": name, "ms": [round(t, 2) for t in ms],
               "K tokens/s": round(batch * length / ms[0], 1), "ratio": round(base / ms[0], 3),
               "mJ/token": round(used["joules"] * 1e3 / (args.repeats * batch * length), 3)}
        rows.append(row)
        print(f"{name:28} {row['K tokens/s']:8.1f}  {row['ratio']:5.2f}x  {row['mJ/token']:.3f} mJ",
              flush=True)
        return got

    want = time_it("PyTorch, eager, dense", run)
    for layer, mlp in zip(model.model.layers, mlps):
        layer.mlp = peer.mlp(mlp.gate_proj.weight.data, mlp.up_proj.weight.data,
                             mlp.down_proj.weight.data.t().contiguous())
    got = time_it("published kernels, eager", run)
    if got is not None:
        print("   differs from dense by {:.1e} (worst token {:.1e})".format(*error(got, want)))
    for layer, mlp in zip(model.model.layers, mlps):
        layer.mlp.destroy()
        layer.mlp = mlp
    twell.patch(model)
    run()
    twell.update(model)
    got = time_it("this engine's layers, eager", run)
    if got is not None:
        print("   differs from dense by {:.1e} (worst token {:.1e})".format(*error(got, want)))
    twell.unpatch(model)


def main():
    global compiled_dense
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer", required=True, type=pathlib.Path, help="folder of the published code")
    parser.add_argument("--patterns", action="append", default=[], help="captured activations")
    parser.add_argument("--checkpoint", help="a trained model, gated, D 2048, F 5632")
    parser.add_argument("--text", help="its layers get inputs from this text")
    parser.add_argument("--tokens", type=int, default=16384, help="of a layer; a multiple of 2,048")
    parser.add_argument("--model", action="store_true", help="the whole checkpoint too")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 2,048 of --model")
    parser.add_argument("--repeats", type=int, default=10, help="of --model")
    parser.add_argument("--skip-edges", action="store_true")
    parser.add_argument("--edge", nargs=2, metavar=("VARIANT", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--jsonl", help="appends the rows to this file")
    args = parser.parse_args()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    torch.backends.cuda.matmul.allow_tf32 = False
    compiled_dense = torch.compile(dense, dynamic=False)

    if args.edge:
        print("edge:", edge(args.edge[0], int(args.edge[1]), args.peer))
        return

    rows = []
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    peer = Peer(args.peer)
    model = checkpoint_model(args.checkpoint) if args.checkpoint else None
    groups = [list(pattern_layers(file, args.tokens, 2048, 5632)) for file in args.patterns]
    if model is not None and args.text:
        groups.append(list(checkpoint_layers(model, args.checkpoint, args.text, args.tokens)))
    for number, layers in enumerate(groups):
        measure_layers(peer, layers, rows, wide_too=number < len(args.patterns))
        measure_training(peer, layers, rows)
    if model is not None and args.model:
        measure_model(peer, model, args, rows)
    if not args.skip_edges:
        edges(args, rows)
    if args.jsonl:
        with open(args.jsonl, "a") as file:
            for row in rows:
                file.write(json.dumps(row | {"gpu": torch.cuda.get_device_name()}) + "\n")


if __name__ == "__main__":
    main()
