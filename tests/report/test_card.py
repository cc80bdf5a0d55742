"""The card of a student's folder."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from linearize.evaluation.results import Results
from linearize.recipe import Recipe
from linearize.report import card
from linearize.report.card import model_card
from linearize.report.load import RunFiles, RunRecord, load_run
from tests.report import sample, task_sample

COPIES = Path(__file__).parent / "measured" / "pycode-5m"


def test_a_card_has_front_matter_results_findings_limits_and_the_recipe(tmp_path: Path) -> None:
    card = model_card(load_run(sample.write_run(tmp_path / "student")))
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["linearize", "linear-attention"],
    }
    assert body.startswith("\n# student\n\n`made-up-teacher`, linearized with the recipe `lolcats`: Sliding window")
    assert 'from_pretrained("student")' in body
    assert "| student | 2.531 [2.331, 2.731] | 2.491 [2.291, 2.691] | 12.57 | \N{EN DASH} | made up: student |" in body
    kept, lost = body.index("### Kept or better"), body.index("### Lost or worse")
    assert kept < body.index("better than the window-only control") < lost < body.index("worse than its teacher")
    assert "rest on 49,048 held-out tokens" in body and "Not measured" not in body
    recipe = body.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["mixer"]["span"]["window_size"] == 64


def test_a_card_of_few_measurements_says_what_is_missing() -> None:
    card = model_card(load_run(COPIES))
    assert "Not measured: agreement with the teacher; loss by position; generations; recall over distances;" in card
    assert "## Recipe" not in card
    assert "long-context gain retained (this run compared it with untrained models only)" in card


HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](http://evil.example)",
    "![seen](http://evil.example/pixel)",
    "[0.1, 0.2]: http://evil.example",
    "a\n\n# Heading\n\n- item",
    "# heading",
    "1. one",
    "a | b | c",
    "`code` ``more`` ```",
    "**bold** _slanted_ ~~gone~~ $x$",
    "\\*not slanted\\*",
    "&lt;b&gt;",
    "---\nlicense: mit\n---",
    'a"; import os; "',
    "{{ 7 * 7 }}: - yaml",
    "```\n</code></pre><b>out</b>",
)


def tokens(text: str) -> list[tuple[str, str]]:
    """What a renderer makes of Markdown: kinds and contents of its parts."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parts = [part for block in parser.parse(text) for part in (block, *(block.children or []))]
    return [(part.type, part.content) for part in parts if part.type != "text_special"]


def kinds(text: str) -> list[str]:
    return [kind for kind, _ in tokens(text)]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_is_shown_as_it_is(hostile: str) -> None:
    line = " ".join(hostile.split())
    for before, after in (("", ""), ("- ", ""), ("# ", ""), ("before ", " after")):
        found = tokens(f"{before}{card.escaped(hostile)}{after}\n")
        assert [kind for kind, _ in found] == kinds(f"{before}x{after}\n")
        shown = "".join(content for kind, content in found if kind == "text")
        assert shown == f"{before.strip('-# ')}{' ' if before == 'before ' else ''}{line}{after}"
    assert ("code_inline", line) in tokens(card.code(hostile))
    assert tokens(card.fenced("yaml", f"{hostile}\n")) == [("fence", f"{hostile}\n")]


def test_intervals_are_left_as_they_are() -> None:
    text = "The student is 0.007 better [\u22120.012, +0.002], 1,234 [1,000, 2,000]."
    assert card.escaped(text) == text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_that_a_card_quotes_is_read_as_markup(hostile: str, tmp_path: Path) -> None:
    """A card that quotes it wherever it quotes anything has the parts of a card of plain names."""

    def card(name: str) -> str:
        found = sample.evaluation()
        found["measured"][4]["note"] = name
        found["tasks"]["results"] = [result | {"task": name} for result in found["tasks"]["results"][:2]]
        found |= {"missing": [name], "agreement": None, "not_measured": {"agreement": name}}
        head = {"auto_class": name, "pipeline_tag": name, "type": name}
        found["task"] = task_sample.evaluation(("accuracy", name), **head)["task"]
        recipe = Recipe.load("lolcats", {"name": name, "description": name, "data.dataset": name})
        text = yaml.safe_dump({"name": name})
        record = RunRecord(**sample.run_record(name))
        return model_card(
            RunFiles(tmp_path, name, Results.model_validate_json(json.dumps(found)), recipe, text, None, record, {})
        )

    cards = [card(name).removeprefix("---\n").partition("\n---\n") for name in (hostile, "plain")]
    (front, _, body), (_, _, plain) = cards
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": hostile,
        "tags": ["linearize", "linear-attention"],
    }
    assert kinds(body) == kinds(plain)
    example, recipe = (content for kind, content in tokens(body) if kind == "fence")
    assert [type(line).__name__ for line in ast.parse(example).body] == ["Import", "ImportFrom", "Assign"]
    assert yaml.safe_load(recipe) == {"name": hostile}
