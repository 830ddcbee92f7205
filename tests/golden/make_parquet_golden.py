#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Parquet files as pyarrow writes them, and what is in them.

Writes the folder parquet/ beside this script:
  rows.json               the rows that each of the following files holds
  CODEC-VERSION-HOW.parquet   in every codec that is read, both versions of pages, with dictionaries
                          and without; several row groups, several pages in each
  refused.parquet         a column of each kind that is refused
and tasks/parquet/: the items of tasks/data/ (make_tasks_golden.py) in the hub's schemas, under the
names that the hub gives its files.
Needs pyarrow.  Run: python make_parquet_golden.py
"""
import datetime
import decimal
import json
import pathlib
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent
OUT = HERE / "parquet"
ROWS = 40
WORDS = ["", "the", "cork", "floats on water", "zwölf", "日本語", "🙂", "the", "the"]


def row(i):
    word = WORDS[i % len(WORDS)]
    return {
        "text": None if i % 7 == 3 else word + " " + str(i // 9),
        "needed": word,
        "words": None if i % 11 == 5 else [None if (i + j) % 6 == 4 else WORDS[(i + j) % 9]
                                           for j in range(i % 5)],
        "choices": None if i % 13 == 6 else {
            "text": [f"choice {j} of {i % 4}" for j in range(i % 4)],
            "label": list("ABCDE")[:i % 4] if i % 4 != 2 else None},
        "label": None if i % 17 == 2 else (i * 7919 - 100000) * (1 << 20),
        "small": i - 20,
        "large": (1 << 64) - 1 - i,
        "ratio": None if i % 5 == 1 else i / 8 - 2,
        "half": i / 4,
        "flag": None if i % 9 == 8 else i % 3 == 0,
        "grid": [[i + j + k for k in range(j)] for j in range(i % 4)] if i % 8 else None,
        "people": [{"name": None if j == 1 else WORDS[(i * j) % 9], "ages": [j, i] if j else []}
                   for j in range(i % 3)],
        "nothing": None,
    }


SCHEMA = pa.schema([
    pa.field("text", pa.string()),
    pa.field("needed", pa.string(), nullable=False),
    pa.field("words", pa.list_(pa.string())),
    pa.field("choices", pa.struct([pa.field("text", pa.list_(pa.string())),
                                   pa.field("label", pa.list_(pa.string()))])),
    pa.field("label", pa.int64()),
    pa.field("small", pa.int8(), nullable=False),
    pa.field("large", pa.uint64()),
    pa.field("ratio", pa.float64()),
    pa.field("half", pa.float32()),
    pa.field("flag", pa.bool_()),
    pa.field("grid", pa.list_(pa.list_(pa.int32()))),
    pa.field("people", pa.list_(pa.field("element", pa.struct([
        pa.field("name", pa.string()), pa.field("ages", pa.list_(pa.int32()))]), nullable=False))),
    pa.field("nothing", pa.null()),
])


def write_rows():
    rows = [row(i) for i in range(ROWS)]
    (OUT / "rows.json").write_text("[" + ",\n".join(
        json.dumps(r, ensure_ascii=False) for r in rows) + "]\n")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    for codec, version, dictionary in [
            ("none", "1.0", True), ("none", "2.0", False), ("snappy", "1.0", False),
            ("snappy", "2.0", True), ("gzip", "1.0", True), ("gzip", "2.0", False),
            ("zstd", "1.0", False), ("zstd", "2.0", True)]:
        name = f"{codec}-v{version[0]}-{'dictionary' if dictionary else 'plain'}.parquet"
        pq.write_table(table, OUT / name, compression=codec, data_page_version=version,
                       use_dictionary=dictionary, row_group_size=17, data_page_size=48,
                       write_batch_size=6, dictionary_pagesize_limit=90, write_statistics=False,
                       store_schema=False, write_page_checksum=codec in ("none", "gzip"),
                       use_compliant_nested_type=version == "1.0")
        assert pq.read_table(OUT / name).to_pylist() == rows


def write_refused():
    columns = {
        "binary": pa.array([b"\xff"]),
        "fixed": pa.array([b"ab"], pa.binary(2)),
        "date": pa.array([datetime.date(2020, 1, 2)]),
        "time": pa.array([datetime.datetime(2020, 1, 2)], pa.timestamp("us")),
        "decimal": pa.array([decimal.Decimal("1.5")]),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        "delta": pa.array([1, 2, 3][:1], pa.int32()),
        "delta_text": pa.array(["a"]),
        "split": pa.array([1.5]),
        "brotli": pa.array(["a"]),
        "lz4": pa.array(["a"]),
        "good": pa.array(["good"]),
    }
    codecs = {name: "none" for name in columns} | {"brotli": "brotli", "lz4": "lz4"}
    pq.write_table(pa.table(columns), OUT / "refused.parquet", compression=codecs,
                   use_dictionary=False, write_statistics=False, store_schema=False,
                   column_encoding={"delta": "DELTA_BINARY_PACKED", "split": "BYTE_STREAM_SPLIT",
                                    "delta_text": "DELTA_LENGTH_BYTE_ARRAY"})


def from_lines(name):
    return [json.loads(line) for line in
            (HERE / "tasks/data" / name).read_text().splitlines()]


def hub_question(doc):
    inner = doc["question"]
    if not isinstance(inner, dict):
        return doc
    return {"id": doc["id"], "question": inner["stem"], "answerKey": doc["answerKey"], "choices": {
        "text": [c["text"] for c in inner["choices"]],
        "label": [c["label"] for c in inner["choices"]]}}


def write_tasks():
    folder = HERE / "tasks/parquet"
    shutil.rmtree(folder, ignore_errors=True)
    labels = (HERE / "tasks/data/piqa/valid-labels.lst").read_text().split()
    piqa = [doc | {"label": int(label)}
            for doc, label in zip(from_lines("piqa/valid.jsonl"), labels)]
    hellaswag = [doc | {"label": str(doc["label"])}
                 for doc in from_lines("hellaswag/validation.jsonl")]
    tasks = {
        "ARC-Easy/test": [hub_question(d) for d in from_lines("ARC-Easy/ARC-Easy-Test.jsonl")],
        "ARC-Challenge/test": from_lines("arc_challenge.jsonl"),
        "hellaswag/data/validation": hellaswag,
        "openbookqa/main/test": from_lines("openbookqa/test.jsonl"),
        "piqa/plain_text/validation": piqa,
        "winogrande/winogrande_xl/validation": from_lines("winogrande/dev.jsonl"),
        "commonsense_qa/data/validation": [
            hub_question(d) for d in from_lines("commonsense_qa/dev_rand_split.jsonl")],
    }
    for name, rows in tasks.items():
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path, store_schema=False,
                       write_statistics=False)


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    write_rows()
    write_refused()
    write_tasks()


if __name__ == "__main__":
    main()
