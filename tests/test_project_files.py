"""What stands around the code says the same as the code: citation, changelog and workflow."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    """By the same make targets, on the oldest Python that is supported too."""
    jobs: dict[str, Any] = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == re.findall(r"^make .*$", read(".ci/run"), re.MULTILINE)
    assert commands == ["make test", "make test-kernels", "make test-browser", "make docs"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', read("pyproject.toml"))
    assert oldest is not None and oldest[1] in jobs["test"]["strategy"]["matrix"]["python"]


def test_every_suite_of_tests_runs_on_each_commit_or_each_night() -> None:
    """GPU tests apart: the machines of these workflows have none."""
    nightly: dict[str, Any] = yaml.safe_load(read(".github/workflows/nightly.yml"))["jobs"]["suite"]
    suites = set(re.findall(r"^(test-?[a-z]*):", read("Makefile"), re.MULTILINE)) - {"test-gpu"}
    every_commit = set(re.findall(r"^make (test\S*)$", read(".ci/run"), re.MULTILINE))
    assert every_commit | set(nightly["strategy"]["matrix"]["target"]) == suites


def test_actions_are_pinned_by_their_commit() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), path


def test_the_citation_is_of_this_version_and_names_the_papers() -> None:
    cited = yaml.safe_load(read("CITATION.cff"))
    assert cited["version"] == version("linearize") and cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors", "type"} <= cited.keys()
    papers = {"2402.04347", "2405.06640", "2410.10254", "2502.01578"}  # the fifth is a workshop's, not on arXiv
    assert {url.rpartition("/")[2] for paper in cited["references"] if (url := paper.get("url"))} == papers
    assert len(cited["references"]) == 5 and all(paper["authors"] for paper in cited["references"])


def test_the_changelog_has_this_version() -> None:
    """Newest first, as Keep a Changelog has it. A development version has the section of its release."""
    sections = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert sections[:2] == ["Unreleased", re.sub(r"\.dev\d+$", "", version("linearize"))]
    assert set(re.findall(r"^### (\w+)", read("CHANGELOG.md"), re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security",
    }  # fmt: skip


def test_every_line_on_security_names_a_test_that_is_there() -> None:
    lines = [line for line in read("SECURITY.md").splitlines() if line.startswith("| ") and "what | proof" not in line]
    assert len(lines) >= 14
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line)
        assert named, line
        for path, test in named:
            assert f"\ndef {test}(" in read(path), (path, test)
        for case in re.findall(r'"([^"]+)"', line.rpartition("|")[0].rpartition("(")[2]):
            assert f'"{case}": (' in read(named[0][0]), case
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "(SECURITY.md)" in read(page)
