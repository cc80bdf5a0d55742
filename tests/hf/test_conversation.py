"""A conversation's state in files and copies: bit for bit, and into no other model."""

from __future__ import annotations

import copy
import errno
import pickle
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

import linearize
from linearize.base import UserError
from linearize.hf import conversation
from linearize.hf.cache import LinearizedCacheLayer
from tests.hf import checks
from tests.hf import generation_checks as generation
from tests.hf.checks import pairs
from tests.hf.models import (
    CASE,
    Case,
    make_student,
    make_teacher,
    random_tokens,
    student_of,
    teacher_of,
)

PLAIN, MIXED = CASE["llama-sliding"], CASE["llama-mixed"]
KINDS = ["qwen3-sliding-kept", "regla-gpt2", "performer-qwen3", "gated-delta-llama", "mix-gpt2", "fast-decay-mistral"]


@pytest.mark.parametrize(
    "case, check",
    [
        *pairs([MIXED, *(CASE[name] for name in KINDS)], [generation.saved]),
        *pairs([MIXED], [generation.forked]),
        *pairs([PLAIN, MIXED], [generation.forked_static]),
        *pairs([PLAIN, *(CASE[name] for name in ("mistral-terraced", "llama-cache"))], [generation.chosen_static]),
    ],
)
def test_states(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-sinks", "gated-delta-llama"])
def test_forked_elsewhere(name: str) -> None:
    generation.forked(CASE[name])


def test_a_file_does_not_grow(tmp_path: Path) -> None:
    model, ids = student_of(PLAIN), random_tokens(1, 60)
    for length in (20, 60):
        linearize.save_state(generation.prefilled(model, ids[:, :length]), model, tmp_path / f"{length}")
    assert (tmp_path / "20").stat().st_size == (tmp_path / "60").stat().st_size


@pytest.mark.slow
def test_a_fresh_process_goes_on(tmp_path: Path) -> None:
    """Left-padded rows of a model with a softmax layer."""
    model, ids, mask = student_of(MIXED), random_tokens(2, 24), checks.left_padding([5, 0], 24)
    state = generation.prefilled(model, ids[:, :18], mask)
    model.save_pretrained(tmp_path / "model")
    linearize.save_state(state, model, tmp_path / "state.safetensors")
    save_file({"ids": ids[:, 18:].contiguous(), "mask": mask}, tmp_path / "turn.safetensors")
    subprocess.run([sys.executable, Path(__file__).with_name("continuing.py"), tmp_path], check=True)
    with torch.no_grad():
        expected = model(ids[:, 18:], attention_mask=mask, past_key_values=state).logits
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], expected)


def test_generate_goes_on_with_new_tokens_only(tmp_path: Path) -> None:
    """The tokens seen are not needed: a mask over all of them says how many there are."""
    model, ids = student_of(MIXED), random_tokens(1, 18)
    first = generation.generate(model, ids)
    linearize.save_state(first.past_key_values, model, tmp_path / "state")
    state = linearize.load_state(tmp_path / "state", model)
    # The last token of an answer has been chosen, but not fed.
    turn = torch.cat([first.sequences[:, state.get_seq_length() :], random_tokens(1, 5, seed=1)], dim=1)
    mask = torch.ones(1, state.get_seq_length() + turn.shape[1], dtype=torch.long)
    found = generation.generate(model, turn, mask, past_key_values=state).sequences
    expected = generation.generate(
        model, torch.cat([ids, first.sequences[:, 18:], turn[:, 1:]], dim=1), use_cache=False
    )
    assert torch.equal(found[:, turn.shape[1] :], expected.sequences[:, -generation.NEW :])


# --- into no other model ----------------------------------------------------------------------------------------------


