#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dependencies point one way: base <- {dist, format, gpu, parquet, tokenizer, chat_template} <-
{ops, data, grammar} <- model <- checkpoint <- {train, infer, tasks} <- serve <- bench <- cli. Nothing outside of CUDA
sources needs the CUDA toolkit. A source includes what it names of the precompiled headers. Reads
every #include of the tree and the DEPS of twell/CMakeLists.txt."""

import pathlib
import re
import subprocess
import sys

GROUND = {"base", "dist", "format", "gpu", "parquet", "tokenizer", "chat_template"}
LIBRARY = GROUND | {"grammar", "data", "ops", "model", "checkpoint", "train", "infer", "tasks", "serve"}
ALLOWED = {
    "base": set(),
    "dist": {"base"},
    "format": {"base"},
    "gpu": {"base", "format"},
    "parquet": {"base"},
    "tokenizer": {"base"},
    "chat_template": {"base"},
    "grammar": {"base", "tokenizer"},
    "data": {"base", "parquet", "tokenizer", "chat_template"},
    "ops": {"base", "format", "gpu", "ops"},
    "model": {"base", "format", "ops"},
    "checkpoint": {"base", "format", "ops", "model"},
    "train": {"base", "dist", "format", "tokenizer", "data", "ops", "model", "checkpoint"},
    "infer": {"base", "format", "tokenizer", "grammar", "data", "ops", "model", "checkpoint"},
    "tasks": {"base", "format", "parquet", "tokenizer", "data", "ops", "model", "checkpoint"},
    "serve": {"base", "tokenizer", "grammar", "chat_template", "ops", "model", "checkpoint", "infer"},
    "bench": LIBRARY | {"bench"},
    "cli": LIBRARY | {"bench", "cli"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"((?:twell|cli|bench)/[^"]+)"', re.MULTILINE)
# Includes of CUDA toolkit headers, and code that is compiled only with a toolkit.
TOOLKIT = re.compile(r'^\s*#\s*include\s+<(?:cuda|cublas|cudnn|nvml)[^>]*>', re.MULTILINE)
GUARDED = re.compile(r"^#if(?:def)? [^\n]*TWELL_HAVE_CUDA.*?^#(?:else|endif)",
                     re.MULTILINE | re.DOTALL)
# Precompiled headers (cmake/Rooms.cmake), whose lack no build shows, and names of theirs.
PRECOMPILED = {header: re.compile(r"\b" + names) for header, names in {
    "algorithm": r"std::(?:sort|stable_sort|min_element|max_element|clamp|fill|copy_n|all_of|"
                 r"any_of|none_of|find_if|lower_bound|upper_bound|nth_element)\b",
    "array": r"std::array\b",
    "atomic": r"std::atomic\b",
    "chrono": r"std::chrono\b",
    "cmath": r"std::(?:sqrt|exp|log|isfinite|isnan|isinf|floor|ceil|pow|fabs|tanh)\b",
    "cstring": r"std::mem(?:cpy|set|cmp|move|chr)\b",
    "filesystem": r"std::filesystem\b",
    "fmt/": r"fmt::",
    "fstream": r"std::[io]?fstream\b",
    "functional": r"std::function\b",
    "limits": r"std::numeric_limits\b",
    "map": r"std::map\b",
    "memory": r"std::(?:unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared)\b",
    "mutex": r"std::(?:mutex|lock_guard|unique_lock|scoped_lock)\b",
    "nlohmann/": r"nlohmann::",
    "optional": r"std::(?:optional|nullopt)\b",
    "set": r"std::set\b",
    "span": r"std::span\b",
    "sstream": r"std::[io]?stringstream\b",
    "string": r"std::(?:string|to_string)\b",
    "thread": r"std::(?:thread|this_thread)\b",
    "unordered_map": r"std::unordered_map\b",
    "variant": r"std::(?:variant|visit|get_if|holds_alternative)\b",
    "vector": r"std::vector\b",
}.items()}
SYSTEM = re.compile(r"^\s*#\s*include\s+<([^>]+)>", re.MULTILINE)
COMMENT = re.compile(r"//.*")
ROOM = re.compile(r"twell_room\((\S+)((?:[^()]|\([^()]*\))*)\)")


def layer_and_room(path):
    """twell/ops/ffn/ffn.h -> ("ops", "ops/ffn"); twell/base/error.h -> ("base", "base")."""
    parts = path.split("/")
    if parts[0] in ("bench", "cli"):
        return parts[0], parts[0]
    if parts[1] == "ops":
        return "ops", "/".join(parts[1:3])
    return parts[1], parts[1]


def declared_dependencies(root):
    rooms = {}
    for room, rest in ROOM.findall((root / "twell/CMakeLists.txt").read_text()):
        words = rest.split()
        direct = set()
        if "DEPS" in words:
            for word in words[words.index("DEPS") + 1:]:
                if word == "LIBS":
                    break
                direct.add(word)
        rooms[room] = direct
    reachable = {}
    for room in rooms:
        seen, todo = {room}, [room]
        while todo:
            for dep in rooms.get(todo.pop(), ()):
                if dep not in seen:
                    seen.add(dep)
                    todo.append(dep)
        reachable[room] = seen
    return reachable


