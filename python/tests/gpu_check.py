# SPDX-License-Identifier: Apache-2.0
"""Checks and measures the package on one GPU; exits 1 if a check fails.

    python python/tests/gpu_check.py --patterns FILE         all parts, with a Llama of preset 0.5b
    python python/tests/gpu_check.py --only model --preset 2b --train-batch 8 --patterns FILE
    python python/tests/gpu_check.py --only model --checkpoint DIR [--tokens FILE]
    python python/tests/gpu_check.py --only model --limits --patterns FILE
    python python/tests/gpu_check.py --only ops    or another part, see --help

--patterns: activations captured from a trained model, as `twell bench ffn --patterns` takes them.
The model's weights are random but for the gates, which are computed so that exactly the captured
neurons fire: position t of every sequence has the pattern of the file's token t. Patched and
unpatched models compute the same numbers. Without a file, gates are shifted so that about 1% of the
neurons fire, some often and most seldom. Rows say which of them they are.

--limits: also what a training step can gain at most (feed-forward layers that take no time, and
that take what the engine's kernels take), and the kernels of both models' steps.
"""

import argparse
import copy
import json
import re
import statistics
import sys
import tempfile
import threading
import time

import psutil
import torch

import twell

FAILED = []


def check(name, ok, detail=""):
    print(f"{'ok  ' if ok else 'FAIL'} {name}{': ' + detail if detail else ''}", flush=True)
    if not ok:
        FAILED.append(name)


def relative(got, want):
    want = want.float()
    return ((got.float() - want).norm() / want.norm().clamp_min(1e-30)).item()


def milliseconds(run, repeats=10, warmup=3):
    """Median, p10 and p90 of a call, by events; the caller keeps results alive."""
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


# ---- ops ----


def operands(tokens, width, neurons, gated, active=0.01):
    """bf16 operands; channel 0 of x is constant, and the firing projection's weights for it make a
    neuron fire on about `active` of the tokens, some often and most seldom."""
    x = torch.randn(tokens, width, device="cuda")
    x[:, 0] = 8.0
    weights = [torch.randn(neurons, width, device="cuda") / width**0.5 for _ in range(3)]
    rate = (torch.arange(1, neurons + 1, device="cuda") ** -1.2)[torch.randperm(neurons)]
    rate = (rate / rate.mean() * active).clamp(1e-5, 0.5)
    weights[0 if gated else 1][:, 0] = -torch.special.ndtri(1 - rate) / 8.0
    x, *weights = (t.bfloat16() for t in (x, *weights))
    return [x, weights[0] if gated else None, weights[1], weights[2]]


def eager(x, w_gate, w_up, w_down, activation="relu"):
    def f(t):
        return torch.relu(t).square() if activation == "relu2" else torch.relu(t)

    u = x @ w_up.t()
    h = f(u) if w_gate is None else f(x @ w_gate.t()) * u
    return h @ w_down, h.abs().sum(dtype=torch.float32)


def leaves(tensors, dtype):
    return [t.detach().to(dtype).requires_grad_() if t is not None else None for t in tensors]


def results(run, tensors, d_y, l1_scale):
    y, l1, *_ = run(*tensors)
    ((y.float() * d_y).sum() + l1_scale * l1).backward()
    return {"y": y.detach(), "l1": l1.detach()} | {
        name: t.grad for name, t in zip(("d_x", "d_gate", "d_up", "d_down"), tensors) if t is not None
    }


def prepared_plan(policy, tensors):
    """A plan that has seen a call of these operands."""
    plan = twell.Plan(policy)
    twell.ffn_train(*leaves(tensors, torch.bfloat16), plan)
    neurons, width = tensors[2].shape
    plan.update(width, neurons, tensors[1] is not None, cuda=True)
    return plan


