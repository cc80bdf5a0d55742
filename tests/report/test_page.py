"""The page as a document: complete, escaped, self-contained, the same every time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from linearize.base import UserError, without_controls
from linearize.report import tables, terminal
from linearize.report.card import evaluation_page, model_card
from linearize.report.load import RunFiles, load_run
from linearize.report.page import numeric, render, rich, write_report
from tests.report import sample

COPIES = Path(__file__).parent / "measured" / "pycode-5m"
FEW = dict.fromkeys(["agreement", "fidelity", "generations", "positions", "retrieval", "speed", "tasks"])
TITLES = (
    "Recipe and plan",
    "Training",
    "Quality",
    "Loss by position",
    "Agreement with the teacher",
    "Recall",
    "Fidelity of each head",
    "Tasks",
    "Speed and memory",
    "Generations",
    "Provenance",
)


class Document(HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def visible(page: str) -> str:
    """The text without tags, on one line."""
    body = re.sub(r"(?s)<(style|script)\b.*?</\1>", "", page)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_everything_is_there(whole_page: str) -> None:
    for title in TITLES:
        assert f">{title}</h2>" in whole_page
    text = visible(whole_page)
    assert 'class="missing"' not in whole_page
    for words in (
        "The student is 0.006 nats per token better than the window-only control [0.001, 0.011].",
        "1,838",  # samples of a task
        "layer 5 head 1 (112.3 %)",
        "linearize run lolcats --model made-up-teacher",
        "better than itself with the linear part switched off",
        "window_size: 64",
    ):
        assert words in text, words
    assert len(Document(whole_page).all("figure")) == 12


def check_document(page: str) -> None:
    """Nothing from outside; unique ids; headings that skip no level; drawings and tables that say what they show."""
    document = Document(page)
    assert not document.all("link") and not document.all("img") and not document.all("iframe")
    assert all("src" not in script for script in document.all("script"))
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [tag["href"] for tag in document.all("a")]
    assert all(link and link[0] == "#" and link[1:] in ids for link in links)
    levels = [int(tag[1]) for tag, _ in document.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(svg["role"] == "img" and len(svg["aria-label"] or "") > 20 for svg in document.all("svg"))
    assert len(document.all("caption")) == len(document.all("table"))
    assert all(heading.get("scope") in ("row", "col", "rowgroup") for heading in document.all("th"))
    figures = re.findall(r"(?s)<figure>.*?</figure>", page)
    assert all(figure.count("<svg ") == 1 and figure.count("<table>") == 1 for figure in figures)


def test_pages_are_valid_documents(whole_page: str, page_of_two: str) -> None:
    check_document(whole_page)
    check_document(page_of_two)


def test_texts_of_models_cannot_become_markup(whole_page: str) -> None:
    document = Document(whole_page)
    assert len(document.all("script")) == 1
    assert not document.all("b") and not document.all("i")
    assert "&lt;script&gt;alert(&#39;prompt&#39;)&lt;/script&gt;" in whole_page
    assert "alert('prompt')" not in whole_page and "\x07" not in whole_page
    assert rich("`<b> --x` & x") == "<code><span>&lt;b&gt;</span> <span>--x</span></code> &amp; x"
    assert without_controls("a\x00b\tc\n\x1b\u202e") == "a\\x00b\tc\n\\x1b\\u202e"


def test_control_characters_of_a_run_are_not_shown(tmp_path: Path) -> None:
    """They can command a terminal that shows the page's source, and turn a line around."""

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {spoiled(name): spoiled(each) for name, each in value.items()}
        return f"{value}\x1b]0;title\x07\u202e\x0b" if isinstance(value, str) else value

    found = sample.evaluation()
    provenance = found["provenance"]
    provenance |= {name: spoiled(provenance[name]) for name in ("command", "device", "data")}
    provenance["versions"] = spoiled(provenance["versions"])
    found["measured"] = [line | {"note": spoiled(line["note"])} for line in found["measured"]]
    found["tasks"]["results"] = [line | {"task": spoiled(line["task"])} for line in found["tasks"]["results"]]
    found["tasks"]["shots"] = spoiled(found["tasks"]["shots"])
    folder = sample.write_run(tmp_path / "run", found, model_type="llama\x1b[2J")
    about = {"model": "a/b", "dtype": "float32", "device": "cpu", "data": "0" * 64, "versions": {"torch": "2.0"}}
    about |= {name: spoiled(about[name]) for name in ("model", "device", "versions")}
    sample.write_json(folder / "run.json", about)
    run = load_run(folder)
    console = Console(file=StringIO(), force_terminal=False, width=500)
    console.print(terminal.measured(run))
    page = render([run])
    assert "]0;title" in page
    for text in (page, evaluation_page(run), model_card(run), cast(Any, console.file).getvalue()):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_tables_in_the_terminal_fit_80_columns(tmp_path: Path) -> None:
    """No line is longer, and words of headings are neither cut nor divided."""
    found = sample.evaluation()
    found["speed"] = [entry | {"prefill_bytes": 33_030_144, "compiling": 54.6} for entry in found["speed"]]
    run = load_run(sample.write_run(tmp_path / "run", found))
    console = Console(file=StringIO(), force_terminal=False, width=80)
    console.print(terminal.measured(run))
    lines = cast(Any, console.file).getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    words = {word for line in lines for word in line.split()}
    headings = {word for table in tables.of_run(run) for name in table.columns for word in name.split()}
    assert {"prefill", "compile"} <= headings - {tables.NOTE} <= words


