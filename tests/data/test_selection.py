"""Effective sequence lengths against whole attention matrices, and the rows that a run chooses by them."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from linearize.base import UserError
from linearize.data.rows import PackedRows
from linearize.data.selection import effective_sequence_lengths
from linearize.run import evaluate as measuring
from linearize.run import pipeline
from linearize.run.folder import Run
from tests import tiny
from tests.probes import LargestTensor

LENGTHS = [[7, 1, 40], [48], [20, 1, 27], [33, 15]]  # of the documents of each row
TOLERANCE = 1e-10


def explicit(teacher: PreTrainedModel, rows: PackedRows, row: int) -> float:
    """Equation 9 word by word, on the matrices that the model itself gives for each document alone."""
    documents, total, heads = rows.documents[row], 0.0, 0
    for number in documents.unique():
        tokens = rows.input_ids[row, documents == number][None]
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            # Transformers asks for fp32 here, whatever the model is in.
            patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))
            attentions: list[Tensor] = list(
                teacher(input_ids=tokens, output_attentions=True, use_cache=False).attentions
            )
        heads = sum(weights.shape[1] for weights in attentions)
        for matrix in (matrix.tolist() for weights in attentions for matrix in weights[0]):
            total += sum((i - j) * matrix[i][j] for i in range(len(matrix)) for j in range(i + 1))
    return total / heads


def eager(teacher: PreTrainedModel) -> PreTrainedModel:
    """The same weights where transformers computes, and gives, whole matrices."""
    config = copy.deepcopy(teacher.config)
    model: Any = type(teacher)._from_config(config, attn_implementation="eager").to(teacher.dtype).eval()
    model.load_state_dict(teacher.state_dict())
    return model


def mistral() -> PreTrainedModel:
    """Layers that look back 7 tokens at most."""
    sizes = tiny.llama().config.to_dict() | {"model_type": "mistral", "sliding_window": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**sizes)).eval()


TEACHERS: dict[str, Any] = {"llama": lambda: tiny.llama(layers=3), "gpt2": tiny.gpt2, "mistral": mistral}


@pytest.mark.parametrize("name", TEACHERS)
def test_equals_the_definition(name: str) -> None:
    teacher, rows = TEACHERS[name]().double(), tiny.packed(LENGTHS)
    expected = [explicit(eager(teacher), rows, row) for row in range(len(rows))]
    found = effective_sequence_lengths(teacher, rows)
    assert found.dtype == torch.float64 and found.shape == (len(LENGTHS),) and found.max() > 50
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=TOLERANCE)
    assert effective_sequence_lengths(teacher, rows.rows([])).shape == (0,)


def test_known_answer() -> None:
    teacher = tiny.llama().double()
    for layer in teacher.model.layers:  # scores of 0: every query attends evenly, and looks back i / 2 tokens
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    lengths = [[12], [1, 11], [2, 9, 1]]
    expected = torch.tensor([sum(n * (n - 1) / 4 for n in row) for row in lengths], dtype=torch.float64)
    found = effective_sequence_lengths(teacher, tiny.packed(lengths))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_positions_are_not_rounded_to_bf16() -> None:
    teacher = tiny.llama(max_position_embeddings=1024)
    for layer in teacher.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    (found,) = effective_sequence_lengths(teacher.bfloat16(), tiny.packed([[1001]]))
    assert float(found) == pytest.approx(1001 * 1000 / 4, rel=1e-6)


def test_no_matrix_exists_and_the_teacher_is_left_alone() -> None:
    teacher, length = tiny.llama(max_position_embeddings=1024).train(), 1024
    before = tiny.snapshot(teacher)
    with LargestTensor() as largest:
        effective_sequence_lengths(teacher, tiny.packed([[length]]))
    assert largest.elements < length * length / 4
    assert teacher.training and all(torch.equal(before[name], x) for name, x in tiny.snapshot(teacher).items())
    assert all(p.requires_grad for p in teacher.parameters())


def test_dropout_does_not_count() -> None:
    teacher, rows = tiny.gpt2(resid_pdrop=0.5, embd_pdrop=0.5), tiny.packed([[30]])
    expected = effective_sequence_lengths(teacher.eval(), rows)
    assert torch.equal(effective_sequence_lengths(teacher.train(), rows), expected)


def test_the_teacher_can_be_freed_at_once() -> None:
    teacher = tiny.llama()
    gone = weakref.ref(teacher.model.layers[0].mlp.up_proj)
    effective_sequence_lengths(teacher, tiny.packed([[30]]))
    gc.disable()  # two copies of a large teacher, one of them garbage, would not fit
    try:
        del teacher
        assert gone() is None
    finally:
        gc.enable()


def test_progress_shows_on_stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    effective_sequence_lengths(tiny.llama(), tiny.packed([[30]] * 4))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    effective_sequence_lengths(tiny.llama(), tiny.packed([[30]] * 4))
    out, err = capfd.readouterr()
    assert out == "" and "effective sequence lengths" in err


def test_progress_is_told_in_a_log(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.base.QUIET_SECONDS", 0.0)
    effective_sequence_lengths(tiny.llama(), tiny.packed([[30]] * 4))
    assert capfd.readouterr() == ("", "effective sequence lengths: 1 of 4\n")
    monkeypatch.setattr("linearize.base.LOG_SECONDS", 0.0)
    effective_sequence_lengths(tiny.llama(), tiny.packed([[30]] * 4))
    lines = [f"effective sequence lengths: {number} of 4\n" for number in range(1, 5)]
    assert capfd.readouterr() == ("", "".join(lines))


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return tiny.write_text(tmp_path / "text.jsonl", documents=100)


def run_of(texts: Path, folder: Path, **overrides: Any) -> Run:
    chosen = tiny.recipe(data__dataset=str(texts), evaluation__trained_controls=False, **overrides)
    return Run(chosen, tiny.teacher_folder(), folder, torch.float32, torch.device("cpu"))


def test_as_many_rows_are_trained_on_those_with_the_longest(texts: Path, tmp_path: Path) -> None:
    """Rows are of one length: sums over documents of any length would rank these by how long they are."""
    run = run_of(texts, tmp_path / "run", data__sequence_length=32)
    everything = tiny.load_data(run, lambda: pytest.fail("loaded a teacher for nothing")).train
    assert isinstance(everything, PackedRows)
    teacher = eager(tiny.llama())
    lengths = [explicit(teacher, everything, row) for row in range(len(everything))]
    best = sorted(sorted(range(len(everything)), key=lambda row: -lengths[row])[:20])
    run = run_of(texts, tmp_path / "run", data__sequence_length=32, data__select_rows_by_esl=20)
    chosen = tiny.load_data(run, run.load_teacher)
    assert torch.equal(chosen.train.rows(slice(None)).input_ids, everything.input_ids[best])
    with pytest.raises(UserError, match=r"data\.select_rows_by_esl: expected a teacher"):
        tiny.load_data(run)


def test_a_run_resumes_and_is_evaluated_on_the_same_data(texts: Path, tmp_path: Path) -> None:
    run = run_of(
        texts, tmp_path / "run", data__select_rows_by_esl=20, transfer__max_tokens=256, finetune__max_tokens=256
    )
    options: dict[str, Any] = dict(dtype=run.dtype, device=run.device)
    model = str(run.folder / "model")
    with tiny.quick_measures():
        first = pipeline.run(run)
        pipeline.run(run, until="transfer")  # refuses other data
        # The teacher of the run chooses, whichever the student is compared with.
        other_teacher = tmp_path / "teacher"
        shutil.copytree(tiny.teacher_folder(), other_teacher)
        tiny.llama(initializer_range=0.3).save_pretrained(other_teacher)
        evaluated = measuring.evaluate(model, teacher=str(other_teacher), dataset=None, overrides={}, **options)
        # Another dataset has fewer rows than the run chose, and nothing is chosen from it.
        other_text = tiny.write_text(tmp_path / "other.jsonl", documents=26, seed=1)
        overrides = {"data.validation_fraction": 0.9}
        elsewhere = measuring.evaluate(model, teacher=None, dataset=str(other_text), overrides=overrides, **options)
    assert first is not None
    fingerprint = json.loads((run.folder / "run.json").read_text())["data"]
    assert first.provenance.data == evaluated.provenance.data == fingerprint != elsewhere.provenance.data