def check_ops():
    shapes = [(1, 2048, 5632), (7, 256, 1024), (64, 2048, 5632), (127, 256, 8192),
              (129, 512, 1408), (4096, 2048, 5632), (20000, 512, 2048)]
    for tokens, width, neurons in shapes:
        for gated in (True, False):
            for active in (0.01, 0.4):
                tensors = operands(tokens, width, neurons, gated, active)
                d_y = torch.randn(tokens, width, device="cuda")
                scale = 1e-3
                # relu2 shares all but the elementwise steps with relu.
                act = "relu2" if tokens in (7, 129, 4096) and active == 0.01 else "relu"
                exact = results(lambda *t: eager(*t, act), leaves(tensors, torch.float32), d_y, scale)
                plain = results(lambda *t: eager(*t, act), leaves(tensors, torch.bfloat16), d_y, scale)
                for policy in ("dense", "sparse", "auto"):
                    plan = prepared_plan(policy, tensors)
                    got = results(lambda *t: twell.ffn_train(*t, plan, act),
                                  leaves(tensors, torch.bfloat16), d_y, scale)
                    with torch.no_grad():
                        got["inference"] = twell.ffn(*tensors, plan, act)
                    worst, detail = 0.0, ""
                    for name, value in got.items():
                        of = "y" if name == "inference" else name
                        error = relative(value, exact[of])
                        # Our error may exceed that of bf16 PyTorch only by the order of additions.
                        limit = 1.5 * relative(plain[of], exact[of]) + 2e-3
                        if error / limit > worst:
                            worst, detail = error / limit, f"{name} {error:.2e}, limit {limit:.2e}"
                    kind = "gated" if gated else "plain"
                    check(f"op {policy} {kind} {act} M {tokens} D {width} F {neurons} active {active}",
                          worst <= 1.0 and all(torch.isfinite(v).all() for v in got.values()), detail)

    tensors = operands(512, 256, 1024, True)
    plan = prepared_plan("auto", tensors)
    first = results(lambda *t: twell.ffn_train(*t, plan), leaves(tensors, torch.bfloat16), 1.0, 1e-3)
    again = results(lambda *t: twell.ffn_train(*t, plan), leaves(tensors, torch.bfloat16), 1.0, 1e-3)
    check("repeats bit for bit", all(torch.equal(first[k], again[k]) for k in first))

    counts = twell.ffn_train(*leaves(tensors, torch.bfloat16), plan)[2].tolist()
    fired = (tensors[0] @ tensors[1].t() > 0).sum(1)
    check("counts", counts[0] == 512 and abs(counts[1] - fired.sum().item()) <= 0.01 * counts[1],
          f"{counts}, PyTorch counts {fired.sum().item()}")

    for dtype in (torch.float32, torch.float16):
        try:
            twell.ffn(*(t.to(dtype) for t in tensors))
            check(f"refuses {dtype}", False)
        except RuntimeError as error:
            check(f"refuses {dtype}", "bfloat16 on a GPU" in str(error))
    plan_of = ("relu", plan.handle, plan.execution, plan.nnz, plan.union_neurons)
    saved = torch.ops.twell.ffn_train(*tensors, *plan_of)[3]
    for name, other in {"short": saved[:-8], "on the CPU": saved.cpu(), "no bytes": saved.char()}.items():
        try:
            torch.ops.twell.ffn_train_backward(
                torch.ones_like(tensors[0]), None, *tensors, other, *plan_of)
            check(f"refuses `saved` that is {name}", False)
        except RuntimeError as error:
            check(f"refuses `saved` that is {name}", "bytes that ffn_train returned" in str(error))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wide = leaves(tensors, torch.float32)
        y, _, _ = twell.ffn_train(*wide, plan)
    y.float().sum().backward()
    check("autocast", y.dtype == torch.bfloat16 and wide[2].grad.dtype == torch.float32)