OTHERS = {
    "model_type linearized_qwen3; found model_type linearized_llama": lambda: student_of(CASE["qwen3-sinks"]),
    "dtype float32; found dtype float64": lambda: copy.deepcopy(student_of(MIXED)).float(),
    "layers 2; found layers 3": lambda: student_of(CASE["gla-llama"]),
    "layer 1 .*sliding.*; found layer 1 null": lambda: student_of(PLAIN),
    "expected a linearized model, found 'llama'": lambda: teacher_of(MIXED),
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_model(message: str, tmp_path: Path) -> None:
    model = student_of(MIXED)
    linearize.save_state(generation.prefilled(model, random_tokens(1, 9)), model, tmp_path / "state")
    with pytest.raises(UserError, match=message):
        linearize.load_state(tmp_path / "state", OTHERS[message]())


@pytest.mark.parametrize("name", ["performer-qwen3", "gpt2-mixed"])
def test_a_single_number_makes_another_model(name: str, tmp_path: Path) -> None:
    """The last one of any tensor, learned or drawn."""
    model = make_student(CASE[name], make_teacher(CASE[name].architecture, **CASE[name].teacher))
    linearize.save_state(generation.prefilled(model, random_tokens(1, 9)), model, tmp_path / "state")
    for tensor in model.state_dict().values():
        last, before = tensor.view(-1)[-1], tensor.view(-1)[-1].clone()
        last.copy_(torch.nextafter(before, before + 1))
        with pytest.raises(UserError, match="expected a state of this model, which has weights"):
            linearize.load_state(tmp_path / "state", model)
        last.copy_(before)
    linearize.load_state(tmp_path / "state", model)


def test_angles_of_its_own_make_another_model(tmp_path: Path) -> None:
    model = copy.deepcopy(student_of(PLAIN))
    linearize.save_state(generation.prefilled(model, random_tokens(1, 9)), model, tmp_path / "state")
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 5e5}
    with pytest.raises(UserError, match=r"which has rope_parameters .*500000.*; found rope_parameters .*10000"):
        linearize.load_state(tmp_path / "state", model)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time")
    save_file({"x": torch.ones(1)}, tmp_path / "weights")
    for name, message in (
        ("none", "No such file"),
        ("text", "save_state wrote"),
        ("weights", "state of version 3, found None"),
    ):
        with pytest.raises(UserError, match=message):
            linearize.load_state(tmp_path / name, student_of(PLAIN))


def test_what_cannot_be_saved_or_forked(tmp_path: Path) -> None:
    model, ids = student_of(MIXED), random_tokens(2, 9)
    state = generation.prefilled(model, ids)
    with pytest.raises(UserError, match="found an empty one"):
        linearize.save_state(DynamicCache(config=model.config), model, tmp_path / "state")
    static = generation.prefilled(model, ids, cache=StaticCache(config=model.config, max_cache_len=12))
    for call in (
        lambda: linearize.save_state(static, model, tmp_path / "state"),
        lambda: linearize.fork_state(static, [0, 0]),
    ):
        with pytest.raises(UserError, match="found one with a StaticLayer; generate without cache_implementation"):
            call()
    for rows_of in ([], [2], [-1]):
        with pytest.raises(UserError, match="rows: expected some of 0 to 1"):
            linearize.fork_state(state, rows_of)
    assert not list(tmp_path.iterdir())


def test_a_cache_can_be_pickled() -> None:
    model, ids = student_of(MIXED), random_tokens(2, 24)
    state = generation.prefilled(model, ids[:, :18])
    copied = pickle.loads(pickle.dumps(state))
    cuts = range(18, 25)
    assert torch.equal(checks.cached(model, ids, cuts, cache=copied), checks.cached(model, ids, cuts, cache=state))


def test_nothing_is_taken_back_of_what_saw_nothing() -> None:
    """As generate() asks for where an assistant is the model's own first layers."""
    state = generation.prefilled(student_of(PLAIN), random_tokens(1, 9))
    empty = LinearizedCacheLayer(None)
    empty.crop(-1)
    assert empty.get_seq_length() == 0
    with pytest.raises(RuntimeError, match="cannot take 1 tokens back"):
        state.layers[0].crop(-1)


def test_a_static_cache_that_is_too_small() -> None:
    """Heads that keep all keys have no room for one more; a state of constant size needs none."""
    case, ids = CASE["llama-heads"], random_tokens(1, 14)
    for student, stays in ((student_of(case), False), (student_of(PLAIN), True)):
        cache = StaticCache(config=student.config, max_cache_len=12)
        with nullcontext() if stays else pytest.raises(ValueError, match=r"room for 13 tokens.*found room for 12"):
            checks.cached(student, ids, (0, 11, 12, 13, 14), cache=cache)


