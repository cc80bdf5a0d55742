"""Pages and cards about tasks that are not language modelling, alone and beside language models."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import linearize
from linearize.configs.evaluation import EvaluationConfig
from linearize.configs.tasks import TextClassification
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.measure import measure_task
from linearize.evaluation.metrics import Predictions
from linearize.recipe import Recipe
from linearize.report.card import model_card
from linearize.report.findings import findings, verdict
from linearize.report.html import Figure, Table
from linearize.report.load import RunFiles, load_run
from linearize.report.numbers import DASH, MINUS, THIN
from linearize.report.overview import cautions, key_numbers, overview
from linearize.report.page import render, write_report
from linearize.report.sections import recipe, scores, sections
from tests import tiny
from tests.report import sample, task_sample
from tests.report.test_page import TITLES, Document, check_document, visible

Read = Callable[..., RunFiles]
OF_TEXT = {
    "Quality",
    "Loss by position",
    "Agreement with the teacher",
    "Recall",
    "Tasks",
    "Speed and memory",
    "Generations",
}


@pytest.fixture
def read_task(tmp_path: Path) -> Read:
    """A task's run with these fields of its task section, and `sections` of its evaluation."""

    def make(metrics: tuple[str, ...] = task_sample.METRICS, sections: Any = None, **task: Any) -> RunFiles:
        found = task_sample.evaluation(metrics, **task) | (sections or {})
        return load_run(task_sample.write_run(tmp_path / f"task{len(list(tmp_path.iterdir()))}", found))

    return make


