"""The comparison of sinks in experiments/memory/, on a tiny model, and what is committed of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan
from linearize.data.rows import PackedRows
from linearize.hf.attention import observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.training.memory import head_mixer
from tests import tiny

MEMORY = Path(__file__).parents[2] / "experiments" / "memory"


def load() -> ModuleType:
    """The script, which is no package."""
    spec = importlib.util.spec_from_file_location("memory_sinks", MEMORY / "sinks.py")
    assert spec is not None and spec.loader is not None
    sys.modules["memory_sinks"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sinks = load()


def inputs(length: int = 40, softcap: float | None = None) -> AttnInputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2))
    return AttnInputs(3 * q, k, v, 8**-0.5, softcap)


def softmax_with_logit(given: AttnInputs, span: SlidingSpan, logit: torch.Tensor | None) -> torch.Tensor:
    """Attention by its definition: one more column of logits, without a value."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (given.k, given.v))
    scores = given.scaling * given.q @ k.mT
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    query, key = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
    seen = (key <= query) & ((key > query - span.window_size) | (key < span.sinks))
    scores = scores.masked_fill(~seen, -torch.inf)
    if logit is not None:
        scores = torch.cat([scores, logit.expand(4, scores.shape[2])[None, ..., None]], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def test_four_kept_tokens_are_what_the_mixer_computes() -> None:
    given, span = inputs(), SlidingSpan(window_size=12, sinks=4)
    mixer = LinearMixer(head_mixer(1, 0, 0).model_copy(update={"span": span}), LayerShape(4, 2, 8, 32, 64))
    torch.testing.assert_close(sinks.output(given, span, None, False), mixer(given))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("size", [0, 4])
def test_a_sink_logit_is_a_column_without_a_value(size: int, softcap: float | None) -> None:
    given, span = inputs(softcap=softcap), SlidingSpan(window_size=12, sinks=size)
    logit = torch.tensor([-200.0, 0.0, 2.0, 200.0])  # 200: too large for its own exponential
    expected = softmax_with_logit(given, span, logit[:, None])
    torch.testing.assert_close(sinks.output(given, span, logit, True), expected)
    later = sinks.output(given, span, logit, False)
    whole = softmax_with_logit(given, span, None)
    torch.testing.assert_close(later[:, :, : 12 + size], whole[:, :, : 12 + size])
    torch.testing.assert_close(later[:, :, 12 + size :], expected[:, :, 12 + size :])


def test_logits_reach_what_they_are_chosen_by() -> None:
    """The first token's mean share (mass), and less error than logits on either side (error)."""
    teacher = tiny.llama()
    model = convert_layers(teacher, (head_mixer(1, 0, 0), head_mixer(1, 0, 0))).eval()
    tokens = torch.randint(200, (3, 48), generator=torch.Generator().manual_seed(0))
    rows = PackedRows(tokens, torch.arange(48).expand(3, -1), tokens)
    span = SlidingSpan(window_size=8)
    forms = [form for form in sinks.FORMS if form.logit and not form.tokens]
    found = dict(zip(forms, sinks.fitted_logits(model, rows, [span] * len(forms), forms), strict=True))
    assert len(forms) == 3
    by_mass, everywhere, later = (found[form] for form in forms)
    seen: dict[int, list[tuple[AttnInputs, torch.Tensor]]] = {}

    def watch(layer, given, layout):
        y = softmax_output(layer, given, layout)
        seen.setdefault(layer.layer_idx, []).append((given, y))
        return y

    with observed(model, watch), torch.no_grad():
        for row in tokens:
            model(row[None], use_cache=False)
    for layer, calls in seen.items():
        shares = [torch.zeros(4, 0), torch.zeros(4, 0)]
        for given, _ in calls:
            sums = sinks.kept_keys(given, span)
            log_sum = (sums.log_scale + sums.den.log())[0, :, 8:]
            first = sinks.first_logits(given)[0, :, 8:]
            for place, x in enumerate((first, by_mass[layer][:, None].expand_as(first))):
                shares[place] = torch.cat([shares[place], (x.exp() / (x.exp() + log_sum.exp()))], dim=1)
        torch.testing.assert_close(shares[0].mean(1), shares[1].mean(1), rtol=1e-4, atol=1e-4)
        for logit, all_queries in ((everywhere[layer], True), (later[layer], False)):

            def error(x: torch.Tensor, calls=calls, all_queries=all_queries) -> torch.Tensor:
                changes = [sinks.output(given, span, x, all_queries) - y for given, y in calls]
                return torch.stack([change.square().sum((0, 2, 3)) for change in changes]).sum(0)

            assert (error(logit) <= torch.minimum(error(logit - 0.3), error(logit + 0.3))).all()
            assert (error(logit) < error(torch.full_like(logit, -torch.inf))).any()


def test_the_table_and_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run measures only what is missing, and writes the same."""
    monkeypatch.setattr(sinks, "FIRST_POSITION", 24)
    monkeypatch.setattr(sinks, "SHARES", (0.5,))
    monkeypatch.setattr(sinks, "FORMS", (sinks.FORMS[0], sinks.FORMS[1], sinks.FORMS[5]))
    output = tmp_path / "a.json"
    arguments = [str(tiny.teacher_folder()), "--name", "tiny", "--text", tiny.text_file(), "--length", "32"]
    arguments += ["--fit-rows", "2", "--output", str(output)]
    sinks.main(arguments)
    page, drawn = output.with_suffix(".md").read_text(), output.with_suffix(".svg").read_text()
    assert page.count("| 50% |") == 3 and "| 50% | first token | 15 |" in page and "<svg" in drawn
    found = json.loads(output.read_text())
    del found["losses"]["50%, first token"]
    output.write_text(json.dumps(found))
    measured, once = [], sinks.token_losses

    def counted(*args, **options):
        measured.append(options["title"])
        return once(*args, **options)

    monkeypatch.setattr(sinks, "token_losses", counted)
    sinks.main(arguments)
    assert measured == ["50%, first token"]
    assert output.with_suffix(".md").read_text() == page


@pytest.mark.parametrize(
    "changed, expected",
    [
        (["--text", "nowhere.txt"], "--text: expected a file of text"),
        (["--rows", "4000"], "--text: expected at least"),
        (["--rows", "15"], "--length, --rows: expected more than"),
        (["--length", "200"], "--length, --rows: expected more than"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changed: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(tiny.teacher_folder()), "--text", tiny.text_file(), "--output", str(tmp_path / "a.json")]
    monkeypatch.setattr(sinks, "FIRST_POSITION", 250)
    with pytest.raises(SystemExit):
        sinks.main([*arguments, *changed])
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((MEMORY / "sinks").glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_pages_are_those_of_the_committed_numbers(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert sinks.page(found) == path.with_suffix(".md").read_text(encoding="utf-8")
    assert len(found["losses"]) == 1 + len(sinks.SHARES) * len(sinks.FORMS)
