"""Rotary angles that change with the length of a text: what a state holds cannot be rotated again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import linearize
from linearize.base import UserError
from tests.hf.checks import assert_close, cached, left_padding, uncached
from tests.hf.decoders import DECODERS
from tests.hf.generation_checks import generate, prefilled
from tests.hf.models import Case, make_student, make_teacher, random_tokens, student_of

# Tokens up to which the angles are those that the model was trained with.
BORDERS = {"phi3-longrope": 16, "llama-longrope": 16, "llama-dynamic": 64}
every = pytest.mark.parametrize("name", BORDERS)
REFUSED = r"config\.rope_parameters: expected at most {} tokens .*found {} tokens in the state and {} more"


@functools.cache
def student(name: str) -> PreTrainedModel:
    """`llama-longrope` is a Llama with Phi-3's angles: its own code keeps the cache across the border."""
    if name in DECODERS:
        return student_of(Case("", name))
    rope = DECODERS["phi3-longrope"][1]["rope_parameters"] | {"factor": 4.0, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1, 2, 1, 2], "long_factor": [3, 9, 3, 9]}
    fields = DECODERS["llama-dynamic"][1] | {"rope_parameters": rope}
    return make_student(Case(name), make_teacher("llama", **fields))


@every
@pytest.mark.parametrize("before, more", [(-1, 2), (0, 1), (0, 9), (-6, 20)])
def test_a_state_is_not_carried_across(name: str, before: int, more: int) -> None:
    model, border = student(name), BORDERS[name]
    ids = random_tokens(2, border + before + more)
    state = prefilled(model, ids[:, : border + before])
    with pytest.raises(UserError, match=REFUSED.format(border, border + before, more)):
        model(ids[:, border + before :], past_key_values=state)
    assert state.get_seq_length() == border + before


@every
def test_rows_with_padding_count_from_their_first_tokens(name: str) -> None:
    """Slots of padding have no position: 3 more tokens fit."""
    model, border = student(name), BORDERS[name]
    ids, mask = random_tokens(2, border + 4), left_padding([3, 5], border + 4)
    cuts = (0, border - 2, border + 3)
    found = cached(model, ids[:, : border + 3], cuts, mask[:, : border + 3])
    for row, valid in enumerate(mask[:, : border + 3].bool()):
        alone = uncached(model, ids[row : row + 1, : border + 3][:, valid])
        assert_close(found[row, -3:], alone[0, -3:])
    state = prefilled(model, ids[:, : border + 3], mask[:, : border + 3])
    with pytest.raises(UserError, match="rope_parameters"):
        model(ids[:, border + 3 :], attention_mask=mask, past_key_values=state)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-longrope"])
def test_longer_texts_read_in_one_call_go_on(name: str) -> None:
    model, ids = student(name), random_tokens(2, 30)
    assert_close(cached(model, ids, (0, 17, 18, 24, 30)), uncached(model, ids))


def test_angles_of_every_token_are_others() -> None:
    model, ids = student("llama-dynamic"), random_tokens(1, 72)
    state = prefilled_at_once(model, ids[:, :70])
    with pytest.raises(UserError, match=r"rope_parameters.*'dynamic'.*70 tokens.*fixed angles \(linear, yarn\)"):
        model(ids[:, 70:71], past_key_values=state)


def prefilled_at_once(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def test_generation_across_the_border() -> None:
    """Phi-3's own code reads all tokens again, once; others' would go on with two kinds of angles."""
    ids = random_tokens(2, 13)
    found = generate(student("phi3-longrope"), ids)
    expected = generate(student("phi3-longrope"), ids, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    with pytest.raises(UserError, match=REFUSED.format(16, 16, 1)):
        generate(student("llama-longrope"), ids)


@pytest.mark.parametrize("tokens", [3, 8, 20])
def test_a_state_that_phi3_would_forget(tokens: int, tmp_path: Path) -> None:
    model, ids = student("phi3-longrope"), random_tokens(1, 10 + tokens)
    linearize.save_state(prefilled(model, ids[:, :10]), model, tmp_path / "state")
    state = linearize.load_state(tmp_path / "state", model)
    with pytest.raises(UserError, match=r"(input_ids|rope_parameters): expected"):
        generate(model, ids[:, 10:], torch.ones_like(ids), past_key_values=linearize.fork_state(state))
    found = generate(model, ids, past_key_values=state)
    assert_close(torch.stack(found.logits), torch.stack(generate(model, ids, use_cache=False).logits))


@pytest.mark.parametrize("lookup", [True, False])
def test_an_assistant_across_the_border(lookup: bool) -> None:
    model, ids = student("phi3-longrope"), random_tokens(1, 5).repeat(1, 5)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if lookup else {"assistant_model": model}
    with pytest.raises(UserError, match=r"assisted generation: expected at most 16 tokens in all.*found room for 21"):
        generate(model, ids[:, :15], **options)
    for length, new in ((8, 8), (20, 6)):
        found, plain = (generate(model, ids[:, :length], max_new_tokens=new, **x) for x in (options, {}))
        assert torch.equal(found.sequences, plain.sequences)
        assert_close(torch.stack(found.logits), torch.stack(plain.logits))