@pytest.fixture(scope="module")
def task_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("task")
    return write_report([task_sample.write_run(folder / "sst2")], folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_of_both(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model, and a classifier of which no head was looked at."""
    folder = tmp_path_factory.mktemp("both")
    few = {name: found for name, found in sample.evaluation().items() if name != "retrieval"}
    runs = [
        sample.write_run(folder / "alpha", few | {"fidelity": None}),
        task_sample.write_run(folder / "sst2", task_sample.evaluation() | {"fidelity": None}),
    ]
    return write_report(runs, folder / "report.html").read_text(encoding="utf-8")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_page_of_a_task_has_what_applies_and_nothing_else(task_page: str) -> None:
    titles = re.findall(r"<h2 [^>]*>([^<]*)</h2>", task_page)
    assert titles == [
        "Key numbers",
        "Recipe and plan",
        "Training",
        "Task",
        *[t for t in TITLES[6:] if t not in OF_TEXT],
    ]
    text = visible(task_page)
    assert re.findall(r'<p class="missing">(.*?)</p>', task_page) == ["Not measured: teacher, fine-tuned."]
    for words in (
        "The student is 0.016 worse than its teacher in accuracy [0.007, 0.025].",
        "task: text classification",
        "Text classification, 872 held-out examples.",
        "layer 5 head 1 (112.3 %)",
        "linearize run lolcats",
        "time and memory linear in length, no cache",
        "What attention transfer did for each layer",
        "The student&#39;s answer is the teacher&#39;s in 96 % [95, 97] of all cases.",
    ):
        assert words in text, words
    assert "nats per token better" not in text and "window of" not in text and "beyond the window" not in text
    assert len(Document(task_page).all("tr")) == 93, "all tables are whole"


def test_pages_of_tasks_are_valid_documents(task_page: str, page_of_both: str) -> None:
    check_document(task_page)
    check_document(page_of_both)


def test_runs_of_both_kinds_stand_on_one_page(page_of_both: str) -> None:
    text = visible(page_of_both)
    titles = re.findall(r"<h2 [^>]*>([^<]*)</h2>", page_of_both)
    assert titles == ["Key numbers", *TITLES[:2], "Task", *TITLES[2:]]
    assert "different tasks (alpha: language modelling; sst2: text classification): their numbers" in text
    assert "different teachers (alpha: made-up-teacher, llama, 5.48" in text
    assert text.count("Of alpha only.") == 8 and text.count("Of sst2 only.") == 1
    assert "Fidelity of the heads is not measured: linearize eval" in text
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', page_of_both))
    assert rows["Loss of the student, nats per token"].count(DASH) == 1
    cells = rows["Student&#39;s accuracy"]
    assert cells == f'<td class="n">{DASH}</td><td class="n">0.905 [0.885, 0.925]</td>'


def test_heads_that_were_refused_are_said_so(read_task: Read) -> None:
    reason = {"fidelity": None, "not_measured": {"fidelity": "the heads of this model are shared"}}
    made = sections([read_task(sections=reason)])
    assert [section.key for section in made] == ["recipe", "training", "task", "fidelity", "provenance"]
    page = render([read_task(sections=reason)])
    assert "Fidelity of the heads is not measured: the heads of this model are shared.</p>" in page
    silent = sections([read_task(sections={"fidelity": None})])
    assert [section.key for section in silent] == ["recipe", "training", "task", "provenance"]


def test_summaries_stand_before_the_losses(read: Read) -> None:
    task = task_sample.evaluation(("rouge1", "rouge2", "rougeL"), type="summarization")["task"]
    run = read(task=task | {"auto_class": "AutoModelForCausalLM", "pipeline_tag": "text-generation"})
    assert [section.key for section in sections([run])][2:4] == ["task", "quality"]
    found = verdict(run)
    assert "ROUGE-1" in found[0].words and "nats per token" in found[1].words
    card = model_card(run)
    assert "| candidate | ROUGE-1 | ROUGE-2 | ROUGE-L | teacher's answers | what it is |" in card
    assert card.index("ROUGE-1") < card.index("Held-out loss, nats per token")
    assert "AutoModelForCausalLM" in card


def test_what_is_measured_is_what_is_shown(tmp_path: Path) -> None:
    """The fields of a measured task, not made up ones."""
    student = linearize.convert(tiny.llama(), tiny.recipe())

    def answer(model: Any, title: str) -> Predictions:
        wrong = 7 if model is student else 11
        named = (torch.arange(60) % wrong != 0).long()
        return Predictions(torch.eye(2)[named], torch.ones_like(named), torch.arange(60), ("accuracy",))

    models = {"teacher": tiny.llama(), "student": student}
    found = measure_task(
        [Candidate(name, partial(nullcontext, model), f"note on {name}") for name, model in models.items()],
        answer,
        TextClassification(),
        tiny.packed([[64]] * 4),
        config=EvaluationConfig(bootstrap_samples=50, fidelity_tokens=128),
        seed=0,
        missing=["teacher_finetuned"],
    ).to_json()
    made_up = task_sample.evaluation(("accuracy",))
    assert {name for name, section in found.items() if section} == set(made_up) - {"not_measured", "provenance"}
    assert set(found["task"]) == set(made_up["task"])
    for part in ("scored", "differences"):
        assert set(found["task"][part][0]) == set(made_up["task"][part][0])
    run = load_run(task_sample.write_run(tmp_path / "run", found))
    page, card = visible(render([run])), model_card(run)
    score = next(line for line in found["task"]["scored"] if line["name"] == "student")["scores"]["accuracy"]
    shown = f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
    assert shown in page and f"| student | {shown} | " in card and "| note on student |" in card
    assert f"{found['fidelity']['layers'][1]['output_relative'][2]:.4f}" in page


# --- sections and sentences -------------------------------------------------------------------------------------------


def test_scores_and_differences_are_in_tables(read_task: Read) -> None:
    blocks = scores.scores([read_task()]).blocks
    first, second = (block for block in blocks if isinstance(block, Figure))
    cells = [list(row) for group in first.numbers.groups for row in group.rows]
    assert cells[0] == ["teacher", *["0.921 [0.901, 0.941]"] * 2, DASH, "made up: teacher"]
    assert [row[0] for row in cells] == ["teacher", "student, untrained", "student after transfer", "student"]
    assert list(first.numbers.columns) == ["candidate", "accuracy", "F1", "teacher's answers", "what it is"]
    pairs = [list(row) for group in second.numbers.groups for row in group.rows]
    assert pairs == [["against teacher", *[f"{MINUS}0.016 [{MINUS}0.025, {MINUS}0.007]"] * 2]]


def test_four_metrics_are_drawn_three_abreast(read_task: Read) -> None:
    run = read_task(("accuracy", "f1", "matthews", "exact_match"))
    titles = [block.title for block in scores.scores([run]).blocks if isinstance(block, Figure)]
    assert [title.split(": ")[1] for title in titles] == ["accuracy, F1, Matthews correlation", "exact match"] * 2


def test_runs_with_other_metrics_have_blanks(read_task: Read) -> None:
    runs = [read_task(("accuracy",)), read_task(("matthews",))]
    first = next(block for block in scores.scores(runs).blocks if isinstance(block, Figure))
    assert all(f">{run.name}</text>" in first.svg for run in runs)  # the legend
    student = [list(group.rows[-1])[1:3] for group in first.numbers.groups]
    assert student == [["0.905 [0.885, 0.925]", DASH], [DASH, "0.905 [0.885, 0.925]"]]
    lines = {row[0]: list(row[1:]) for row in key_numbers(runs).groups[0].rows}
    assert lines["Teacher's accuracy"] == ["0.921 [0.901, 0.941]", DASH]
    assert lines["Share of the teacher's Matthews correlation"] == [DASH, f"98{THIN}% [97, 99]"]
    assert lines["Held-out examples of the task"] == ["872", "872"]


@pytest.mark.parametrize(
    "student, kind, lead",
    [
        (0.905, "loss", "It is 0.016 worse than its teacher in accuracy [0.007, 0.025]."),
        (0.941, "win", "It is 0.020 better than its teacher in accuracy [0.011, 0.029]."),
        (
            0.915,
            "open",
            "On these 872 examples the student cannot be told apart from its teacher in accuracy "
            f"({MINUS}0.006 [{MINUS}0.015, +0.003]).",
        ),
    ],
)
def test_the_verdict_goes_by_the_interval(read_task: Read, student: float, kind: str, lead: str) -> None:
    run = read_task(("accuracy",), scores=task_sample.SCORES | {"student": student})
    (found,) = verdict(run)
    assert found.kind == kind and "".join(found.lead) == lead
    assert "of the teacher's score" in found.words and "against 0.921 [0.901, 0.941]" in found.words
    assert [finding.kind for finding in findings(run)] == [kind, "fact", "fact"]
    assert [kind for kind, _, _ in overview(run).sides] == [kind, "fact"]


def test_a_model_without_a_teacher_has_scores_and_nothing_else(read_task: Read) -> None:
    lonely = task_sample.evaluation(("accuracy",), {"student": 0.981}, type="associative_recall")["task"]
    lonely["scored"][0]["agreement"] = None
    run = read_task(sections={"task": lonely, "fidelity": None, "missing": []})
    (found,) = findings(run)
    assert found.kind == "fact"
    assert found.words.startswith("The student reaches 0.981 [0.961, 1.001] in accuracy on 872 held-out examples")
    page = render([run])
    assert '<strong class="fact">0.981 [0.961, 1.001]</strong>' in page
    assert "Nothing was measured" not in page and 'class="missing"' not in page
    assert len([b for b in scores.scores([run]).blocks if isinstance(b, Figure)]) == 1


def test_cautions_of_tasks(read_task: Read) -> None:
    pair = [read_task(), read_task()]
    assert cautions(pair) == []
    (fewer,) = cautions([pair[0], read_task(examples=80)])
    assert fewer.startswith("These runs were not all measured on the same examples, so their scores")
    (other,) = cautions([pair[0], read_task(type="token_classification", examples=80)])
    assert "token classification)" in other


def test_a_plan_of_a_decoder_still_tells_its_memory(read: Read, read_task: Read) -> None:
    def named(run: RunFiles) -> set[str]:
        (table,) = (block for block in recipe.recipe([run]).blocks if isinstance(block, Table))
        return {row[0] for row in table.groups[0].rows}

    assert {"student's state", "memory is saved", "at 8k tokens"} <= named(read())
    assert "attention" in named(read_task()) and "student's state" not in named(read_task())


# --- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_names_the_class_and_the_scores(read_task: Read) -> None:
    card = model_card(read_task())
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "text-classification"
    assert "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n" in body
    assert "model = AutoModelForSequenceClassification.from_pretrained(" in body
    results = body.split("## Results\n\n")[1]
    assert results.startswith("Text classification, 872 examples, with 95 % intervals (higher is better):\n\n|")
    assert (
        f"| student | 0.905 [0.885, 0.925] | 0.905 [0.885, 0.925] | 96{THIN}% [95, 97] | made up: student |\n"
        in results
    )
    assert "nats per token" not in body and "Held-out loss" not in body
    for heading in ("### Lost or worse", "### Also measured", "## Limits", "## Recipe"):
        assert heading in body
    limits = body.split("## Limits")[1].split("##")[0]
    assert "held-out examples of one data set" in limits and "Not measured: teacher, fine-tuned." in limits
    assert "The student has the teacher's errors" in limits


def test_the_card_of_images_and_of_a_model_from_scratch(tmp_path: Path) -> None:
    images = {"auto_class": "AutoModelForImageClassification", "pipeline_tag": "image-classification"}
    folder = task_sample.write_run(tmp_path / "vit", task_sample.evaluation(**images))
    card = model_card(load_run(folder))
    assert "import AutoModelForImageClassification, AutoImageProcessor" in card
    assert "`made-up-teacher`, linearized with the recipe `lolcats`" in card
    changes = {"weights": "random", "transfer": None}
    (folder / "recipe.yaml").write_text(Recipe.load(str(folder / "recipe.yaml"), changes).to_yaml())
    scratch = model_card(load_run(folder))
    assert "of the shape of `made-up-teacher`, trained from scratch with the recipe `lolcats`" in scratch
    assert "The student has the teacher's errors" not in scratch
