"""All measurements together: of models whose losses are known by construction, and of a student that is its teacher."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.evaluation import EvaluationConfig
from linearize.configs.tasks import AssociativeRecall
from linearize.data.rows import PackedRows
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.controls import window_only_plan
from linearize.evaluation.measure import measure, measure_task
from linearize.evaluation.results import Results
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.evaluation.fakes import Fake, candidate
from tests.evaluation.test_scores import every, right

pytestmark = pytest.mark.usefixtures("few")

WINDOW, PERIOD, LENGTH = 8, 16, 48
VOCABULARY = tiny.VOCABULARY
UNIFORM = math.log(VOCABULARY)
POSITIONS, NEW_TOKENS = 64, 4
QUICK = EvaluationConfig(bootstrap_samples=50, copy_rows=4, examine=False)


def periodic_rows(num_rows: int = 4) -> PackedRows:
    """Every token comes again after `PERIOD` tokens, which is beyond the window."""
    start = torch.randint(VOCABULARY, (num_rows, PERIOD), generator=torch.Generator().manual_seed(0))
    input_ids, positions = start.repeat(1, LENGTH // PERIOD), torch.arange(LENGTH).expand(num_rows, -1)
    return PackedRows(input_ids, positions, input_ids.masked_fill(positions == 0, -100))


def measured(
    models: dict[str, nn.Module], rows: Any = None, opened: list[str] | None = None, **options: Any
) -> Results:
    candidates = [candidate(name, model, opened) for name, model in models.items()]
    chosen = dict(window_size=WINDOW, max_positions=POSITIONS, config=QUICK, seed=0) | options
    return measure(candidates, periodic_rows() if rows is None else rows, byte_tokenizer(), **chosen)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures(NEW_TOKENS):
        yield


@pytest.fixture
def no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes do not generate."""
    monkeypatch.setattr("linearize.evaluation.measure.generation_speed", lambda *_, **__: [])


def copying(scale: float) -> Fake:
    """Loss `UNIFORM` on what comes for the first time, and `told(scale)` on what comes again."""
    return Fake(distance=PERIOD, scale=scale, vocab_size=VOCABULARY)


def told(scale: float) -> float:
    return math.log(1 + (VOCABULARY - 1) * math.exp(-scale))


def fakes(student: nn.Module, teacher: nn.Module) -> dict[str, nn.Module]:
    blind = Fake(vocab_size=VOCABULARY)
    return dict(teacher=teacher, student=student, ablated=blind, window=blind, window_finetuned=blind)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_speed")
def test_losses_and_shares_are_the_known_ones() -> None:
    found = measured(fakes(student=copying(4.0), teacher=copying(30.0)))
    by_name = {line.name: line for line in found.measured}
    assert list(by_name) == ["teacher", "student", "ablated", "window", "window_finetuned"]

    first, again = PERIOD - 1, LENGTH - PERIOD
    near = PERIOD - WINDOW - 1  # tokens beyond the window that come for the first time
    for name, loss in (("teacher", told(30.0)), ("student", told(4.0)), ("window", UNIFORM)):
        quality = by_name[name].quality
        assert quality.tokens == 4 * (LENGTH - 1)
        assert quality.loss.mean == pytest.approx((first * UNIFORM + again * loss) / (LENGTH - 1), abs=1e-5)
        assert quality.beyond.mean == pytest.approx((near * UNIFORM + again * loss) / (near + again), abs=1e-5)
        copied = by_name[name].copying
        assert copied.first.mean == pytest.approx(UNIFORM, abs=1e-5)
        assert copied.second.mean == pytest.approx(loss, abs=1e-5)

    share = (UNIFORM - told(4.0)) / (UNIFORM - told(30.0))
    for kept in (found.far_context, found.copying):
        assert kept.share.mean == pytest.approx(share, abs=1e-5)

    assert [comparison.other for comparison in found.comparisons] == ["teacher", "window_finetuned", "ablated"]
    worse, better, _ = found.comparisons
    assert worse.overall.mean == pytest.approx(again * told(4.0) / (LENGTH - 1), abs=1e-4)
    assert better.overall.mean < 0
    for comparison in (worse, better):
        ratio = comparison.beyond.mean / comparison.overall.mean
        assert ratio == pytest.approx((LENGTH - 1) / (near + again), abs=1e-3)


@pytest.mark.usefixtures("no_speed")
def test_a_student_that_is_its_teacher_is_no_different() -> None:
    teacher = tiny.llama()
    names = ("teacher", "student", "window", "ablated", "window_finetuned")
    found = measured(dict.fromkeys(names, teacher), rows=tiny.packed([[64]] * 4))
    for comparison in found.comparisons:
        for interval in (comparison.overall, comparison.beyond):
            assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)
    assert found.copying.share is None and found.far_context.share is None
    assert found.far_context.teacher_gain.mean == 0.0


