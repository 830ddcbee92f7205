#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answers drawn by JSON schemas validate: random schemas, and those of a copy of the JSON Schema test suite.

Run: serve_schema_test.py TWELL [--schemas N] [--seed N] [--suite FOLDER]. Every schema is either refused by
name, or each answer that ends by itself parses and validates by `jsonschema`. Exits with 77 (skipped) where
that is not installed; scripts/setup.sh --test installs it into .cache/openai-client."""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import random
import re
import sys
import urllib.error
import urllib.request

from serve_testing import Served, needs_clients

needs_clients("jsonschema")
import jsonschema

PATTERNS = ["^[a-c]{1,4}$", "^(ab|c)d?$", "^\\d{2}-\\d{2}$", "^[A-Z][a-z]{0,3}$", "^x?y*$"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "hostname", "ipv4", "ipv6", "uri"]


class Schemas:
    """Random schemas whose answers are short."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def root(self):
        r = self.random
        self.conditions = r.random() < 0.5  # negations exclude "unevaluatedProperties"
        schema = self.object(3) if r.random() < 0.7 else self.any(3)
        if r.random() < 0.3:
            schema = {**schema, "$defs": {"node": self.any(1)}}
            if "properties" in schema:
                schema["properties"]["ref"] = {"$ref": "#/$defs/node"}
        if r.random() < 0.1 and "properties" in schema:  # recursive
            schema["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
        return schema

    def any(self, depth):
        kinds = [self.integer, self.number, self.string, self.enum, self.simple]
        if depth > 0:
            kinds += [self.array, self.object, self.any_of] * 2 + [self.merged]
        return self.random.choice(kinds)(depth)

    def simple(self, _):
        return self.random.choice([{"type": "boolean"}, {"type": "null"}, {"const": "größer \"1\""}, {"const": 7},
                                   {"const": {"a": [1, None]}}, {"type": ["boolean", "null"]}])

    def enum(self, _):
        values = ["a", "b c", "\U0001F600", 1, -2.5, None, True, [], {"k": "v"}]
        return {"enum": self.random.sample(values, self.random.randint(1, 5))}

    def integer(self, _):
        r, schema = self.random, {"type": "integer"}
        low = r.randint(-1000, 1000)
        schema[r.choice(["minimum", "exclusiveMinimum"])] = low
        schema[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([2, 9, 100, 12345])
        return schema

    def number(self, _):
        r, schema = self.random, {"type": "number"}
        low = round(r.uniform(-100, 100), r.choice([0, 1, 2]))
        if r.random() < 0.7:
            schema[r.choice(["minimum", "exclusiveMinimum"])] = low
            schema[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([1, 10.5, 1000])
        return schema

    def string(self, _):
        r = self.random
        kind = r.random()
        if kind < 0.25:
            return {"type": "string", "pattern": r.choice(PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": r.choice(FORMATS)}
        low = r.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + r.randint(0, 5)}

    def array(self, depth):
        r, schema = self.random, {"type": "array", "items": self.any(depth - 1)}
        if r.random() < 0.3:
            schema["prefixItems"] = [self.any(depth - 1) for _ in range(r.randint(1, 2))]
            schema["items"] = r.choice([False, schema["items"]])
        least = r.randint(0, 2) if schema["items"] else 0
        schema["minItems"] = least
        schema["maxItems"] = max(least, len(schema.get("prefixItems", []))) + r.randint(0, 2)
        return schema

    def object(self, depth):
        r = self.random
        names = r.sample(["a", "b", "city", "größe", "x y", "n", "deep"], r.randint(0, 4))
        schema = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        if names:
            schema["required"] = r.sample(names, r.randint(0, len(names)))
        if r.random() < 0.5:
            schema["additionalProperties"] = False
        if r.random() < 0.1:
            schema = {"type": "object", "additionalProperties": self.integer(0), "maxProperties": r.randint(0, 3)}
        return schema

    def merged(self, depth):
        """Keywords beside others, of which the library by itself would read some alone."""
        r = self.random
        first = {"properties": {"a": self.integer(0), "b": self.any(depth - 1)}, "required": ["a"]}
        second = {"properties": {"a": {"type": ["integer", "string"]}, "c": self.any(depth - 1)},
                  "required": r.sample(["a", "c"], r.randint(0, 2))}
        conditions = [{**first, "if": {"properties": {"a": {"minimum": r.randint(-9, 9)}}}, "then": second,
                       "else": {"properties": {"d": {"type": "null"}}, "required": ["d"]}},
                      {"properties": {"k": {"enum": ["x", "y", 3]}, "n": self.any(depth - 1)},
                       "allOf": [{"if": {"properties": {"k": {"const": k}}, "required": ["k"]},
                                  "then": {"required": ["n"]}} for k in ("x", 3)]},
                      {"properties": {"a": {"enum": [1, 2]}, "b": self.any(depth - 1)},
                       "not": {"properties": {"a": {"const": 2}}, "required": ["b"]}},
                      {"properties": {"a": {"type": "null"}, "b": self.any(depth - 1)},
                       "dependentRequired": {"a": ["b"]}},
                      {"type": "array", "items": {"enum": [1, "a", None]}, "maxItems": r.randint(1, 3),
                       "contains": {"not": {"type": ["integer", "number"]}}}]
        if self.conditions:
            return r.choice(conditions)
        schema = r.choice([{"allOf": [first, second]}, {**first, "allOf": [second]},
                           {**first, "anyOf": [second, {"required": ["b"]}, {"type": "null"}]},
                           {"enum": [1, 5, "x", None], "minimum": 3, "type": ["integer", "string"]},
                           {"minimum": 3, "maximum": 7, "minLength": 1, "maxLength": 3},
                           {"allOf": [{"prefixItems": [{"type": "integer"}]}, {"items": {"maximum": 9, "minimum": 1}}],
                            "maxItems": 2}])
        if "properties" in schema or "allOf" in schema:
            schema["unevaluatedProperties"] = False
        return schema

    def any_of(self, depth):
        return {"anyOf": [self.any(depth - 1) for _ in range(self.random.randint(1, 3))]}


def suite_schemas(folder):
    for path in sorted(pathlib.Path(folder).rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.name}: {group['description']}", group["schema"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("twell")
    parser.add_argument("--schemas", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite")
    parser.add_argument("--max-tokens", type=int, default=1500)
    arguments = parser.parse_args()
    schemas = Schemas(arguments.seed)
    if arguments.suite:
        asked = list(suite_schemas(arguments.suite))
    else:
        asked = [(f"random {i}", schemas.root()) for i in range(arguments.schemas)]
    served = Served(arguments.twell, "--batch", "16", context=2048)
    counts, failures = collections.Counter(), []
    by_keyword, reasons = collections.defaultdict(collections.Counter), collections.Counter()

    def ask(number, name, schema):
        body = {"prompt": f"{number}", "seed": number, "max_tokens": arguments.max_tokens,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        request = urllib.request.Request(served.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                choice = json.load(reply)["choices"][0]
        except urllib.error.HTTPError as error:
            found = json.load(error)["error"]
            if error.code != 400 or found["param"] != "response_format":
                return "failed", f"{error.code}: {found['message']}"
            return "refused", found["message"]
        if choice["finish_reason"] != "stop":
            return "cut off", choice["text"]
        try:
            value = json.loads(choice["text"])
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            return "failed", f"{choice['text']}: {error}"
        return "validated", choice["text"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda one: ask(one[0], *one[1]), enumerate(asked)))
    for (name, schema), (result, text) in zip(asked, results):
        counts[result] += 1
        if arguments.suite:
            by_keyword[name.split(".json")[0]][result] += 1
            if result == "refused":
                reasons[re.sub(r' at "[^"]*"$', "", text.split("cannot be used: ")[-1])] += 1
        if result == "failed" or (result == "refused" and not arguments.suite):
            failures.append(f"{name}: {result}: {json.dumps(schema)}\n  {text[:600]}")
    code = served.stop()
    print("\n".join(failures[:20]))
    for keyword, found in sorted(by_keyword.items()):
        print(f"{keyword}: " + ", ".join(f"{count} {result}" for result, count in sorted(found.items())))
    for reason, count in reasons.most_common():
        print(f"{count} refused: {reason}")
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    # A model that is not trained writes long texts, where they are not bounded.
    most_cut = len(asked) if arguments.suite else len(asked) // 10
    sys.exit(0 if code == 0 and not failures and counts["cut off"] <= most_cut else 1)


if __name__ == "__main__":
    main()
