"""The script that finds the longest chain of imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.import_chain import SOURCE, import_graph, longest_chain

MODULES = {
    "__init__": "",
    "base": "import os\n",
    "data": "from linearize.base import UserError\n",
    "model": "from linearize import data\nimport torch\n",
    "cycle": "from __future__ import annotations\nif TYPE_CHECKING:\n    from linearize.run import run\n",
    "run": "try:\n    import linearize.model\nexcept ImportError:\n    from linearize.cycle import x\n",
    "lazy": "def f():\n    import linearize.run\n",
}


def test_the_longest_chain(tmp_path: Path) -> None:
    (tmp_path / "linearize").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "linearize" / f"{name}.py").write_text(text)
    graph = import_graph(tmp_path)
    assert longest_chain(graph) == ("linearize.run", "linearize.model", "linearize.data", "linearize.base")
    assert graph["linearize.cycle"] == graph["linearize.lazy"] == set()
    assert "linearize.cycle" in graph["linearize.run"]


def test_modules_that_import_each_other_are_an_error() -> None:
    with pytest.raises(RecursionError):
        longest_chain({"a": {"b"}, "b": {"a"}})


def test_the_package_has_no_circle() -> None:
    assert longest_chain(import_graph(SOURCE))[-1] == "linearize.base"
