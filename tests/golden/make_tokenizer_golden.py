# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/tokenizer/: four small tokenizer.json files in the manner of GPT-2, SmolLM2,
Llama-3 and Qwen2, trained by Hugging Face `tokenizers` on the repository's LICENSE and on the sample
texts below, cases.json with the ids that library gives for these and more texts, and pieces.json with
the pieces its pre-tokenizers cut texts of every script into.

    pip install tokenizers==0.23.3 regex; python tests/golden/make_tokenizer_golden.py
"""
import json
import unicodedata
from pathlib import Path

import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import trainers

HERE = Path(__file__).resolve().parent
OUT = HERE / "tokenizer"
VOCAB = 600
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX!",
    "it's I'M we'll they'd you've he'Re can't 'tis rock'n'roll 's 'S \u2019s '\u017f O'\u017f ''ll '",
    "tabs\tand  two   three    spaces \t mixed\t\t \n\n  \n leading\r\nCRLF\r\n\r\nlone\rCR  \r\n end  ",
    "\u00a0no-break\u00a0\u00a0space \u2003em\u2003 \u3000ideographic\u3000 \u1680ogham \u180emongolian"
    "\u180e \u200bzero\u200b \u2028line\u2029para \u0085next\u0085 \u202f\u205f\ufeffbom\x0bvt\x0cff",
    "1234567890 12 123 1234 3.14159 1,000,000 0x7f a1b2c3 \u00bd \u00b2\u00b3 \u2167 \u0663\u0664\u0665"
    " \u0967\u0968\u0969 \u4e09\u5341 \U0001d7ce\U0001d7cf 10:30 2024-05-06 -5 +5 5%",
    "int main(void) {\n    for (int i = 0; i < n; ++i) {\n\tprintf(\"%d\\n\", a[i]);  // ok\n    }\n"
    "    return 0;\n}\n#include <stdio.h>\n#define MAX(a,b) ((a)>(b)?(a):(b))\n",
    "def f(x: int = 0) -> str:\n    \"\"\"Doc.\"\"\"\n    return f'{x!r:>{10}}' if x else None\n\n\n"
    "class A:\n    pass\n",
    "nul\0bytes\0\0 and \x01\x02\x7f control \x1b[31mred\x1b[0m",
    "na\u00efve caf\u00e9 \u00fcber \u0141\u00f3d\u017a \u0130stanbul \u00dfa\u00dfen \u01c5 fi\ufb01 \ufb06",
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u1f00\u03c1\u03c7\u1fc6; "
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u044f\u0437\u044b\u043a, \u0456\u0457\u0491 \u0451\u0439",
    "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd \u0627\u0644\u0639\u064e\u0631\u064e\u0628\u0650\u064a\u0651\u0629"
    " \u06a9\u06cc\u0627 \u0723\u0718\u072a\u071d\u071d\u0710",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u09ac\u09be\u0982\u09b2\u09be \u0ba4\u0bae\u0bbf\u0bb4\u0bcd "
    "\u0c24\u0c46\u0c32\u0c41\u0c17\u0c41 \u0d2e\u0d32\u0d2f\u0d3e\u0d33\u0d02 \u0dc3\u0dd2\u0d82\u0dc4\u0dbd",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e01\u0e33 \u0ea5\u0eb2\u0ea7 \u1019\u103c\u1014\u103a\u1019\u102c "
    "\u1781\u17d2\u1798\u17c2\u179a \u0f56\u0f7c\u0f51\u0f0b \u1820\u182e\u180e\u1820",
    "\u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8 \u0540\u0561\u0575\u0565\u0580\u0565\u0576 \u12a0\u121b\u122d\u129b "
    "\u13e3\u13b3\u13a9 \ua000\ua001 \u2d63\u2d49",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u30ab\u30bf\u30ab\u30ca\u30fc\uff11\uff12\uff13 "
    "\u4e2d\u6587\uff0c\u7b80\u4f53\u548c\u7e41\u9ad4 \ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1eb\U0001f1f7 \u2764\ufe0f "
    "\U0001f44d\U0001f3fd \u2603 \u00a9\u00ae\u2122 \u20ac5 \u2211\u222b\u221e\u2260 \U0001d518\U0001d52b \U00010348",
    "e\u0301 \u1100\u1161\u11a8 \uac00\u11a8 \u212b \u2126 \u212a \uf900 q\u0307\u0323 \u0929 \u0915\u093c "
    "\u0958 \u0374 \u037e \u0387 a\u0300\u0316 \u1e9b\u0323 \u0344 o\u0308\u0304 \U0001d15e \u3099 x\u3099\u304b\u3099",
    "<|endoftext|>", "a<|endoftext|><|endoftext|> b <|endoftext|>\n", "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|<|im_end|>> <|im_ <tool_call>{\"a\": 1}</tool_call> <tool_call",
    "<|begin_of_text|>x<|eot_id|> <|reserved_1|><|reserved_12|> caf\u00e9<\u00e9> cafe\u0301<e\u0301>",
    "a" * 40 + " " + "ab" * 300 + " " * 70 + "=" * 100 + "\n" * 33 + "1" * 50 + "\u00e9" * 60 + "the" * 40,
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file.txt $HOME/.x ~/y `z` **b** _i_",
    "License licensed Licensor Contributor Contribution redistribute Work Works Derivative",
]
# Characters of every general category that Unicode 3.2 and later versions classify alike.
STABLE = [c for c in map(chr, range(0x80, 0x2fa1e))
          if unicodedata.category(c) != "Cs"
          and unicodedata.category(c) == unicodedata.ucd_3_2_0.category(c) != "Cn"]
TEXTS.append("".join(f"a{c}b {c}1" for c in STABLE[::331]))

# Not learned from: what is common in no text, and rare in all of them.
SPACES = [c for c in map(chr, range(0x10000)) if c.isspace() or unicodedata.category(c)[0] == "Z"
          or c in "\u180e\u200b\u200c\u200d\u2060\ufeff"]
MORE = [
    # Families, professions, skin tones, flags of regions and subdivisions, keycaps, both looks.
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f469\U0001f3fe\u200d\U0001f52c x "
    "\U0001f9d1\U0001f3fb\u200d\u2764\ufe0f\u200d\U0001f48b\u200d\U0001f9d1\U0001f3ff \U0001f44b\U0001f3fb\U0001f3fc"
    "\U0001f3fd\U0001f3fe\U0001f3ff1 \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5a \U0001f3f4\U000e0067\U000e0062"
    "\U000e0073\U000e0063\U000e0074\U000e007f 1\ufe0f\u20e3#\ufe0f\u20e3 \u2600\ufe0e\u2600\ufe0f \U0001f3f3\ufe0f"
    "\u200d\U0001f308\U0001f3f4\u200d\u2620\ufe0f \U0001fae0\U0001f979\n\U0001f600\U0001f600\U0001f600 \U0001f600's",
    "".join(f"a{c}b{c}{c}c {c} d{c}\n{c}{c}e{c}'s{c}1" for c in SPACES),
    "".join(f"x{c * n}\n" for n in (2, 3, 5) for c in SPACES) + "".join(SPACES),
    # Digits of every script, in runs of one to seven.
    "".join(f"{c * (1 + i % 7)} a{c}" for i, c in enumerate(
        c for c in map(chr, range(0x20000)) if unicodedata.category(c) == "Nd"
        and unicodedata.digit(c) == 7)),
    "\u00bd\u2153 \u2160\u2171\u2183 \u3007\u3021\u3029 \u2460\u2474\u24ea \U00010107\U00010140 \u0bf0\u0d70 \u137c \u19da",
    # Marks: stacked, alone at the start, on spaces and digits, with joiners, not in form C.
    "\u0301a\u0301\u0302\u0303 \u0301 1\u0301 .\u0301\u0489 e\u0316\u0301 \u0928\u094d\u200d\u0926 \u0d28\u0d4d\u200d "
    "\u0f40\u0f90\u0f71\u0f72 Z\u0351\u036d\u0343\u0334\u0321a\u0337\u0358\u034e \u05d0\u05b7\u05c1 \u20e3x\u20dd \u1ab0\u1dc0",
    "template <typename T>\nT max(const T& a, const T& b) { return a < b ? b : a; }\n\n\tx->y[i]++; // 0b1010'0101 "
    "0xFFu 1e-9f\r\n#define A(x) #x ## x\nSELECT * FROM `t` WHERE a <> 'it''s' AND b >= 3;\n"
    "<a href=\"x?y=1&amp;z\">T</a>\n\n  - k: [1, 2]\n    v: |\n      t\n$ ls -la | grep '^d' && echo \"$?\"\n"
    "fn main() -> Result<(), Box<dyn Error>> { let v: Vec<_> = (0..10).map(|x| x * x).collect(); }\n"
    "\\begin{align} \\frac{\\partial f}{\\partial x} &= 0 \\\\ \\end{align}\n@media (max-width: 3em) {.a > b::after{}}\n"
    "def \u03b1(\u03b2_1):\n        return \u03b2_1 ** 2 if not \u03b2_1 else -\u03b2_1\n" + " " * 17 + "#" * 9 + "-" * 40 + "\n\n\n\n",
]
# Invalid UTF-8: bytes that never occur, truncated and overlong characters, surrogates, and values
# beyond the last character. A run of them is a piece of its own.
BYTES = [
    "ff", "80", "61ff62", "c3", "c328", "e282", "e28228a1", "f09f98", "f09f9861", "c0af", "e08080", "eda080",
    "edbfbf", "f4908080", "f8888080", "fffe6100", "6120ff2062", "2020ff2020", "31ff32c3", "0ac30a",
    "e697a5e69ce69cace8aa9e", "c3a9c3c3a9", "27ff7327", "61cc81ff", "efbbbf61ff", "c2a0ffc2a0", "f09f9880ff", "ed9f80eda0",
    "3c7c656e646f6674657874ff7c3e", "ff3c7c656e646f66746578747c3eff",
]
SCRIPTS = """Adlam Ahom AnatolianHieroglyphs Arabic Armenian Avestan Balinese Bamum BassaVah Batak
Bengali Bhaiksuki Bopomofo Brahmi Braille Buginese Buhid CanadianAboriginal Carian CaucasianAlbanian
Chakma Cham Cherokee Chorasmian Common Coptic Cuneiform Cypriot CyproMinoan Cyrillic Deseret
Devanagari DivesAkuru Dogra Duployan EgyptianHieroglyphs Elbasan Elymaic Ethiopic Georgian Glagolitic
Gothic Grantha Greek Gujarati GunjalaGondi Gurmukhi Hangul Hani HanifiRohingya Hanunoo Hatran Hebrew
Hiragana ImperialAramaic Inherited InscriptionalPahlavi InscriptionalParthian Javanese Kaithi Kannada
Katakana KayahLi Kharoshthi KhitanSmallScript Khmer Khojki Khudawadi Lao Latin Lepcha Limbu LinearA
LinearB Lisu Lycian Lydian Mahajani Makasar Malayalam Mandaic Manichaean Marchen MasaramGondi
Medefaidrin MeeteiMayek MendeKikakui MeroiticCursive MeroiticHieroglyphs Miao Modi Mongolian Mro
Multani Myanmar Nabataean Nandinagari Newa NewTaiLue Nko Nushu NyiakengPuachueHmong Ogham OlChiki
OldHungarian OldItalic OldNorthArabian OldPermic OldPersian OldSogdian OldSouthArabian OldTurkic
OldUyghur Oriya Osage Osmanya PahawhHmong Palmyrene PauCinHau PhagsPa Phoenician PsalterPahlavi Rejang
Runic Samaritan Saurashtra Sharada Shavian Siddham SignWriting Sinhala Sogdian SoraSompeng Soyombo
Sundanese SylotiNagri Syriac Tagalog Tagbanwa TaiLe TaiTham TaiViet Takri Tamil Tangsa Tangut Telugu
Thaana Thai Tibetan Tifinagh Tirhuta Toto Ugaritic Vai Vithkuqi Wancho WarangCiti Yezidi Yi
ZanabazarSquare""".split()


def script_texts():
    """Of each script (Unicode 14) the first and the last character of each general category, among
    letters, digits, spaces and punctuation, ten scripts a text."""
    assert unicodedata.unidata_version == "14.0.0"
    known = "".join(c for c in map(chr, range(0x110000))
                    if unicodedata.category(c) not in ("Cn", "Cs", "Co"))
    texts = []
    for i, script in enumerate(SCRIPTS):
        categories = {}
        for c in regex.findall(rf"\p{{Script={script}}}", known):
            categories.setdefault(unicodedata.category(c), []).append(c)
        assert categories, script
        chosen = [c for members in categories.values() for c in (members[0], members[-1])]
        word = "".join(chosen)
        if i % 10 == 0:
            texts.append("")
        texts[-1] += word + " " + " ".join(chosen) + "".join(f"a{c}1{c}.{c}" for c in chosen) + "\n"
    return texts


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train(pre_tokenizer, specials, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    corpus = [(HERE.parent.parent / "LICENSE").read_text()] + TEXTS
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def gpt2():
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"][0]["normalized"] = True
    spec["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    del spec["model"]["ignore_merges"]
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    return spec


def smollm2():
    """As in the original, bytes that its corpus did not have are missing."""
    tokenizer = train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                 pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    used = {token for pair in model["merges"] for token in pair}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    unused = [token for token in sorted(model["vocab"], key=model["vocab"].get)
              if token in alphabet and not token.isascii() and token not in used]
    gone = set(unused[::3])
    kept = [t for t in sorted(model["vocab"], key=model["vocab"].get) if t not in gone]
    model["vocab"] = {token: i for i, token in enumerate(kept)}
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return spec


def llama3():
    """Whole words without the merges that would make them; special tokens after the vocabulary."""
    tokenizer = train(split(LLAMA3), [])
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    specials += [f"<|reserved_{i}|>" for i in range(13)]
    tokenizer.add_special_tokens(specials)
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    model["ignore_merges"] = True
    made = {"".join(pair): pair for pair in model["merges"]}
    parts = {token for pair in model["merges"] for token in pair}
    for word in [w for w in made if w not in parts and w.startswith("\u0120")][::2]:
        model["merges"].remove(made[word])
    bos = [{"SpecialToken": {"id": specials[0], "type_id": 0}},
           {"Sequence": {"id": "A", "type_id": 0}}]
    pair = bos + [{"SpecialToken": {"id": specials[0], "type_id": 1}},
                  {"Sequence": {"id": "B", "type_id": 1}}]
    ids = {specials[0]: {"id": specials[0], "ids": [VOCAB], "tokens": [specials[0]]}}
    spec["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing", "single": bos, "pair": pair, "special_tokens": ids}]}
    return spec


def qwen2():
    tokenizer = train(split(QWEN2), [], normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False),
                          AddedToken("</tool_call>", normalized=False),
                          AddedToken("<e\u0301>", normalized=True)])
    return json.loads(tokenizer.to_str())


def alphabet():
    """The characters that stand for bytes."""
    shown = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    rest = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(0x100 + i) for i, b in enumerate(rest)}


def byte_ids(tokenizer, text):
    """Valid stretches as the library encodes them; runs of invalid bytes by its model alone."""
    model = Tokenizer.from_str(tokenizer.to_str())
    spec = json.loads(model.to_str())
    spec.update(pre_tokenizer=None, normalizer=None, added_tokens=[], post_processor=None)
    model = Tokenizer.from_str(json.dumps(spec))
    ids, shown = [], alphabet()
    # surrogateescape: an invalid byte b is the character U+DC00 + b.
    for valid, invalid in regex.findall(r"([^\ud800-\udfff]+)|([\ud800-\udfff]+)",
                                        text.decode("utf-8", "surrogateescape")):
        if valid:
            ids += tokenizer.encode(valid, add_special_tokens=False).ids
        else:
            ids += model.encode("".join(shown[ord(c) - 0xdc00] for c in invalid)).ids
    return ids


def pieces(tokenizer, text):
    """Bytes of each pre-token."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return [len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def main():
    OUT.mkdir(exist_ok=True)
    ids, more, of_bytes, lengths = {}, {}, {}, {}
    scripts = script_texts()
    for make in (gpt2, smollm2, llama3, qwen2):
        text = json.dumps(make(), ensure_ascii=False, separators=(",", ":"))
        tokenizer = Tokenizer.from_str(text)
        (OUT / f"{make.__name__}.json").write_text(text + "\n")
        ids[make.__name__] = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
        more[make.__name__] = [tokenizer.encode(t, add_special_tokens=False).ids for t in MORE]
        of_bytes[make.__name__] = [byte_ids(tokenizer, bytes.fromhex(t)) for t in BYTES]
        lengths[make.__name__] = [pieces(tokenizer, t) for t in scripts + MORE]
    cases = {"texts": TEXTS, "ids": ids, "more_texts": MORE, "more_ids": more, "bytes": BYTES,
             "bytes_ids": of_bytes}
    (OUT / "cases.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    cut = {"texts": scripts + MORE, "lengths": lengths}
    (OUT / "pieces.json").write_text(
        json.dumps(cut, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
