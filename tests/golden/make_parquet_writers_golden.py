#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small Parquet files of several writers, and what is in them.

Writes the folder parquet/writers/ beside this script: files whose metadata has what one writer does
and others do not (row groups of no rows, whole dictionaries with every row group, empty lists
of any type, unsigned numbers), and rows.json, what pyarrow reads in each.
Needs pyarrow, duckdb, polars, fastparquet.  Run: python make_parquet_writers_golden.py
"""
import json
import pathlib

import duckdb
import fastparquet
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

OUT = pathlib.Path(__file__).parent / "parquet" / "writers"


def text(rows):
    return pa.table({"text": pa.array(rows, pa.string())})


def write_groups(name, **options):
    with pq.ParquetWriter(OUT / name, text([]).schema, **options) as writer:
        for rows in [[], ["one"], [], [], ["two", None], []]:
            writer.write_table(text(rows))


def with_pyarrow():
    write_groups("pyarrow-groups.parquet")
    write_groups("pyarrow-groups-plain.parquet", use_dictionary=False, compression="none",
                 data_page_version="2.0", write_page_index=True)
    pq.write_table(text([]), OUT / "pyarrow-empty.parquet")
    dictionary = pa.DictionaryArray.from_arrays(
        pa.array([0, 2], pa.int32()), ["one", "unused", "two", "x", "y", "z"])
    pq.write_table(pa.table({"text": dictionary}), OUT / "pyarrow-dictionary.parquet")
    for name, dictionary in [("plain", False), ("dictionary", True)]:
        pq.write_table(pa.table({
            f"u{bits}": pa.array([0, 1 << (bits - 1), (1 << bits) - 1], f"uint{bits}")
            for bits in [8, 16, 32, 64]}), OUT / f"pyarrow-unsigned-{name}.parquet",
            use_dictionary=dictionary)


def with_duckdb():
    for name, query in [
            ("lists", "select * from (values ('one', []::varchar[]), ('two', ['a']), (null, null)) "
                      "t(text, list)"),
            ("empty", "select 'x' as text where false"),
            ("unsigned", "select 255::utinyint u8, 65535::usmallint u16, 4294967295::uinteger u32, "
                         "18446744073709551615::ubigint u64")]:
        duckdb.sql(f"copy ({query}) to '{OUT / f'duckdb-{name}.parquet'}' (format parquet)")


def with_polars():
    pl.DataFrame({"text": pl.Series([], dtype=pl.String)}).write_parquet(
        OUT / "polars-empty.parquet")
    pl.DataFrame({"text": ["one", "two"], "list": [[], ["a"]],
                  "u32": pl.Series([1 << 31, (1 << 32) - 1], dtype=pl.UInt32),
                  "category": pl.Series(["a", "b"], dtype=pl.Categorical)}).write_parquet(
        OUT / "polars-mixed.parquet")


def with_fastparquet():
    frame = pd.DataFrame({"text": pd.Series(["one", "two", None], dtype=object)})
    fastparquet.write(OUT / "fastparquet-groups.parquet", frame, object_encoding="utf8",
                      row_group_offsets=[0, 1, 1, 2])
    categories = pd.Categorical(["one", "two"], categories=["one", "x", "two", "y", "z"])
    fastparquet.write(OUT / "fastparquet-categories.parquet", pd.DataFrame({"text": categories}))


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    with_pyarrow()
    with_duckdb()
    with_polars()
    with_fastparquet()
    rows = {path.stem: pq.read_table(path).to_pylist() for path in sorted(OUT.glob("*.parquet"))}
    (OUT / "rows.json").write_text("{" + ",\n".join(
        json.dumps(name) + ": " + json.dumps(held) for name, held in rows.items()) + "}\n")
