#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""This engine beside llama.cpp on a CPU, in turn: decoding one sequence, and prompts.

  llama_cpp_turns.py convert CHECKPOINT OUT.gguf      bf16, for the command below
  llama_cpp_turns.py CHECKPOINT --int8 FOLDER --gguf BF16.gguf [--rounds 5] [--threads 2] [--compute bf16]

CHECKPOINT is a llama of bf16 weights (bench/synthetic_checkpoint.py), FOLDER the same of
`twell convert --weights int8 --head 8bit`. llama.cpp's Q8_0 and Q4_0 are made beside the GGUF file by
its own quantiser. Its llamas have no key for the activation, so it computes SiLU densely where the
checkpoint has ReLU, which costs the same.

In each round every row runs once; --threads 1 also gives processor time, which other programs on
the machine disturb less than the clock. llama.cpp's threads spin while they wait, so that with two
its processor time says little. Needs llama-cpp-python, gguf, numpy and safetensors with PyTorch."""
import argparse
import ctypes
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def convert(checkpoint, out):
    import gguf
    import numpy
    import torch
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            if name in ("model.embed_tokens.weight", "model.norm.weight"):
                to = "token_embd.weight" if "embed" in name else "output_norm.weight"
            else:
                _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
                to = f"blk.{layer}.{NAMES[rest]}.weight"
                if rest in ("self_attn.q_proj", "self_attn.k_proj"):  # from halves to pairs
                    heads = config["num_attention_heads" if "q_" in rest else "num_key_value_heads"]
                    shape = tensor.shape
                    tensor = tensor.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
            if tensor.dim() == 1:
                writer.add_tensor(to, tensor.float().numpy())
            else:
                values = tensor.contiguous().view(torch.int16).numpy().view(numpy.uint8)
                writer.add_tensor(to, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A model in llama.cpp; times are (seconds, processor seconds)."""

    def __init__(self, path, threads, prompt):
        import llama_cpp

        self.lib = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = prompt + 64
        params.n_batch = params.n_ubatch = prompt
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self):
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def decode(self, ids):
        tokens = (self.lib.llama_token * len(ids))(*ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, len(ids))) != 0:
            raise SystemExit("llama_decode failed")
        self.lib.llama_get_logits_ith(self.context, -1)  # waits

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def ids(self, count):
        return [i * 7919 % self.words for i in range(count)]

    def generation(self, tokens):
        self.clear()
        self.decode(self.ids(8))
        times, busy = [], time.process_time()
        for token in self.ids(tokens):
            start = time.perf_counter()
            self.decode([token])
            times.append(time.perf_counter() - start)
        return statistics.median(times), (time.process_time() - busy) / tokens

    def prompt(self, length):
        self.clear()
        start, busy = time.perf_counter(), time.process_time()
        self.decode(self.ids(length))
        return (time.perf_counter() - start) / length, (time.process_time() - busy) / length


def twell(arguments, *command):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
        subprocess.run([arguments.twell, "bench", *command, "--device", "cpu", "--threads", str(arguments.threads),
                        "--jsonl", rows.name], check=True, capture_output=True)
        return json.loads(pathlib.Path(rows.name).read_text())


def our_generation(arguments, folder):
    row = twell(arguments, "decode", "--checkpoint", folder, "--batch", "1", "--prompt-tokens", "8", "--tokens",
                str(arguments.tokens))
    return {kind: (1 / row[f"{kind}_tokens_per_s"], 1e-3 * row[f"{kind}_processor_ms"])
            for kind in ("dense", "sparse")}


def our_prompt(arguments, folder):
    row = twell(arguments, "forward", "--checkpoint", folder, "--batch", "1", "--sequence-length",
                str(arguments.prompt), "--repeats", "1", "--compute", arguments.compute)
    return {kind: (row[kind]["layers"]["median_s"] / arguments.prompt,
                   row[kind]["processor_seconds"] / arguments.prompt) for kind in ("dense", "sparse")}


def quiet_library():
    import llama_cpp

    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    return silent  # lives as long as the library calls it


def quantised(path, kind):
    import llama_cpp

    out = path.with_name(path.stem + f"-{kind}.gguf")
    if not out.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
        if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), params) != 0:
            raise SystemExit(f"{path}: llama.cpp cannot make {kind} of it")
    return out


def compare(arguments):
    silent = quiet_library()  # noqa: F841
    peers = {"BF16": arguments.gguf} | {kind.upper(): quantised(arguments.gguf, kind) for kind in ("q8_0", "q4_0")}
    ours = {"bf16": arguments.checkpoint, "int8": arguments.int8}
    work = {"decoding one sequence": (our_generation, lambda llama: llama.generation(arguments.tokens)),
            f"a prompt of {arguments.prompt}": (our_prompt, lambda llama: llama.prompt(arguments.prompt))}
    for what, (our, theirs) in work.items():
        if arguments.only and arguments.only not in what:
            continue
        times = {}
        for _ in range(arguments.rounds):
            for name, path in peers.items():
                llama = Llama(path, arguments.threads, arguments.prompt)
                theirs(llama)  # reads the file
                times.setdefault(f"llama.cpp {name}", []).append(theirs(llama))
                llama.close()
            for name, folder in ours.items():
                for kind, pair in our(arguments, folder).items():
                    times.setdefault(f"ours, {name} {kind}", []).append(pair)
        print(f"{what}, {arguments.threads} threads, {arguments.rounds} rounds: tokens a second, best and median, "
              "and ratio to Q8_0 and BF16 of llama.cpp, median over rounds; by processor time")
        for name, pairs in times.items():
            cells = []
            for clock in (0, 1):
                rates = [1 / pair[clock] for pair in pairs]
                cells.append(f"{max(rates):8.1f} {statistics.median(rates):8.1f}")
                for base in ("Q8_0", "BF16"):
                    against = [b[clock] / a[clock] for a, b in zip(pairs, times[f"llama.cpp {base}"])]
                    cells.append(f"{statistics.median(against):6.2f}x")
            print(f"{name:20}", *cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--int8", type=pathlib.Path, required=True)
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--twell", default="build/release/twell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--compute", choices=("f32", "bf16"), default="f32",
                        help="factors of this engine's products in prompts")
    parser.add_argument("--only", help="a word of the work to measure")
    compare(parser.parse_args())


if __name__ == "__main__":
    import sys

    if len(sys.argv) == 4 and sys.argv[1] == "convert":
        convert(pathlib.Path(sys.argv[2]), sys.argv[3])
    else:
        main()
