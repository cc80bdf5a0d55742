"""Rotary angles that change with the length of a text: what a state holds cannot be rotated again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Cache, DynamicCache, PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.hf.attention import linearized_layers
from linearize.hf.cache import layer_of
from tests.hf.checks import assert_close, cached, left_padding, uncached
from tests.hf.decoders import DECODERS
from tests.hf.generation_checks import generate, prefilled
from tests.hf.models import Case, make_student, make_teacher, random_tokens, student_of

# Tokens up to which the angles are those that the model was trained with.
BORDERS = {"phi3-longrope": 16, "llama-longrope": 16, "llama-dynamic": 63}
every = pytest.mark.parametrize("name", BORDERS)
REFUSED = r"config\.rope_parameters: expected at most {} tokens .*found {} tokens in the state and {} more"


@functools.cache
def student(name: str) -> PreTrainedModel:
    """`llama-longrope` is a Llama with Phi-3's angles: its own code keeps the cache across the border."""
    if name in DECODERS:
        return student_of(Case("", name))
    return make_student(Case(name), llama_longrope())


def llama_longrope() -> PreTrainedModel:
    rope = DECODERS["phi3-longrope"][1]["rope_parameters"] | {"factor": 4.0, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1, 2, 1, 2], "long_factor": [3, 9, 3, 9]}
    return make_teacher("llama", **(DECODERS["llama-dynamic"][1] | {"rope_parameters": rope}))


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


def test_a_row_beside_a_longer_one_has_its_angles() -> None:
    """In the teacher, too: docs/generation.md says so."""
    teacher, ids, mask = llama_longrope(), random_tokens(2, 20), left_padding([8, 0], 20)
    model = make_student(Case("", overrides={"mixer.span.window_size": 20}), teacher)
    found, expected, valid = uncached(model, ids, mask), uncached(teacher, ids, mask), mask.bool()
    assert_close(found[valid], expected[valid])
    for each in (model, teacher):
        assert (uncached(each, ids, mask)[0, 8:] - uncached(each, ids[:1, 8:])[0]).abs().max() > 0.1


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


def taken_back(model: PreTrainedModel, ids: torch.Tensor, _: Path) -> Cache:
    cache = DynamicCache(config=model.config)
    for module in linearized_layers(model).values():
        layer_of(cache, module).activate_past_recording()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.crop(-12)
    return cache


def without_the_longer_row(model: PreTrainedModel, ids: torch.Tensor, _: Path) -> Cache:
    both, mask = ids.repeat(2, 1), left_padding([12, 0], ids.shape[1])
    with torch.no_grad():
        state = model(both, attention_mask=mask).past_key_values
    return linearize.fork_state(state, [0])


def selected(model: PreTrainedModel, ids: torch.Tensor, folder: Path) -> Cache:
    state = without_the_longer_row(model, ids, folder)
    state.batch_repeat_interleave(3)
    state.batch_select_indices(torch.tensor([2]))
    state.reorder_cache(torch.tensor([0]))
    return state


def saved(model: PreTrainedModel, ids: torch.Tensor, folder: Path) -> Cache:
    linearize.save_state(without_the_longer_row(model, ids, folder), model, folder / "state")
    return linearize.load_state(folder / "state", model)


@every
@pytest.mark.parametrize("shortened", [taken_back, without_the_longer_row, selected, saved])
def test_a_shortened_state_keeps_the_angles_of_the_longer_text(
    name: str, shortened: Callable[[PreTrainedModel, torch.Tensor, Path], Cache], tmp_path: Path
) -> None:
    model, border = student(name), BORDERS[name]
    ids = random_tokens(1, border + 6)
    state = shortened(model, ids, tmp_path)
    # Of the row without the longer one, the first tokens are padding.
    first = 0 if shortened is taken_back else 12
    mask = left_padding([first], int(state.get_seq_length()) + 1)
    with pytest.raises(UserError, match=f"keys with the angles of {border + 6} tokens, of which {border - 6} are left"):
        model(ids[:, :1], attention_mask=mask, past_key_values=state)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-longrope"])
def test_a_shortened_state_goes_on_past_the_border(name: str, tmp_path: Path) -> None:
    """New tokens that reach over it have the angles of the state's keys again."""
    model, border = student(name), BORDERS[name]
    ids = random_tokens(1, border + 6)
    state = taken_back(model, ids, tmp_path)
    assert_close(cached(model, ids, (border - 6, border + 3, border + 6), cache=state), uncached(model, ids)[:, -12:])


def test_a_state_that_has_lost_all_tokens_takes_any_angles(tmp_path: Path) -> None:
    model, ids = student("llama-longrope"), random_tokens(1, 12)
    state = taken_back(model, ids, tmp_path)
    assert_close(cached(model, ids, (0, 5, 12), cache=state), uncached(model, ids))


@pytest.mark.parametrize("name", [*BORDERS, "llama"])
def test_a_file_that_does_not_say_what_angles_its_keys_have(name: str, tmp_path: Path) -> None:
    """An older version wrote it."""
    model = student(name) if name in BORDERS else student_of(Case(name))
    linearize.save_state(prefilled(model, random_tokens(1, 10)), model, tmp_path / "state")
    with safe_open(tmp_path / "state", "pt") as file:
        fields, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del fields["rotated"]
    save_file(tensors, tmp_path / "state", fields)
    if name == "llama":
        assert linearize.load_state(tmp_path / "state", model).get_seq_length() == 10
        return
    with pytest.raises(UserError, match=r"expected the length of the text by which its keys were rotated.*feed the"):
        linearize.load_state(tmp_path / "state", model)


@every
def test_a_state_of_a_model_whose_angles_change_elsewhere(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(student(name))
    linearize.save_state(prefilled(model, random_tokens(1, 10)), model, tmp_path / "state")
    model.config.max_position_embeddings *= 2
    with pytest.raises(UserError, match="expected a state of this model, which has max_position_embeddings"):
        linearize.load_state(tmp_path / "state", model)


def test_a_text_as_long_as_training_after_a_longer_one() -> None:
    """The angles of `dynamic` are then still those of the longer text, so that no state may go on to that length."""
    model, ids = student("llama-dynamic"), random_tokens(1, 64)
    state = prefilled(model, ids[:, :63])
    uncached(model, random_tokens(1, 100))
    with pytest.raises(UserError, match=REFUSED.format(63, 63, 1)):
        model(ids[:, 63:], past_key_values=state)


def test_generation_across_the_border() -> None:
    """Phi-3's own code reads all tokens again, once; others' would go on with two kinds of angles."""
    ids = random_tokens(2, 13)
    found = generate(student("phi3-longrope"), ids)
    expected = generate(student("phi3-longrope"), ids, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    llama = student("llama-longrope")
    instead = r".*let the answer end at token 16 \(a smaller max_new_tokens\); in Python, .*use_cache=False"
    with pytest.raises(UserError, match=REFUSED.format(16, 16, 1) + instead):
        generate(llama, ids)
    assert generate(llama, ids, max_new_tokens=3).sequences.shape[1] == 16
    without = generate(llama, ids, use_cache=False)
    for length, logits in enumerate(without.logits, 13):
        assert_close(logits, uncached(llama, without.sequences[:, :length])[:, -1].float(), 1e-5)


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