@pytest.mark.parametrize(
    "text, found",
    [
        ("2.531 [2.3, 2.7]", True),
        ("\u22120.006", True),
        ("\u2013", True),
        ("+5", True),
        ("lolcats", False),
        ("98.3 k trained parameters, 2.4 M tokens, and more", False),
        ("\u2013 none", False),
    ],
)
def test_what_stays_on_one_line(text: str, found: bool) -> None:
    assert numeric(text) is found


def test_the_same_folders_give_the_same_page(tmp_path: Path) -> None:
    pages = [write_report([COPIES], tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html"]


def test_what_was_not_measured_is_said_in_a_line_with_the_way_to_it(tmp_path: Path) -> None:
    page = write_report([COPIES], tmp_path / "report.html").read_text(encoding="utf-8")
    lines = re.findall(r'<p class="missing">(.*?)</p>', page)
    assert len(lines) == 9
    assert all(": " in line and line.endswith(".") for line in lines)
    text = visible(page)
    assert "Loss by position is not measured: linearize eval DIR/model --set evaluation.long=true --output" in text
    assert "The recipe is not in the files: recipe.yaml in the run" in text
    assert "What attention transfer did for each layer" in text
    for title in TITLES:
        assert f">{title}</h2>" in page


def test_null_sections_are_as_good_as_none(tmp_path: Path) -> None:
    found = json.loads((COPIES / "evaluation.json").read_text(encoding="utf-8"))
    (tmp_path / "run").mkdir()
    nulls = dict.fromkeys(["agreement", "positions", "generations", "fidelity", "tasks"])
    sample.write_json(tmp_path / "run" / "evaluation.json", found | nulls | {"speed": [], "comparisons": []})
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('<p class="missing">') == 12


def test_a_reason_that_the_evaluation_gives_is_passed_on(read: Callable[..., RunFiles]) -> None:
    page = render([read(**FEW, not_measured={"tasks": "none asked for; name some", "generations": "too short."})])
    assert "Downstream tasks are not measured: none asked for; name some.</p>" in page
    assert "with the teacher&#39;s: too short.</p>" in page


def test_a_run_without_any_verdict_says_so(tmp_path: Path) -> None:
    found = sample.evaluation()
    lonely = {"window_size": 64, "measured": [line for line in found["measured"] if line["name"] == "student"]}
    (tmp_path / "run").mkdir()
    sample.write_json(tmp_path / "run" / "evaluation.json", lonely)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Nothing was measured that allows a verdict" in page


def test_runs_stand_side_by_side_and_different_teachers_are_said(page_of_two: str) -> None:
    text = visible(page_of_two)
    assert "These runs have different teachers (alpha: made-up-teacher, llama, 5.48" in text
    assert "beta: made-up-teacher, llama, 7" in text
    assert "not all measured on the same text" not in text
    assert "Fidelity of the heads is not measured for beta" in text
    key_numbers = re.search(r"(?s)<span>Key numbers, with.*?</table>", page_of_two)
    assert key_numbers is not None
    assert '<th scope="col">alpha</th><th scope="col">beta</th>' in key_numbers[0]
    assert '2.531 [2.331, 2.731]</td><td class="n">2.561 [2.361, 2.761]' in key_numbers[0]


def test_one_teacher_and_one_text_need_no_caution(tmp_path: Path, read: Callable[..., RunFiles]) -> None:
    pair = [read(**FEW), read(**FEW)]
    assert 'class="caution"' not in render(pair)
    fewer = sample.evaluation()["measured"]
    fewer[4]["quality"]["tokens"] = 7
    assert "not all measured on the same text" in render([pair[0], read(**FEW, measured=fewer)])


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.report.page.render", lambda runs: f"a page about {len(runs)}")
    output = tmp_path / "there" / "report.html"
    write_report([COPIES], output)
    assert output.read_text(encoding="utf-8") == "a page about 1"
    with pytest.raises(UserError, match="evaluation"):
        write_report([COPIES, tmp_path], output)
    assert output.read_text(encoding="utf-8") == "a page about 1"

    def only_aside(path: Path, text: str, **options: str) -> int:
        assert path != output, "a reader may see half of it"
        return write(path, text, **options)

    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", only_aside)
    write_report([COPIES], output)
    for wrong in (tmp_path / "there", output / "below.html"):
        with pytest.raises(
            UserError, match=r": expected to write 14 bytes, found: .*; mend that and make the report again"
        ):
            write_report([COPIES], wrong)
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]