def test_slots_that_are_still_to_come() -> None:
    """A mask may be as long as the text will be."""
    model, ids, mask = student_of(PLAIN), random_tokens(2, 14), checks.left_padding([3, 0], 14)
    at, cache = checks.positions(mask), DynamicCache(config=model.config)
    longer = torch.cat([mask, torch.zeros(2, 6, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        parts = [
            model(ids[:, a:b], attention_mask=longer, position_ids=at[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 9), (9, 14))
        ]
        whole = model(ids, attention_mask=longer, position_ids=at, use_cache=False).logits
    for found in (torch.cat(parts, dim=1), whole):
        checks.assert_rows_alone(model, ids, mask, found)


def test_queries_cut_out_of_a_fused_projection() -> None:
    """A map that leaves them as they are, several rows: their memory is strided."""
    teacher, ids = teacher_of(CASE["gpt2-heads"]), random_tokens(3, 12)
    model = linearize.convert(teacher, linearize.Recipe.load("fast-decay")).eval()
    checks.assert_close(checks.cached(model, ids, range(13)), checks.uncached(model, ids))


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = student_of(PLAIN)
    file = tmp_path / "state"
    linearize.save_state(generation.prefilled(model, random_tokens(1, 9)), model, file)
    before = file.read_bytes()

    def fails(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(conversation, "save_file", fails)
    with pytest.raises(UserError, match=r"the disk is full.*free some space and save the state again"):
        linearize.save_state(generation.prefilled(model, random_tokens(1, 12)), model, file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


# --- in what dtype ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, error", [("float32", 1e-6), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_state_dtype(kind: type, dtype: str, error: float, tmp_path: Path) -> None:
    """Of S between steps; it is an option of the config, and a file holds it so."""
    case = replace(MIXED, span="terraced")
    model, ids = copy.deepcopy(student_of(case)), random_tokens(2, 30)
    exact = checks.uncached(model, ids)
    model.config.state_dtype = dtype
    cache = DynamicCache() if kind is DynamicCache else StaticCache(config=model.config, max_cache_len=30)
    found = checks.cached(model, ids, range(31), cache=cache)
    kept = cache.layers[0].kept
    assert kept.linear.S.dtype == kept.linear.next_S.dtype == getattr(torch, dtype)
    assert kept.linear.z.dtype == cache.layers[0].state.linear.S.dtype == torch.float64
    assert 0 < (found - exact).abs().mean() / exact.abs().mean() < error
    if kind is DynamicCache:
        linearize.save_state(cache, model, tmp_path / "state")
        loaded = linearize.load_state(tmp_path / "state", model).layers[0]
        assert torch.equal(loaded.kept.linear.S, kept.linear.S)
        assert loaded.kept.linear.S.dtype == kept.linear.S.dtype
        assert loaded.nbytes == cache.layers[0].nbytes


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_state_of_another_dtype_is_converted(dtype: str | None, tmp_path: Path) -> None:
    model, ids = copy.deepcopy(student_of(MIXED)), random_tokens(2, 12)
    model.config.state_dtype = "float16"
    linearize.save_state(generation.prefilled(model, ids[:, :9]), model, tmp_path / "state")
    model.config.state_dtype = dtype
    state = linearize.load_state(tmp_path / "state", model)
    assert state.layers[0].kept.linear.S.dtype == getattr(torch, dtype or "float64")
    found, exact = checks.cached(model, ids, (9, 10, 12), cache=state), checks.uncached(model, ids)[:, 9:]
    assert (found - exact).abs().mean() / exact.abs().mean() < (0.1 if dtype == "bfloat16" else 1e-2)


def test_state_dtype_when_loading(tmp_path: Path) -> None:
    model = student_of(PLAIN)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, state_dtype="bfloat16")
    state = generation.generate(loaded, random_tokens(1, 9)).past_key_values
    assert state.layers[0].kept.linear.S.dtype == torch.bfloat16
    loaded.config.state_dtype = "int8"
    with pytest.raises(UserError, match=r"config.state_dtype: expected one of None, float32.*found 'int8'"):
        generation.generate(loaded, random_tokens(1, 9))
