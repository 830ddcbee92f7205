# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/tokenizer/{llama2,mistral}.json and sentence_piece.json: two small tokenizers as
transformers converts them from SentencePiece, trained by Hugging Face `tokenizers`, and the ids and
decoded texts that library gives.

llama2: the normalizers Prepend and Replace, no pre-tokenizer (Llama 2, TinyLlama, Mistral 0.1), and
added tokens that take white space along. mistral: Metaspace (Mistral 0.3).

    pip install tokenizers==0.23.3 regex; python tests/golden/make_sentence_piece_golden.py
"""
import json
from pathlib import Path

from make_tokenizer_golden import TEXTS
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
OUT = HERE / "tokenizer"
MARK = "\u2581"
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MORE = [
    "Hello world", " Hello", "  two", "Hello ", "\n", "\n\n x", "a\tb", MARK, f"a{MARK}b", f"{MARK}a",
    "<s>a", "a</s>b", "a </s> b", "<s> a</s> </s>", "x<pad>y", "x  <pad>  y", " <pad>", "<pad> ",
    "x<mask>y", "x \t\n\u00a0\u3000<mask> y", " <mask> <mask>z", "x<sep>y", "x <sep>  \n y", "<sep><pad><mask>",
    "keep<norm>it", "keep <norm> it", "<norm>", " <norm>", f"a{MARK}<norm>", "\U0001f600 \u4e2d\u6587 \ud55c\uae00",
    "the the the", "1234567890", "    indented", "end    ", "<0x41> <0x0A>", "<unk> <|x|>",
]


def model():
    """Merges learned within words; the vocabulary in SentencePiece's order: specials, bytes, merged
    tokens, characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(MARK), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=330, limit_alphabet=90, show_progress=False)
    tokenizer.train_from_iterator([(HERE.parent.parent / "LICENSE").read_text()] + TEXTS, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges = [list(pair) for pair in learned["merges"]]
    merges += [p for p in ([MARK, MARK], [MARK * 2, MARK * 2]) if p not in merges]
    merged = list(dict.fromkeys("".join(pair) for pair in merges))
    characters = [t for t in sorted(learned["vocab"], key=learned["vocab"].get) if len(t) == 1]
    names = SPECIALS + BYTES + merged + characters
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [" ".join(pair) for pair in merges]}


def added(i, content, **options):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True} | options


def spec(base, normalizer, pre_tokenizer):
    size = len(base["vocab"])
    more = [added(size, "<pad>"), added(size + 1, "<mask>", lstrip=True),
            added(size + 2, "<sep>", rstrip=True, special=False),
            added(size + 3, "<norm>", normalized=True, special=False)]
    bos = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(i, name) for i, name in enumerate(SPECIALS)] + more,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing", "single": bos,
            "pair": bos + [{"SpecialToken": {"id": "<s>", "type_id": 1}},
                           {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": base}


def llama2(base):
    return spec(base, {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": MARK},
        {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]}, None)


def mistral(base):
    return spec(base, None, {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first",
                       "split": False})


def main():
    texts = TEXTS + MORE
    cases = {"texts": texts}
    base = model()
    for make in (llama2, mistral):
        text = json.dumps(make(base), ensure_ascii=False, separators=(",", ":"))
        tokenizer = Tokenizer.from_str(text)
        (OUT / f"{make.__name__}.json").write_text(text + "\n")
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        cases[make.__name__] = {
            "ids": ids, "begun": tokenizer.encode("Hello world").ids,
            "decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in ids]}
        # The other ways that Metaspace marks spaces.
        for scheme in ("always", "never"):
            other = json.loads(text)
            other["normalizer"] = None
            other["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK,
                                      "prepend_scheme": scheme, "split": True}
            marked = Tokenizer.from_str(json.dumps(other))
            cases[scheme] = [marked.encode(t, add_special_tokens=False).ids for t in MORE]
    cases["more"] = len(MORE)
    (OUT / "sentence_piece.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
