"""Input that nobody meant, as hypothesis draws it: documents with something else in some places, and damaged bytes."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

import hypothesis.strategies as st
import yaml

_FLOATS = [0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan")]
_NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, 2**70, -(2**63), *_FLOATS])
_WORDS = st.sampled_from(["", "0", "null", "float32", "linear", "../..", "a\nb", "\x00", "é", "{}", "<b>", "auto"])
_LEAVES = st.none() | st.booleans() | _NUMBERS | _WORDS | st.text(max_size=6)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three of its parts replaced, removed or added to."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        around, key = None, None
        part = found
        while isinstance(part, dict | list) and part and (around is None or draw(st.integers(0, 3))):
            keys = sorted(part, key=str) if isinstance(part, dict) else range(len(part))
            around, key = part, draw(st.sampled_from(keys))
            part = around[key]
        if around is None:
            return draw(VALUES)
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                around[key] = draw(VALUES)
            case "remove":
                del around[key]
            case _ if isinstance(around, dict):
                around[draw(st.text(max_size=6))] = draw(VALUES)
            case _:
                around.insert(key, draw(VALUES))
    return found


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes cut off, empty, or with some bits flipped, bytes lost or others added."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    match draw(st.sampled_from(["cut", "empty", "flip", "lose", "add", "other"])):
        case "cut":
            return data[:at]
        case "empty":
            return b""
        case "flip":
            found = bytearray(data)
            for _ in range(draw(st.integers(1, 4))):
                found[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
            return bytes(found)
        case "lose":
            return data[:at] + data[at + draw(st.integers(1, 9)) :]
        case "add":
            return data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
        case _:
            return draw(st.binary(max_size=60))


def json_files(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON file that is nearly this one."""
    text = json.dumps(document).encode()
    return changed(document).map(lambda found: json.dumps(found).encode()) | damaged(text)


def yaml_files(text: str) -> st.SearchStrategy[bytes]:
    """A YAML file that is nearly this one."""
    document = yaml.safe_load(text)
    return changed(document).map(lambda found: yaml.safe_dump(found).encode()) | damaged(text.encode())


@st.composite
def safetensors_files(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file with another header, or one that is damaged."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(data))
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(draw(changed(json.loads(data[8 : 8 + length])))).encode()
    stated = draw(st.sampled_from([len(header)] * 6 + [0, len(header) - 1, len(data), 2**40, 2**63]))
    return struct.pack("<Q", stated) + header + data[8 + length :]


@st.composite
def datasets(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of text for training, by its name."""
    row = {"text": "some words to learn from " * 3}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = draw(st.lists(changed(draw(st.sampled_from([row, chat]))) | st.just(row), max_size=4))
    lines = "\n".join(json.dumps(found) for found in rows).encode()
    suffix = draw(st.sampled_from(["jsonl", "json", "txt", "csv", "tsv", "parquet", "md", ""]))
    if suffix == "json" and draw(st.booleans()):
        lines = json.dumps(rows).encode()
    data = lines if draw(st.booleans()) else draw(damaged(lines or b"a"))
    return f"text.{suffix}", data


def command_lines(values: list[str]) -> st.SearchStrategy[list[str]]:
    """Words after `linearize`: commands and options in any order, with values that may be of something else."""
    commands = ["plan", "recipes", "run", "eval", "report", "bench", "generate", "frontier"]
    options = ["--model", "--dataset", "--output-dir", "--until", "--block", "--set", "--dtype", "--device", "--seed"]
    options += ["--teacher", "--tasks", "--shots", "--limit", "--output", "--lengths", "--batch-size", "--prompt"]
    options += ["--json", "--trust-tasks", "--compile", "--fraction", "--window", "--temperature", "--help", "--"]
    settings = st.builds(
        "{}={}".format,
        st.sampled_from(
            ["seed", "mixer", "mixer.span.window_size", "transfer.lr", "data.dataset", "a.b", "", "layers"]
        ),
        VALUES.map(repr),
    )
    printable = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
    word = st.sampled_from(options) | st.sampled_from(values) | settings | printable | st.integers(-2, 9).map(str)
    return st.builds(lambda first, rest: [first, *rest], st.sampled_from(commands), st.lists(word, max_size=8))