def test_a_student_holds_less_than_its_teacher_and_everything_is_plain_data() -> None:
    teacher = tiny.llama()
    models: dict[str, nn.Module] = dict(teacher=teacher, student=linearize.convert(teacher, tiny.recipe()))
    found = measured(models, rows=tiny.packed([[64]] * 4), missing=["ablated"])
    short, long = POSITIONS // 4 - NEW_TOKENS, POSITIONS - 1 - NEW_TOKENS
    held = {(speed.model, speed.prompt_length): speed.cache_bytes for speed in found.speed}
    assert list(held) == [(name, length) for length in (short, long) for name in ("teacher", "student")]
    kv_bytes_per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head dimension, fp32
    assert held["teacher", short] == (short + NEW_TOKENS) * kv_bytes_per_token
    assert held["teacher", long] == (POSITIONS - 1) * kv_bytes_per_token
    assert held["student", short] == held["student", long]

    plain = found.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == list(Results.model_fields)
    assert plain["missing"] == [LABELS["ablated"]]
    assert plain["measured"][1]["label"] == "student" and plain["measured"][1]["note"] == "note on student"
    assert plain["measured"][1]["quality"]["loss"]["mean"] == found.measured[1].quality.loss.mean


@pytest.mark.parametrize(
    "border, expected",
    [
        (POSITIONS // 4, [POSITIONS // 4 - NEW_TOKENS, POSITIONS - 1 - NEW_TOKENS]),
        (POSITIONS // 4 - 1, [POSITIONS - 1 - NEW_TOKENS]),
        (POSITIONS - 2, [POSITIONS // 4 - NEW_TOKENS]),
    ],
)
def test_speed_where_rotary_angles_change(border: int, expected: list[int]) -> None:
    """A length whose answers would cross the border is left out, with a reason, and nothing else is."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": border, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    teacher = tiny.llama(rope_parameters=rope, max_position_embeddings=POSITIONS)
    models: dict[str, nn.Module] = dict(teacher=teacher, student=linearize.convert(teacher, tiny.recipe()))
    found = measured(models, rows=tiny.packed([[64]] * 4))
    assert list(dict.fromkeys(speed.prompt_length for speed in found.speed)) == expected
    assert ("speed" in found.not_measured) == (len(expected) < 2)
    if len(expected) < 2:
        assert f"config.rope_parameters: expected at most {border} tokens" in found.not_measured["speed"]


def test_the_reasons_of_all_lengths_without_speed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, lengths: list[int], **__: Any) -> list[Any]:
        raise UserError(f"no room for {lengths[0]}")

    monkeypatch.setattr("linearize.evaluation.measure.generation_speed", refuse)
    found = measured(fakes(copying(30.0), copying(30.0)))
    short, long = POSITIONS // 4 - NEW_TOKENS, POSITIONS - 1 - NEW_TOKENS
    reasons = [f"of prompts of {length} tokens: no room for {length}" for length in (short, long)]
    assert found.not_measured == {"speed": "; ".join(reasons)} and found.speed == []


def test_without_a_teacher_the_student_is_measured_alone() -> None:
    models = {"student": copying(30.0), "ablated": Fake(vocab_size=VOCABULARY)}
    found = measured(models, missing=["teacher", "window_sinks"])
    assert (found.far_context, found.copying, found.speed) == (None, None, [])
    assert [comparison.other for comparison in found.comparisons] == ["ablated"]
    assert found.missing == ["teacher", LABELS["window_sinks"]]
    assert all(line.copying is not None for line in found.measured)


@pytest.mark.usefixtures("no_speed")
@pytest.mark.parametrize("max_positions, fits", [(2 * WINDOW + 2, True), (2 * WINDOW + 1, False), (WINDOW, False)])
def test_models_that_are_too_short_for_copying(max_positions: int, fits: bool) -> None:
    found = measured(fakes(copying(30.0), copying(30.0)), max_positions=max_positions)
    assert (found.copying is not None) == fits
    assert all((line.copying is not None) == fits for line in found.measured)
    reason = f"a repeat at 16 tokens does not fit the model's {max_positions} positions"
    assert found.not_measured == ({} if fits else {"copying": reason})


@pytest.mark.usefixtures("no_speed")
def test_text_that_ends_within_the_window() -> None:
    found = measured(fakes(copying(30.0), copying(30.0)), rows=tiny.packed([[WINDOW] * 4] * 3))
    assert all(comparison.beyond is None for comparison in found.comparisons)
    assert found.far_context is None
    assert found.measured[0].quality.beyond_missing == "no token stands more than 8 tokens into its document"


@pytest.mark.usefixtures("no_speed")
def test_one_model_at_a_time() -> None:
    opened: list[str] = []
    measured({name: copying(3.0) for name in ("window", "student", "ablated")}, opened=opened)
    assert opened == ["window", "window closed", "student", "student closed", "ablated", "ablated closed"]


# --- the closer look --------------------------------------------------------------------------------------------------

ROWS = tiny.packed([[64], [30, 34], [64], [64]])
SMALL = {"bootstrap_samples": 20, "fidelity_tokens": 128, "prompts": 2, "new_tokens": 6, "recall_trials": 2}
CLOSE = EvaluationConfig(**SMALL, copy_rows=2)


def examined(models: dict[str, PreTrainedModel], window_size: int = 8, **changes: Any) -> Results:
    config = CLOSE.model_copy(update=changes)
    return measured({**models}, ROWS, window_size=window_size, max_positions=128, config=config)


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return tiny.llama().double()


@pytest.mark.usefixtures("no_speed")
def test_the_closer_look_at_a_student_that_is_its_teacher(teacher: PreTrainedModel) -> None:
    """A window that holds every key."""
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=128))
    found = examined({"teacher": teacher, "student": student})
    assert found.agreement.top1.low == 1 and found.agreement.kl.high < 1e-6
    assert found.generations.agreement.low == 1 and found.generations.common_prefix.low == CLOSE.new_tokens
    for layer in found.fidelity.layers:
        assert max(layer.output_relative) < 1e-12
    assert found.teacher_attention.heads == 8 and 0 < found.teacher_attention.first_token < 0.5
    assert [test.name for test in found.retrieval] == ["passkey", "needle", "associative_recall"]
    for test in found.retrieval:
        assert test.models["student"] == test.models["teacher"]
        assert test.recovery is None or test.recovery.mean == pytest.approx(1)
    assert found.not_measured == {"tasks": "no task was named; use --tasks or evaluation.tasks"}
    plain = found.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.usefixtures("no_speed")
def test_only_some_rows_are_read(teacher: PreTrainedModel) -> None:
    converted = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    student = convert_layers(teacher, window_only_plan(read_plan(converted.config), teacher, 64))
    found = examined({"teacher": teacher, "student": student}, examined_tokens=128)
    assert found.agreement.kl.low > 0
    assert found.agreement.tokens == int((ROWS.labels[[0, 3], 1:] != -100).sum())


@pytest.mark.usefixtures("no_speed")
def test_what_cannot_be_looked_at_is_said_not_raised(teacher: PreTrainedModel) -> None:
    """Without a teacher, and with text that is too short to go on with."""
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    found = examined({"student": student})
    assert (found.agreement, found.generations) == (None, None)
    assert found.not_measured["agreement"] == "no teacher at hand"
    short = examined({"teacher": teacher, "student": student}, window_size=32, new_tokens=64)
    assert short.generations is None and short.agreement is not None
    assert short.not_measured["generations"].startswith("generations: expected at least 2 held-out documents")


# --- another task -----------------------------------------------------------------------------------------------------


def measured_task(**options: Any) -> Results:
    student = linearize.convert(tiny.llama(), tiny.recipe())
    chosen = dict(config=EvaluationConfig(bootstrap_samples=20, fidelity_tokens=128), seed=0) | options
    answers, rows = right(every(5)), tiny.packed([[64]] * 4)
    return measure_task([candidate("student", student)], lambda *_: answers, AssociativeRecall(), rows, **chosen)


def test_the_heads_of_a_student_of_a_task_are_looked_at() -> None:
    found = measured_task(missing=["teacher"])
    assert len(found.fidelity.layers) == 2 and found.not_measured == {} and found.missing == ["teacher"]
    assert found.task.scored[0].scores["accuracy"].mean == 0.8
    plain = found.to_json()
    assert plain["fidelity"]["layers"] and not plain["measured"] and plain["window_size"] is None


def test_heads_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = {"fidelity": "not asked for, evaluation.examine is false"}
    assert measured_task(config=QUICK).not_measured == reason

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("fidelity: expected a model with heads, found none; use another")

    monkeypatch.setattr("linearize.evaluation.measure.measure_fidelity", refuse)
    refused = measured_task()
    assert refused.fidelity is None and refused.task is not None
    assert refused.not_measured == {"fidelity": "fidelity: expected a model with heads, found none; use another"}
