from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.base import UserError
from linearize.demo import corpus
from linearize.demo.corpus import HELD_OUT_MODULES, module_sources, standard_library_texts, teacher_path


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    return standard_library_texts()


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_no_text_is_on_both_sides(texts):
    train, held_out = texts
    assert not set(train) & set(held_out)
    assert len(train) > 400


def test_held_out_are_the_modules_the_teacher_never_saw(texts):
    _, held_out = texts
    # What every Python has, read the way a user would look it up.
    for module in (importlib.import_module(name) for name in ("json.encoder", "optparse", "string", "xml.dom")):
        assert Path(module.__file__).read_text(encoding="utf-8") in held_out
    # sunau and telnetlib are gone from newer Pythons, importlib.resources is not a package in older ones.
    assert len(HELD_OUT_MODULES) - 3 <= len(held_out) <= len(HELD_OUT_MODULES)


def test_the_readme_of_the_teacher_lists_the_held_out_modules():
    section = (teacher_path() / "README.md").read_text(encoding="utf-8").split("# What it never saw")[1]
    standard_library = section.split("From packages")[0]
    assert set(re.findall(r"`([\w.]+)`", standard_library)) - {"linearize.demo.corpus", "__init__.py"} == (
        HELD_OUT_MODULES
    )


def test_a_copy_of_a_held_out_text_is_not_trained_on(tmp_path, monkeypatch):
    write(tmp_path, {"string.py": "x = 1\n", "copied.py": "x = 1\n", "string_too.py": "x = 2\n"})
    monkeypatch.setattr(corpus, "standard_library_folder", lambda: tmp_path)
    assert standard_library_texts() == (["x = 2\n"], ["x = 1\n"])


def test_sources_are_sorted_and_only_those_of_the_library(tmp_path):
    library = write(
        tmp_path,
        {
            "string/templatelib.py": "t",
            "string/__init__.py": "s",
            "ast.py": "\ufeffa",
            "blank.py": " \n",
            "latin.py": b"# caf\xe9",
            "notes.txt": "n",
            "test/test_ast.py": "t",
            "idlelib/idle_test/test_idle.py": "t",
            "site-packages/numpy/core.py": "n",
            "config-3.11-linux/python-config.py": "c",
            "_sysconfigdata__linux.py": "c",
        },
    )
    assert list(module_sources(library)) == [("ast", "a"), ("string", "s"), ("string.templatelib", "t")]


def test_modules_are_named_from_the_outermost_package_on(tmp_path):
    write(
        tmp_path, {"networkx/__init__.py": "n", "networkx/tests/core.py": "t", "networkx/algorithms/__init__.py": "a"}
    )
    expected = [("networkx.algorithms", "a")]
    assert list(module_sources(tmp_path / "networkx" / "algorithms")) == expected
    assert list(module_sources(tmp_path)) == [("networkx", "n"), *expected]


def test_a_python_without_sources_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "standard_library_folder", lambda: tmp_path)
    with pytest.raises(UserError, match=r"expected Python sources in .* found 0 files"):
        standard_library_texts()


def test_the_teacher_predicts_held_out_code(texts):
    _, held_out = texts
    tokenizer = AutoTokenizer.from_pretrained(teacher_path())
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32)
    assert len(tokenizer) == teacher.config.vocab_size == 4096
    # From the middle of the longest texts, where no licence comments are.
    longest = sorted(held_out, key=len, reverse=True)[:8]
    middles = [text[len(text) // 2 :][:4000] for text in longest]
    encoded = tokenizer(middles, add_special_tokens=False)["input_ids"]
    rows = torch.tensor([[tokenizer.bos_token_id, *ids[:511]] for ids in encoded])
    assert tokenizer.decode(encoded[0]) == middles[0]
    with torch.no_grad():
        loss = teacher(input_ids=rows, labels=rows, use_cache=False).loss.item()
    assert 2.0 < loss < 3.2  # guessing: log 4096 = 8.3


def test_the_bundle_stays_small():
    assert sum(path.stat().st_size for path in teacher_path().iterdir()) < 12e6
