#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Added tokens of every setting, and the ids that Hugging Face `tokenizers` gives.

Writes tokenizer/added_tokens.json beside this script: a list of {"file": a tokenizer.json of that
folder, "added": its list of added tokens, "normalizer": its normalizer where it is another,
"texts": [...], "ids": [[...], ...]}.
Needs tokenizers.  Run: python make_added_tokens_golden.py [CASES]
"""
import json
import pathlib
import random
import sys

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent / "tokenizer"
PIECES = ["a", "b", "ab", "abc", "bc", " ", "  ", "\n", "\t", "é", "e\u0301", "\u0301", "_", "7", "²",
          "中", "x", ".", "<s>", "\u00a0", "\u3000", "\u200d", "Ⓐ", "\u2028", "ß", "e", "▁"]


def text(rng, most):
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, most)))


def ids_of(tokenizer, one):
    try:
        return tokenizer.encode(one, add_special_tokens=False).ids
    except BaseException:  # a panic in that library, where tokens that absorb blanks overlap
        return None


def case(rng):
    name = rng.choice(["gpt2", "gpt2", "qwen2", "llama2", "mistral"])
    file = json.loads((HERE / f"{name}.json").read_text())
    vocab = file["model"]["vocab"]
    kept = [t for t in file["added_tokens"] if t["content"] in vocab]
    added, next_id = list(kept), len(vocab)
    for _ in range(rng.randint(1, 6)):
        content = text(rng, 3)
        if any(t["content"] == content for t in added):
            continue
        id = vocab.get(content, next_id)
        next_id += content not in vocab
        added.append({"id": id, "content": content, "single_word": rng.random() < 0.35,
                      "lstrip": rng.random() < 0.35, "rstrip": rng.random() < 0.35,
                      "normalized": rng.random() < 0.5, "special": rng.random() < 0.5})
    if rng.random() < 0.3:
        rng.shuffle(added)  # ids outside the vocabulary then follow the list, not the file
    out = {"file": f"{name}.json", "added": added}
    if name == "gpt2" and rng.random() < 0.5:
        out["normalizer"] = file["normalizer"] = {"type": "NFC"}
    file["added_tokens"], file["post_processor"] = added, None
    tokenizer = Tokenizer.from_str(json.dumps(file))
    texts = [text(rng, 14) for _ in range(8)]
    pairs = [(one, ids) for one in texts if (ids := ids_of(tokenizer, one)) is not None]
    return out | {"texts": [one for one, _ in pairs], "ids": [ids for _, ids in pairs]}


if __name__ == "__main__":
    rng = random.Random(20)
    cases = [case(rng) for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 30)]
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "added_tokens.json"
    out.write_text("[" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "]\n")
