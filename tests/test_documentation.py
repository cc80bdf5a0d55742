"""The documentation: generated pages are up to date, links lead somewhere, and commands exist as they are printed."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main

from linearize.configs.feature_maps import FEATURE_MAP_CONFIGS
from linearize.recipe import Recipe, parse_overrides, recipe_names
from linearize_cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
    if path.name != "CHANGELOG.md"  # of commands as they were
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("name", ["recipe.md", "cli.md"])
def test_the_reference_is_that_of_the_code(name: str) -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "write_reference.py"))["PAGES"][name]()
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert made == committed, "python scripts/write_reference.py"


def test_the_reference_has_every_feature_map() -> None:
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    types = [config.model_fields["type"].default for config in FEATURE_MAP_CONFIGS]
    assert types and [name for name in types if f"**`type: {name}`**" not in page] == []


def test_the_diagrams_are_those_of_the_script() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))
    for name in script["DIAGRAMS"]:
        committed = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert script["svg"](name) == committed, "python scripts/diagrams.py"


def commands(page: Path) -> list[list[str]]:
    """The `linearize` commands in a page's code blocks and tables, split into words."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}[^`\n]*?\b(linearize [a-z][^`\n]*)$", text, re.MULTILINE)
    inline = re.findall(r"`(?:torchrun[^`]*-m )?(linearize [a-z][^`]*)`", text)
    found = []
    for line in lines + inline:
        if line.count('"') % 2:  # quoted as a whole
            line = line.rpartition('"')[0]
        found.append(shlex.split(line.replace("...", ""), comments=True)[1:])
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_there_with_their_options_and_fields(page: Path) -> None:
    for name, *words in commands(page):
        assert name in COMMANDS, name
        options = {x for parameter in COMMANDS[name].params for x in [*parameter.opts, *parameter.secondary_opts]}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}, words
        named = words[0] if words and words[0] in recipe_names() else "lolcats"
        recipes = [Recipe.load(recipe) for recipe in ("recommended", named)]
        for option, value in pairwise(words):
            if option == "--set" and "=" in value and value.split("=")[1]:
                parse_overrides([value])
                fields = value.partition("=")[0].split(".")
                if fields[0] in ("memory", "evaluation", "finetune", "data", "distributed"):
                    assert any(has_field(recipe, fields) for recipe in recipes), value


def has_field(config: Any, fields: list[str]) -> bool:
    """Whether a config has a dotted field, as far as its parts are not null."""
    for field in fields:
        if config is None or isinstance(config, dict):
            return True
        if field not in type(config).model_fields:
            return field == "type"
        config = getattr(config, field)
    return True


def test_wrong_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for line in ("linearize fly M", "linearize run --moddel M", "linearize run --set finetune.lrr=1"):
        page.write_text(f"    {line}\n", encoding="utf-8")
        with pytest.raises(AssertionError):
            test_commands_are_there_with_their_options_and_fields(page)
    page.write_text("See [this](nothing.md).\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        test_links_lead_to_files_and_headings(page)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs says so, too, but is not installed where these tests run."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    tracked = subprocess.run(["git", "ls-files", "docs/*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed == {path.removeprefix("docs/") for path in tracked.stdout.split()}