def check_compile_and_graphs():
    tensors = operands(2048, 512, 1408, True)
    plan = prepared_plan("auto", tensors)

    def step(x, w_gate, w_up, w_down):
        y, l1, _ = twell.ffn_train(torch.nn.functional.silu(x), w_gate, w_up, w_down, plan)
        return torch.tanh(y), l1

    d_y = torch.randn(2048, 512, device="cuda")
    want = results(step, leaves(tensors, torch.bfloat16), d_y, 1e-3)
    compiled = torch.compile(step, fullgraph=True)
    got = results(compiled, leaves(tensors, torch.bfloat16), d_y, 1e-3)
    worst = max(relative(got[k], want[k]) for k in want)
    check(f"torch.compile, {('dense', 'hybrid')[plan.execution]}", worst < 1e-2, f"{worst:.1e}")

    for tokens in (1, 8, 40, 2048):
        x = tensors[0][:tokens].clone()
        with torch.no_grad():
            want_y = twell.ffn(x, *tensors[1:], plan)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = twell.ffn(x, *tensors[1:], plan)
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            check(f"CUDA graph of inference, {tokens} tokens", torch.equal(y, want_y))

    captured = leaves(tensors, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(step, captured, d_y, 1e-3)
    torch.cuda.current_stream().wait_stream(side)
    for t in captured:
        t.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = results(step, captured, d_y, 1e-3)
    for value in static.values():
        value.zero_()
    graph.replay()
    torch.cuda.synchronize()
    check("CUDA graph of a training step", all(torch.equal(static[k], want[k]) for k in want))

    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        got = results(step, leaves(tensors, torch.bfloat16), d_y, 1e-3)
    other.synchronize()
    check("another stream", all(torch.equal(got[k], want[k]) for k in want))


def captured(run, stream=None):
    """A CUDA graph of run(), captured on `stream`, and what run() returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return graph, out


def check_graphs_at_once():
    """Graphs captured on one stream and replayed at once on two, each of many calls that leave the
    GPU room for the other's."""
    capture_stream = torch.cuda.Stream()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for policy, tokens in (("dense", 40), ("auto", 40), ("sparse", 40), ("auto", 700)):
        tensors = operands(tokens, 1024, 2816, True)
        plan = twell.Plan(policy)

        def layers(x):
            outs = []
            for _ in range(20):
                outs.append(twell.ffn(x, *tensors[1:], plan))
                x = torch.nn.functional.rms_norm(outs[-1].float(), (1024,)).bfloat16()
            return torch.stack(outs)

        inputs = [torch.randn_like(tensors[0]) for _ in range(2)]
        with torch.no_grad():
            want = [layers(x) for x in inputs]
            both = [captured(lambda x=x: layers(x), capture_stream) for x in inputs]
            same = True
            for _ in range(20):
                torch.cuda.synchronize()
                for (graph, _), stream in zip(both, streams):
                    with torch.cuda.stream(stream):
                        graph.replay()
                torch.cuda.synchronize()
                same = same and all(torch.equal(y, w) for (_, y), w in zip(both, want))
        check(f"two graphs at once, {policy}, {tokens} tokens", same)

    # Training, whose counts of a call belong to the graph too.
    tensors = operands(256, 512, 1408, True)
    plan = prepared_plan("auto", tensors)
    inputs = [[t * 1.0 for t in tensors] for _ in range(2)]
    inputs[1][0] = torch.randn_like(tensors[0])

    def many(x):
        with torch.no_grad():
            out = [twell.ffn_train(*x, plan) for _ in range(20)]
        return torch.stack([y for y, _, _ in out]), torch.stack([l1 for _, l1, _ in out])

    want = [many(x) for x in inputs]
    both = [captured(lambda x=x: many(x), capture_stream) for x in inputs]
    same = True
    for _ in range(20):
        torch.cuda.synchronize()
        for (graph, _), stream in zip(both, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        same = same and all(
            torch.equal(g, w) for (_, got), wanted in zip(both, want) for g, w in zip(got, wanted)
        )
    check("two graphs of ffn_train at once", same)


def check_graphs_and_plans():
    """Plans come and go while streams are captured; graphs and maps of plans give memory back."""
    tensors = operands(40, 512, 1408, True)
    with torch.no_grad():
        plan, *others = (twell.Plan() for _ in range(3))
        for one in (plan, *others):
            twell.ffn(*tensors, one)
        torch.cuda.synchronize()

        def run():
            y = twell.ffn(*tensors, plan)
            # Released with their memory, the first by another thread.
            helper = threading.Thread(target=others.pop)
            helper.start()
            helper.join()
            others.clear()
            return y + twell.ffn(*tensors, plan)

        want = 2 * twell.ffn(*tensors, plan)
        try:
            graph, y = captured(run)
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            check("a plan released during a capture", torch.equal(y, want))
            del graph, y
        except RuntimeError as error:
            check("a plan released during a capture", False, str(error).splitlines()[0])
            return

        free = []
        for _ in range(12):
            graph, y = captured(lambda: twell.ffn(*tensors, plan))
            graph.replay()
            torch.cuda.synchronize()
            del graph, y
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        check("graphs give their workspaces back", free[-1] >= free[3], f"{free[3] - free[-1]} bytes")

        x = torch.randn(6000, 512, device="cuda").bfloat16()
        dense = twell.Plan("dense")

        def grown(sizes):
            before = psutil.Process().memory_info().rss
            for tokens in sizes:
                twell.ffn(x[:tokens], *tensors[1:], dense)
            torch.cuda.synchronize()
            return (psutil.Process().memory_info().rss - before) >> 10

        # The first rounds touch memory that the libraries keep; those after them find it there.
        first = grown(range(100, 1100)) + grown(range(1100, 6000, 2))
        then = sum(grown(range(begin, 6000, 3)) for begin in (101, 102, 103))
        check("numbers of tokens take bounded memory", then < 4096, f"{first}, then {then} KiB")


def per_call(run, calls=10):
    """Microseconds of one call: on the device, of the same calls replayed as a CUDA graph, which
    leaves out what Python and PyTorch add, and of the host alone."""
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            kept = run()

    def loop():
        for _ in range(calls):
            run()

    called, replayed = (milliseconds(f)[0] * 1e3 / calls for f in (loop, graph.replay))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loop()
    host = (time.perf_counter() - begin) * 1e6 / calls
    torch.cuda.synchronize()
    del kept, graph
    return called, replayed, host


def measure_overhead():
    print("\none layer, D 2048, F 5632, gated, 1% active (synthetic); microseconds of a call of the op, "
          "of the engine's kernels alone (the call in a CUDA graph), of the host, and of PyTorch")
    print(f"{'tokens':>8} {'op':>9} {'kernels':>9} {'host':>7} {'PyTorch':>9}  inference")
    for tokens in (1, 8, 64, 512, 4096, 16384, 32768):
        tensors = operands(tokens, 2048, 5632, True)
        plan = twell.Plan()
        with torch.no_grad():
            twell.ffn(*tensors, plan)
            plan.update(2048, 5632, True, cuda=True)
            called, replayed, host = per_call(lambda: twell.ffn(*tensors, plan))
            dense = per_call(lambda: eager_forward(*tensors))[0]
        plan.update(2048, 5632, True, cuda=True)
        print(f"{tokens:8d} {called:9.1f} {replayed:9.1f} {host:7.1f} {dense:9.1f}  "
              f"{plan.inference_execution}, {called / replayed - 1:.1%} over the kernels", flush=True)
    print(f"{'tokens':>8} {'op':>9} {'kernels':>9} {'host':>7} {'PyTorch':>9}  forward and backward")
    rounding = [torch.randn(5632, 2048, device="cuda") for _ in range(3)]
    rounded = per_call(lambda: [t.bfloat16() for t in rounding])[1]
    for tokens in (2048, 16384):
        tensors = leaves(operands(tokens, 2048, 5632, True), torch.bfloat16)
        plan = prepared_plan("auto", tensors)
        d_y = torch.randn(tokens, 2048, device="cuda").bfloat16()

        def both(run):
            y, l1 = run(*tensors)[:2]
            return torch.autograd.grad([y, l1], tensors, [d_y, torch.ones_like(l1)])

        called, replayed, host = per_call(lambda: both(lambda *t: twell.ffn_train(*t, plan)), 4)
        dense = per_call(lambda: both(eager), 4)[0]
        print(f"{tokens:8d} {called:9.1f} {replayed:9.1f} {host:7.1f} {dense:9.1f}  "
              f"{('dense', 'hybrid')[plan.execution]}, {called / (replayed - rounded) - 1:.1%} over "
              f"the kernels without the rounding of gradients to bf16, {rounded:.0f}", flush=True)


def eager_forward(x, w_gate, w_up, w_down):
    return (torch.relu(x @ w_gate.t()) * (x @ w_up.t())) @ w_down


# ---- models ----

LAYERS = {"0.5b": 8, "1b": 18, "1.5b": 28, "2b": 38}
LENGTH = 2048


def make_model(args):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if args.checkpoint:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
        model.config.use_cache = False
        return model.cuda(), f"trained ({args.checkpoint})"
    config = LlamaConfig(
        vocab_size=49152, hidden_size=2048, intermediate_size=5632,
        num_hidden_layers=LAYERS[args.preset], num_attention_heads=32, num_key_value_heads=32,
        hidden_act="relu", max_position_embeddings=LENGTH, tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    if not args.patterns:
        make_sparse(model)
        return model, "synthetic"
    put_patterns(model, args.patterns)
    return model, f"captured ({args.patterns.rsplit('/', 1)[-1]}), put into random weights"


@torch.no_grad()
def make_sparse(model, active=0.01):
    """Shifts the gates of a random model through channel 0 of the residual, layer by layer."""
    model.model.embed_tokens.weight[:, 0] = 0.1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0

    def shift(module, inputs):
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        weight = module.weight
        weight[:, 0] = 0.0
        neurons = weight.shape[0]
        values = x @ weight.float().t() / x[:, :1]
        rate = torch.arange(1, neurons + 1, device=x.device) ** -1.2
        rate = (rate / rate.mean() * active).clamp(1e-5, 0.5)[torch.randperm(neurons)]
        ordered = values.sort(dim=0).values
        index = ((1 - rate) * (len(x) - 1)).round().long()
        weight[:, 0] = -ordered.gather(0, index[None])[0].to(weight.dtype)

    hooks = [layer.mlp.gate_proj.register_forward_pre_hook(shift) for layer in model.model.layers]
    model(token_ids(model, 2, 1024))
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def put_patterns(model, file):
    """Solves for gates that fire as captured on the tokens 0 to 2047. Their embeddings are rows of
    an orthogonal matrix and stay the larger part of the residual, so the inputs X of a gate are
    well conditioned, and X W^T = S has a solution for any signs S."""
    from safetensors.torch import load_file

    captured = {name: tensor.int() for name, tensor in load_file(file).items()}
    captures = sorted(name.split(".")[0] for name in captured if name.endswith(".row_nnz"))
    layers, width = model.model.layers, model.config.hidden_size
    assert width == LENGTH, "as many tokens as channels can be orthogonal"
    model.model.embed_tokens.weight[:LENGTH] = torch.linalg.qr(
        torch.randn(LENGTH, width, device="cuda"))[0]
    for layer in layers:
        layer.self_attn.o_proj.weight.mul_(0.002)
        layer.mlp.down_proj.weight.mul_(0.002)

    def fire(name):
        def solve(module, inputs):
            counts = captured[f"{name}.row_nnz"][:LENGTH]
            columns = captured[f"{name}.col"][: counts.sum()]
            rows = torch.repeat_interleave(torch.arange(LENGTH), counts)
            wanted = -torch.ones(LENGTH, module.weight.shape[0], device="cuda")
            wanted[rows.cuda(), columns.long().cuda()] = 1.0
            wanted *= 0.5 + torch.rand_like(wanted)
            module.weight.copy_(torch.linalg.solve(inputs[0][0].float(), wanted).t())
        return solve

    used = [captures[k * len(captures) // len(layers)] for k in range(len(layers))]
    hooks = [layer.mlp.gate_proj.register_forward_pre_hook(fire(name))
             for layer, name in zip(layers, used)]
    model(token_ids(model, 1, LENGTH))
    for hook in hooks:
        hook.remove()
    mean = statistics.mean(
        captured[f"{name}.row_nnz"][:LENGTH].float().mean().item() for name in used)
    print(f"captured patterns: {mean:.1f} active neurons per token, mean over layers", flush=True)


def token_ids(model, batch, length, file=None):
    if file:
        ids = torch.from_file(file, size=batch * length, dtype=torch.uint16)
        return ids.view(batch, length).long().cuda()
    return torch.arange(length, device="cuda").repeat(batch, 1)


def head_loss(hidden, weight, labels):
    """Cross-entropy of the next tokens. Compiled, so that its casts and sums are one pass in both
    models."""
    logits = torch.nn.functional.linear(hidden[:, :-1], weight).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def compiled(model, how):
    """(body, head) with compiled layers, or with the body compiled as a whole."""
    torch._dynamo.reset()
    if how == "none":
        return model.model, head_loss
    head = torch.compile(head_loss, fullgraph=True)
    if how == "full":
        return torch.compile(model.model, fullgraph=True), head
    # One graph for all layers, which differ in the integers of their plans.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in model.model.layers:
        layer.compile()
    return model.model, head


def uncompiled(model):
    for layer in model.model.layers:
        layer._compiled_call_impl = None


def train_step(model, run, ids, optimizer, l1_coefficient):
    body, head = run
    loss = head(body(input_ids=ids).last_hidden_state, model.lm_head.weight, ids)
    if l1_coefficient:
        loss = loss + l1_coefficient * twell.l1(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def memory():
    """GB at the peak in PyTorch's allocator, and GB of the device outside it."""
    free, total = torch.cuda.mem_get_info()
    return (round(torch.cuda.max_memory_allocated() / 1e9, 2),
            round((total - free - torch.cuda.memory_reserved()) / 1e9, 2))


def measure_model(model, kind, patched, args):
    """Forward and training step of the model as it is; a dict of figures."""
    row = {"model": "patched" if patched else "unpatched", "patterns": kind, "compile": args.compile}
    ids = token_ids(model, args.batch, LENGTH, args.tokens)
    if patched:
        with torch.no_grad():
            model.model(ids)
        twell.update(model)
        layers = twell.stats(model)
        row["nnz"] = round(statistics.mean(s.inference_nnz_per_token for s in layers), 1)
        row["forward runs"] = {e: sum(s.execution == e for s in layers)
                               for e in sorted({s.execution for s in layers})}
    body, head = compiled(model, args.compile)
    begin = time.perf_counter()
    with torch.no_grad():
        body(input_ids=ids)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row["forward ms"] = [round(t, 2) for t in milliseconds(lambda: body(input_ids=ids))]
        row["forward GB, besides"] = memory()
    row["forward s"] = round(time.perf_counter() - begin, 1)
    uncompiled(model)
    torch.cuda.empty_cache()

    begin = time.perf_counter()
    ids = token_ids(model, args.train_batch, LENGTH, args.tokens)
    l1 = args.l1 if patched else 0.0
    if patched:
        for _ in range(2):
            train_step(model, (model.model, head_loss), ids, still_optimizer(model), l1)
            twell.update(model)
        layers = twell.stats(model)
        row["training runs"] = {e: sum(s.execution == e for s in layers) for e in ("dense", "hybrid")}
        row["train nnz"] = round(statistics.mean(s.nnz_per_token for s in layers), 1)
    row |= measure_step(model, ids, l1, args)
    row["train s"] = round(time.perf_counter() - begin, 1)
    return row


def still_optimizer(model):
    """Changes the weights so little that patterns stay what they are."""
    return torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True, weight_decay=0.0)


def measure_step(model, ids, l1, args):
    """Time, memory and loss of a compiled training step."""
    optimizer = still_optimizer(model)
    run = compiled(model, args.compile)
    row = {"loss": round(train_step(model, run, ids, optimizer, 0.0).item(), 5)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row["train ms"] = [round(t, 2) for t in milliseconds(
        lambda: train_step(model, run, ids, optimizer, l1), repeats=args.steps, warmup=2)]
    row["train GB, besides"] = memory()
    if args.limits:
        row["kernels"] = kernel_times(lambda: train_step(model, run, ids, optimizer, l1))
    uncompiled(model)
    optimizer.zero_grad(set_to_none=True)
    del optimizer
    torch.cuda.empty_cache()
    return row


KERNELS = {"twell": "twell", "attention": "flash|fmha|cudnn.*sdpa", "optimizer": "adam",
           "copies": "memcpy|memset", "compiled": "^triton", "products": "nvjet|gemm|cutlass|cublas"}


def kernel_times(run):
    """Milliseconds of a call's kernels: by kind, and of those that took longest."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kinds, kernels = dict.fromkeys((*KERNELS, "other"), 0.0), []
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1e3
        kind = next((k for k, names in KERNELS.items() if re.search(names, event.key, re.I)), "other")
        kinds[kind] += ms
        kernels.append((ms, event.count, event.key))
    longest = [f"{ms:.2f} ({count}) {re.sub('<.*|void |twell::', '', key)[-48:]}"
               for ms, count, key in sorted(kernels, reverse=True)[:14]]
    return {kind: round(ms, 2) for kind, ms in kinds.items()} | {"longest": longest}


def measure_without_ffn(model, args):
    """A training step of the model whose feed-forward layers return their input."""
    layers = model.model.layers
    kept = [layer.mlp for layer in layers]
    for layer in layers:
        layer.mlp = torch.nn.Identity()
    ids = token_ids(model, args.train_batch, LENGTH, args.tokens)
    row = measure_step(model, ids, 0.0, args)
    for layer, mlp in zip(layers, kept):
        layer.mlp = mlp
    return row


def measure_engine(model, args):
    """Milliseconds of the kernels of all feed-forward layers, forward and backward, on the inputs
    that they have in the model: as CUDA graphs, which leave out Python and PyTorch."""
    inputs = []
    modules = [layer.mlp for layer in model.model.layers]
    hooks = [m.register_forward_pre_hook(lambda _, a: inputs.append(a[0].detach().flatten(0, 1)))
             for m in modules]
    with torch.no_grad():
        model.model(token_ids(model, args.train_batch, LENGTH, args.tokens))
    for hook in hooks:
        hook.remove()
    times = []
    for module, x in zip(modules, inputs):
        tensors = leaves([x, module.gate_proj.weight, module.up_proj.weight,
                          module.down_proj.weight.t()], torch.bfloat16)
        d_y = torch.randn_like(x)

        def both():
            y, l1, _ = twell.ffn_train(*tensors, module._twell.plan)
            return torch.autograd.grad([y, l1], tensors, [d_y, torch.ones_like(l1)])

        times.append(per_call(both, 1)[1] / 1e3)
    return times


def check_model(args):
    model, kind = make_model(args)
    if args.save:
        model.save_pretrained(args.save)
        return
    if not args.unchecked:
        compare_with_f32(model, args)
    measure_both(model, kind, args)


def compare_with_f32(model, args):
    ids = token_ids(model, 1, LENGTH, args.tokens)

    def outcome(m):
        m.zero_grad()
        hidden = m.model(input_ids=ids).last_hidden_state
        loss = head_loss(hidden, m.lm_head.weight, ids)
        loss.backward()
        found = {"hidden": hidden.detach(), "loss": loss.detach()}
        found |= {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
        m.zero_grad(set_to_none=True)
        return found

    exact = outcome(copy.deepcopy(model).float())
    plain = outcome(model)
    twell.patch(model, automatic=False)
    outcome(model)
    twell.update(model)
    got = outcome(model)
    executions = sorted({s.execution for s in twell.stats(model)})
    worst = (0.0, "")
    for name, want in exact.items():
        if want.norm() > 0:
            # Our error may not exceed that of the unpatched model in bf16 by much.
            limit = 1.5 * relative(plain[name], want) + 5e-3
            error = relative(got[name], want)
            worst = max(worst, (error / limit, f"{name} {error:.1e}, limit {limit:.1e}"))
    check(f"patched model against f32, {executions}", worst[0] <= 1.0, f"worst {worst[1]}")
    del exact, plain, got
    twell.unpatch(model)
    torch.cuda.empty_cache()


def measure_both(model, kind, args):
    print(f"\n{args.preset if not args.checkpoint else args.checkpoint}: forward of the body "
          f"{args.batch} x {LENGTH}, training step {args.train_batch} x {LENGTH} with head and AdamW; "
          "ms are median, p10, p90; GB: peak of PyTorch's allocator, and besides it")
    before = measure_model(model, kind, False, args)
    print(json.dumps(before), flush=True)
    without = measure_without_ffn(model, args) if args.limits else {}
    twell.patch(model, automatic=False)
    after = measure_model(model, kind, True, args)
    print(json.dumps(after))
    print(f"forward {before['forward ms'][0] / after['forward ms'][0]:.2f}x, "
          f"training step {before['train ms'][0] / after['train ms'][0]:.2f}x, training memory "
          f"{after['train GB, besides'][0] / before['train GB, besides'][0]:.2f} of unpatched", flush=True)
    if args.limits:
        layers = measure_engine(model, args)
        step, rest, engine = before["train ms"][0], without["train ms"][0], sum(layers)
        print(f"training step without feed-forward layers {rest:.1f} ms, {step / rest:.2f}x: they take "
              f"{1 - rest / step:.0%} of the unpatched step; with the engine's kernels in their place "
              f"{rest + engine:.1f} ms, {step / (rest + engine):.2f}x; of the patched step "
              f"{after['train ms'][0] - rest - engine:.1f} ms are neither; layers "
              f"{', '.join(f'{ms:.2f}' for ms in layers)} ms", flush=True)


def check_optimizer():
    """A model that is patched after step 1 of a fused AdamW, and unpatched after step 3, trains as
    one that is not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=1024,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                         hidden_act="relu", max_position_embeddings=256, use_cache=False)
    start = LlamaForCausalLM(config).cuda()
    ids = torch.randint(0, 512, (5, 8, 256), device="cuda")

    def trained(patched, kind):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{kind: True})
        for step, batch in enumerate(ids):
            if patched and step == 1:
                twell.patch(model)
            if patched and step == 3:
                twell.unpatch(model)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [layer.mlp.down_proj.weight - first.mlp.down_proj.weight
                for layer, first in zip(model.model.layers, start.model.layers)]

    for kind in ("fused", "foreach"):
        worst = max(relative(a, b) for a, b in zip(trained(True, kind), trained(False, kind)))
        # Adam's first steps turn roundings of tiny gradients into steps of up to lr. Moments of
        # other weights would give a difference of about 1.
        check(f"patched between steps of AdamW({kind}=True)", worst < 0.2, f"{worst:.1e}")


def check_curve():
    """200 steps of transformers' Trainer on a small model, patched and not: the same losses, as far
    as an unpatched model stays at its own losses when a weight changes by a rounding."""
    from transformers import (LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer,
                              TrainingArguments)

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=1024,
                         num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
                         hidden_act="relu", max_position_embeddings=256)
    start = LlamaForCausalLM(config)
    text = torch.randint(0, 64, (64, 256)).cumsum(1) % 512
    data = [{"input_ids": row, "labels": row} for row in text]

    def losses(model, callbacks=()):
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(model, TrainingArguments(
                folder, max_steps=200, per_device_train_batch_size=8, learning_rate=1e-3,
                logging_steps=1, save_strategy="no", report_to=[], bf16=True, seed=0,
                disable_tqdm=True, warmup_steps=20), train_dataset=data, callbacks=list(callbacks))
            trainer.pop_callback(PrinterCallback)
            trainer.train()
        return torch.tensor([log["loss"] for log in trainer.state.log_history if "loss" in log])

    plain = losses(copy.deepcopy(start))
    moved = copy.deepcopy(start)
    with torch.no_grad():
        moved.lm_head.weight.mul_(1 + 2**-10)
    moved = losses(moved)
    patched = losses(copy.deepcopy(start), [twell.SparsityCallback(coefficient=0.0)])
    noise = (moved - plain).abs().max().item()
    worst = (patched - plain).abs().max().item()
    check("same losses over 200 steps of Trainer", worst < 0.05 or worst < 2 * noise,
          f"{plain[0]:.3f} to {plain[-1]:.3f} and {patched[-1]:.3f}, largest difference {worst:.4f}; "
          f"{noise:.4f} between unpatched models that start a rounding apart")


def check_engine():
    """The engine on the GPU against transformers in f32."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=1024,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         hidden_act="relu", max_position_embeddings=512, bos_token_id=0,
                         eos_token_id=0)
    model = LlamaForCausalLM(config)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(
        sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save(f"{folder}/tokenizer.json")
        engine = twell.Engine(folder, device="cuda", slots=8)
        on_cpu = twell.Engine(folder, device="cpu", slots=8)
    tokens = engine.encode("one and two are three, and two and two are four")
    with torch.no_grad():
        want = model.cuda()(torch.tensor([tokens], device="cuda")).logits[0].cpu()
    error = relative(torch.from_dlpack(engine.logits(tokens)), want)
    check("engine's logits", error < 2e-2, f"{error:.1e}, on {engine.device}")
    options = {"max_tokens": 32, "temperature": 0, "logprobs": 2}
    prompts = ["one and", "two are", "three and four are"] * 4
    results, expected = engine.generate(prompts, **options), on_cpu.generate(prompts, **options)
    # bf16 may decide otherwise between nearly equal logits, and all that follows then differs.
    first = [(a.log_probs[0].log_prob, b.log_probs[0].log_prob) for a, b in zip(results, expected)]
    check("engine generates", all(abs(a - b) < 0.05 for a, b in first)
          and [r.tokens for r in results[:3]] == [r.tokens for r in results[3:6]],
          f"{sum(a.tokens == b.tokens for a, b in zip(results, expected))} of 12 texts as on the CPU")
    streamed = "".join(piece.text for piece in engine.stream("one and", max_tokens=32, temperature=0))
    check("engine streams", streamed == engine.generate("one and", max_tokens=32, temperature=0).text)
    (value, _), = engine.loglikelihood([(tokens[:4], tokens[4:])])
    want = want.log_softmax(-1)
    want = sum(want[i - 1, tokens[i]].item() for i in range(4, len(tokens)))
    check("engine's log-likelihood", abs(value - want) < 0.02 * abs(want), f"{value:.3f}, {want:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", default="0.5b", choices=list(LAYERS))
    parser.add_argument("--checkpoint", help="folder of a trained ReLU model (Hugging Face layout)")
    parser.add_argument("--patterns", help="captured activations (.safetensors), see above")
    parser.add_argument("--tokens", help="shard of 16-bit token ids from twell tokenize, for a "
                        "checkpoint")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a forward pass")
    parser.add_argument("--train-batch", type=int, default=16, help="sequences of a training step")
    parser.add_argument("--compile", default="layers", choices=["layers", "full", "none"])
    parser.add_argument("--l1", type=float, default=1e-4, help="coefficient, for the patched model")
    parser.add_argument("--unchecked", action="store_true", help="measure the model alone")
    parser.add_argument("--save", help="only write the model of these patterns to a folder; the "
                        "most likely token after any of the first 2,048 is that token again")
    parser.add_argument("--steps", type=int, default=6, help="measured training steps")
    parser.add_argument("--limits", action="store_true", help="see above")
    parser.add_argument("--only", nargs="*", help="parts: ops, graphs, graphs_at_once, plans, "
                        "optimizer, engine, curve, overhead, model")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, twell {twell.__version__}")
    torch.manual_seed(0)
    parts = {
        "ops": check_ops,
        "graphs": check_compile_and_graphs,
        "graphs_at_once": check_graphs_at_once,
        "plans": check_graphs_and_plans,
        "optimizer": check_optimizer,
        "engine": check_engine,
        "curve": check_curve,
        "overhead": measure_overhead,
        "model": lambda: check_model(args),
    }
    if unknown := [name for name in args.only or () if name not in parts]:
        parser.error(f"unknown part {', '.join(unknown)}: one of {', '.join(parts)}")
    for name, run in parts.items():
        if not args.only or name in args.only:
            begin = time.perf_counter()
            run()
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{len(FAILED)} checks failed" + "".join(f"\n  {name}" for name in FAILED))
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
