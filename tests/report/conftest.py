"""Pages are slow to make, so the tests share them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linearize.report.load import RunFiles, load_run
from linearize.report.page import write_report
from tests.report import sample


@pytest.fixture(scope="session")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of one run with everything."""
    folder = tmp_path_factory.mktemp("whole")
    return write_report([sample.write_run(folder / "alpha")], folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def page_of_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of two runs of different teachers; only the first has been measured inside."""
    folder = tmp_path_factory.mktemp("two")
    bare = {
        name: found
        for name, found in sample.evaluation(1, shift=0.03).items()
        if name not in ("fidelity", "retrieval", "speed")
    }
    first = sample.evaluation()
    first["fidelity"]["layers"] = first["fidelity"]["layers"][:2]
    runs = [
        sample.write_run(folder / "alpha", first),
        sample.write_run(folder / "beta", bare, teacher_parameters=7_000_000),
    ]
    return write_report(runs, folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., RunFiles]:
    """A run with these sections instead of the sample's; None drops a section."""

    def make(**sections: Any) -> RunFiles:
        found = {name: section for name, section in (sample.evaluation() | sections).items() if section is not None}
        return load_run(sample.write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", found))

    return make
