"""The card of a student's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from linearize.report import RunFiles, load_run, model_card
from tests.report import sample

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
    assert "| student | 2.531 [2.331, 2.731] | 2.491 [2.291, 2.691] | 12.57 | made up: student |" in body
    kept, lost = body.index("### Kept or better"), body.index("### Lost or worse")
    assert kept < body.index("better than the window-only control") < lost < body.index("worse than its teacher")
    assert "rest on 49,048 held-out tokens" in body and "Not measured" not in body
    recipe = body.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["mixer"]["span"]["window_size"] == 64


def test_a_card_of_few_measurements_says_what_is_missing() -> None:
    card = model_card(load_run(COPIES))
    assert "Not measured: agreement with the teacher; loss by position; generations; recall over distances;" in card
    assert "### Not decided" not in card and "## Recipe" not in card


def test_a_bar_in_a_note_does_not_break_the_table(read: Callable[..., RunFiles]) -> None:
    lines = sample.evaluation()["measured"]
    lines[0]["note"] = "a | b"
    assert "| a \\| b |" in model_card(read(measured=lines))
