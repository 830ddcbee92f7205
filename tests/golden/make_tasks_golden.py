#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden values of multiple-choice tasks, from transformers in float64.

Writes the folder tasks/ beside this script:
  model/       a small random Llama with a ReLU gate, and a tokenizer trained on the items
  data/        made-up items in the schemas in which the data sets are published
  golden.json  per task the log-likelihoods of every choice, acc, acc_norm, standard errors
The prompts and formulas are those of lm-evaluation-harness, one pair of texts at a time, without a
cache, a batch or anything shared with the C++ code.
Needs torch, transformers, tokenizers.  Run: python make_tasks_golden.py
"""
import json
import math
import pathlib
import re
import shutil

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent / "tasks"
CONTEXT = 96
BOS, EOS = "<|begin|>", "<|endoftext|>"


def authors_choices(*texts, labels="ABCDE"):
    return [{"text": text, "label": label} for text, label in zip(texts, labels)]


def hub_choices(*texts, labels="ABCDE"):
    return {"text": list(texts), "label": list(labels[:len(texts)])}


DATA = {
    # The format that its authors publish.
    "ARC-Easy/ARC-Easy-Test.jsonl": [
        {"id": "a1", "answerKey": "B", "question": {
            "stem": "Which of these floats on water?",
            "choices": authors_choices("a stone", "a cork", "an iron nail", "a coin")}},
        {"id": "a2", "answerKey": "3", "question": {
            "stem": "What do plants take from the air?  ",
            "choices": authors_choices("sand", "salt", "carbon dioxide", "gold", labels="1234")}},
        {"id": "a3", "answerKey": "A", "question": {
            "stem": "Pond water is 4 °C at the bottom. Why do fish live there in winter?",
            "choices": authors_choices("It stays liquid.", "It is salty.",
                                       "It is warmer than the air – always – and never moves.")}},
    ],
    # The hub's export.
    "arc_challenge.jsonl": [
        {"id": "c1", "question": "A ball rolls down a hill. Which energy grows?", "answerKey": "D",
         "choices": hub_choices("heat", "potential energy", "sound", "kinetic energy")},
        {"id": "c2", "question": "Two magnets push each other away.\nWhich ends face each other?",
         "answerKey": "A", "choices": hub_choices("the same", "different", "none", "all of them")},
        {"id": "c3", "answerKey": "C",
         "question": "A long story about a river. " * 9 + "Where does the river end?",
         "choices": hub_choices("on a hill", "in a cup", "in the sea", "in the clouds over the "
                                "hill where the rain falls day after day after day")},
        {"id": "c4", "question": "Which day follows Monday?", "answerKey": "B",
         "choices": hub_choices("Sunday", "Tuesday", "Friday", "Monday", "Monday")},
    ],
    "hellaswag/validation.jsonl": [
        {"ind": 1, "activity_label": "Baking bread", "ctx_a": "A man stands in a kitchen.",
         "ctx_b": "he", "ctx": "A man stands in a kitchen. he", "label": "2",
         "endings": ["throws the bowl at the wall.", "sings to the oven in a low voice.",
                     "kneads the dough and puts it in a bowl.", "is a bird."]},
        {"ind": 2, "activity_label": "Home and Garden", "ctx_a":
         "[header] How to plant a tree [title] Dig a hole. [step] It should be deep.",
         "ctx_b": "ÉTIENNE  Digs", "label": "0",
         "endings": ["[substeps] Make it twice as wide as the roots.", "Paint it  red [title] and",
                     "a [b] c [d", "  Sell the tree. "]},
        {"ind": 3, "activity_label": "Swimming", "ctx_a": "She jumps into the pool.", "ctx_b": "",
         "label": 3, "endings": ["up", "She flies", "The end.", "She swims to the other side."]},
    ],
    "openbookqa/test.jsonl": [
        {"id": "o1", "question_stem": "Frozen water is", "answerKey": " B",
         "choices": hub_choices("steam", "ice", "a cloud", "rain")},
        {"id": "o2", "question_stem": "A bee visits a flower to find ", "answerKey": "D",
         "choices": hub_choices("honey", "a friend", "water", "nectar")},
        {"id": "o3", "question_stem": "", "answerKey": "A",
         "choices": hub_choices("The sun rises", "The moon rises", "It rains", "It snows")},
    ],
    "piqa/valid.jsonl": [
        {"goal": "How do I keep paint from drying?", "sol1": "Close the lid.", "sol2": "Open it."},
        {"goal": "To open a jar,", "sol1": "run the lid under hot water, then turn it.",
         "sol2": "run the lid under hot water, then eat it."},
        {"goal": "cool soup", "sol1": "Put it in the oven", "sol2": "Blow on it, or wait a while"},
    ],
    "winogrande/dev.jsonl": [
        {"qID": "w1", "sentence": "The cup did not fit in the box because _ was too big.",
         "option1": "the cup", "option2": "the box", "answer": "1"},
        {"qID": "w2", "sentence": "Anna gave Mary the book, so _  had read it already. ",
         "option1": "Anna", "option2": "Mary", "answer": "1"},
        {"qID": "w3", "sentence": "The lamp lit the room and the moon did not, so we thanked _.",
         "option1": "the moon", "option2": "the lamp", "answer": "2"},
    ],
    "commonsense_qa/dev_rand_split.jsonl": [
        {"answerKey": "B", "id": "q1", "question": {
            "question_concept": "read", "stem": " Where would you read in silence? ",
            "choices": authors_choices("stadium", "library", "kitchen", "road", "market")}},
        {"answerKey": "E", "id": "q2", "question": {
            "question_concept": "rain", "stem": "What keeps you dry in the rain?",
            "choices": authors_choices("a towel", "the sun", "a river", "wind", "an umbrella")}},
        {"answerKey": "A", "id": "q3", "question": {
            "question_concept": "bank", "stem": "Where do people keep money?",
            "choices": authors_choices("bank", "in a tree", "at sea", "under the bed", "zoo")}},
    ],
}
PIQA_LABELS = [0, 0, 1]


def question_of(doc, stem_field):
    if isinstance(doc["question"] if "question" in doc else "", dict):
        inner = doc["question"]
        return (inner["stem"], [c["text"] for c in inner["choices"]],
                [c["label"] for c in inner["choices"]])
    return doc[stem_field], doc["choices"]["text"], doc["choices"]["label"]


def arc(doc, _):
    stem, texts, labels = question_of(doc, "question")
    return [(f"Question: {stem}\nAnswer:", t, t) for t in texts], labels.index(doc["answerKey"])


def openbookqa(doc, _):
    stem, texts, labels = question_of(doc, "question_stem")
    return [(stem, t, t) for t in texts], labels.index(doc["answerKey"].lstrip())


def commonsense_qa(doc, _):
    stem, texts, _ = question_of(doc, "question")
    lines = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCDE", texts))
    prompt = f"Question: {stem.strip()}\n{lines}Answer:"
    return [(prompt, letter, letter) for letter in "ABCDE"], "ABCDE".index(doc["answerKey"])


def hellaswag(doc, _):
    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
    query = clean(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}")
    return [(query, clean(e), clean(e)) for e in doc["endings"]], int(doc["label"])


def piqa(doc, index):
    prompt = f"Question: {doc['goal']}\nAnswer:"
    return [(prompt, s, s) for s in (doc["sol1"], doc["sol2"])], PIQA_LABELS[index]


def winogrande(doc, _):
    before, after = doc["sentence"].split("_", 1)
    contexts = [before + doc["option1"], before + doc["option2"]]
    return [(c, after.strip(), c) for c in contexts], int(doc["answer"]) - 1


READERS = {"arc_easy": arc, "arc_challenge": arc, "hellaswag": hellaswag, "openbookqa": openbookqa,
           "piqa": piqa, "winogrande": winogrande, "commonsense_qa": commonsense_qa}


def train_tokenizer(texts):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BOS, EOS], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    return tokenizer


def build_model(tokenizer):
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=24, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        hidden_act="relu", max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        rms_norm_eps=1e-5, initializer_range=0.3, attn_implementation="eager",
        bos_token_id=tokenizer.token_to_id(BOS), eos_token_id=tokenizer.token_to_id(EOS))
    return LlamaForCausalLM(config)


def encode_pair(tokenizer, context, continuation, begin):
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=begin).ids
    if context == "":
        ids = tokenizer.encode(continuation, add_special_tokens=False).ids
        return [tokenizer.token_to_id(BOS)], ids
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, prefix = encode(context + continuation), encode(context)
    return prefix, whole[len(prefix):]


@torch.no_grad()
def log_likelihood(model, prefix, continuation):
    ids = (prefix + continuation)[-(CONTEXT + 1):]
    logits = model(torch.tensor([ids[:-1]])).logits[0]
    chosen = torch.log_softmax(logits, -1)[-len(continuation):]
    return chosen.gather(1, torch.tensor(continuation)[:, None]).sum().item()


def mean_and_error(flags):
    mean = sum(flags) / len(flags)
    variance = sum((flag - mean) ** 2 for flag in flags) / (len(flags) - 1)
    return mean, math.sqrt(variance) / math.sqrt(len(flags))


def score(model, tokenizer, read, docs, begin):
    items, correct, correct_norm = [], [], []
    for index, doc in enumerate(docs):
        choices, gold = read(doc, index)
        scores = [log_likelihood(model, *encode_pair(tokenizer, c, " " + t, begin))
                  for c, t, _ in choices]
        norm = [s / len(shown) for s, (_, _, shown) in zip(scores, choices)]
        items.append(scores)
        correct.append(float(scores.index(max(scores)) == gold))
        correct_norm.append(float(norm.index(max(norm)) == gold))
    out = {"log_likelihoods": items, "correct": correct, "correct_norm": correct_norm}
    out["acc"], out["acc_stderr"] = mean_and_error(correct)
    out["acc_norm"], out["acc_norm_stderr"] = mean_and_error(correct_norm)
    return out


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "model").mkdir(parents=True)
    for name, docs in DATA.items():
        path = HERE / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs))
    labels = "".join(f"{label}\n" for label in PIQA_LABELS)
    (HERE / "data/piqa/valid-labels.lst").write_text(labels)

    tokenizer = train_tokenizer([json.dumps(docs) for docs in DATA.values()])
    tokenizer.save(str(HERE / "model/tokenizer.json"), pretty=False)
    build_model(tokenizer).bfloat16().save_pretrained(HERE / "model")
    (HERE / "model/generation_config.json").unlink(missing_ok=True)
    # Load the saved model: converting it to bfloat16 also rounded its rotary frequencies.
    model = LlamaForCausalLM.from_pretrained(
        HERE / "model", dtype=torch.float64, attn_implementation="eager").eval()
    golden = {"bos": {}, "plain": {}}
    for name, docs in DATA.items():
        task = re.split(r"[/.]", name)[0].lower().replace("-", "_")
        for key, begin in (("plain", False), ("bos", True)):
            golden[key][task] = score(model, tokenizer, READERS[task], docs, begin)
    # Both outcomes occur, for acc and for acc_norm, and they differ somewhere.
    plain = golden["plain"].values()
    assert {c for t in plain for c in t["correct"]} == {0.0, 1.0}
    assert any(t["correct"] != t["correct_norm"] for t in plain), "choose another seed"
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