def toolkit_header(root, name, seen):
    """A header that includes one of the CUDA toolkit's, reached from this file without a guard."""
    if name in seen or not (root / name).exists():
        return None
    seen.add(name)
    text = GUARDED.sub("", (root / name).read_text())
    if TOOLKIT.search(text):
        return name
    found = (toolkit_header(root, included, seen) for included in INCLUDE.findall(text))
    return next((header for header in found if header), None)


def system_headers(root, name, known):
    """The headers in <> that this file includes, and those that its headers of ours do."""
    if name not in known:
        known[name] = set()
        if (root / name).exists():
            text = (root / name).read_text()
            known[name] = set(SYSTEM.findall(text)).union(
                *(system_headers(root, included, known) for included in INCLUDE.findall(text)))
    return known[name]


def missing_headers(root, name, known):
    """Precompiled headers that this file relies on without including them."""
    text = COMMENT.sub("", (root / name).read_text())
    headers = system_headers(root, name, known)
    return [header for header, names in PRECOMPILED.items()
            if names.search(text) and not any(
                found == header or (header.endswith("/") and found.startswith(header))
                for found in headers)]


# What a header declares at the start of a line: types, constants and functions.
DECLARED = re.compile(
    r"^(?:template <[^>]*>\s*)?(?:class|struct|enum class|enum|using(?! namespace))\s+(\w+)"
    r"|^(?:inline )?constexpr [^=;{}()]*?\b(k[A-Z]\w*)\b"
    r"|^(?:inline |constexpr |\[\[\w+\]\] )*[A-Za-z_][\w:<>,&* ]*?[ &*>](\w+_\w+)\(",
    re.MULTILINE)
USED = re.compile(r"(?<![\w.>:])(?:twell::)?((?!alignas\b)[A-Za-z_]\w+)\b")
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|^\s*#.*', re.MULTILINE)


def declared_names(text):
    return {name for found in DECLARED.findall(text) for name in found if name}


def headers_of_ours(root, name, known):
    """This file and the headers of ours that it reaches."""
    if name not in known:
        known[name] = {name}
        if (root / name).exists():
            for included in INCLUDE.findall((root / name).read_text()):
                known[name] |= headers_of_ours(root, included, known)
    return known[name]


def undeclared_names(root, listing, reachable):
    """Sources that use a name of a header of ours without reaching a declaration. Unity builds, which
    compile the sources of a room as one, do not find them."""
    where, names = {}, {}
    for name in listing:
        if (root / name).exists():
            names[name] = declared_names(COMMENT.sub("", (root / name).read_text()))
            if name.endswith((".h", ".cuh")):
                for declared in names[name]:
                    where.setdefault(declared, set()).add(name)
    known, texts, faults = {}, {}, []
    for name in listing:
        if name not in names or "_test." in name or "_bench." in name or not (
                name.startswith("twell/") and name.endswith(".cc")):
            continue
        reached = headers_of_ours(root, name, known)
        for file in reached - texts.keys():
            texts[file] = ""
            if (root / file).exists():
                texts[file] = QUOTED.sub("", COMMENT.sub("", (root / file).read_text()))
        everything = "".join(texts[file] for file in reached)
        for used in sorted(set(USED.findall(texts[name])) & where.keys()):
            possible = [header for header in sorted(where[used])
                        if layer_and_room(header)[1] in reachable[layer_and_room(name)[1]]]
            if not possible or reached.intersection(possible):
                continue
            # Names of members, parameters and what is within a function are not that header's.
            if not re.search(rf"(?:[\w>&*] |[*&]|::){used}\b\s*[=(;,){{[]|[,{{]\s*{used}\s*=[^=]"
                             rf"|(?:class|struct|enum|using|typename) {used}\b", everything):
                faults.append(f"{name}: uses {used} without a header that declares it "
                              f"({', '.join(possible)})")
    return faults


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "twell", "bench",
         "cli"],
        cwd=root, check=True, capture_output=True, text=True).stdout.split()
    reachable = declared_dependencies(root)
    faults = []
    known = {}
    checked = 0
    for name in listing:
        if not name.endswith((".h", ".cc", ".cu", ".cuh")) or not (root / name).exists():
            continue
        layer, room = layer_and_room(name)
        # A build without the toolkit leaves out *_cuda*.cc (cmake/Rooms.cmake).
        if name.endswith(".cc") and "_cuda" not in pathlib.Path(name).name:
            header = toolkit_header(root, name, set())
            if header:
                faults.append(f"{name}: needs the CUDA toolkit ({header}), but is not *_cuda.cc")
        if "_test." not in name:
            faults += [f"{name}: uses <{header}> without including it"
                       for header in missing_headers(root, name, known)]
        for included in INCLUDE.findall((root / name).read_text()):
            checked += 1
            other_layer, other_room = layer_and_room(included)
            if other_layer != layer and other_layer not in ALLOWED.get(layer, ()):
                faults.append(f"{name}: {layer} must not include {included}")
            elif layer not in ("bench", "cli") and other_room not in reachable.get(room, ()):
                faults.append(f"{name}: {other_room} is not among the DEPS of {room} "
                              "in twell/CMakeLists.txt")
            if not (root / included).exists():
                faults.append(f"{name}: {included} does not exist")
    sources = [name for name in listing if name.endswith((".h", ".cc", ".cu", ".cuh"))]
    faults += undeclared_names(root, sources, reachable)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"includes: {checked} checked, all point the right way")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
