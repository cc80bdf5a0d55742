"""What must hold of caches, of generate() and of states, as functions of a case; `test_mutants` makes each fail."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import linearize
from linearize.base import UserError
from linearize.hf.cache import holds_keys, layer_tensors
from tests.hf.checks import TOLERANCE, assert_close, assert_rows_alone, cached, left_padding, uncached
from tests.hf.models import Case, random_tokens, student_of, teacher_of

NEW = 6
EOS = list(range(1, 16))


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    settings = dict(max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **(settings | options))


def by_hand(model: PreTrainedModel, ids: Tensor, mask: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Tokens generated without cache, padding and generate(); `choose` gets logits [B, vocabulary]."""
    for _ in range(NEW):
        alone = [uncached(model, row[None, valid])[:, -1] for row, valid in zip(ids, mask.bool(), strict=True)]
        token = choose(torch.cat(alone).float())[:, None]
        ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, torch.ones_like(token)], dim=1)
    return ids


def prefilled(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Cache:
    cache = DynamicCache(config=model.config) if cache is None else cache
    cached(model, ids, (0, ids.shape[1] - 1, ids.shape[1]), mask, cache)
    return cache


def assert_same_state(found: Cache, expected: Cache) -> None:
    assert found.get_seq_length() == expected.get_seq_length()
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        for x, y in zip(layer_tensors(mine).values(), layer_tensors(theirs).values(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


# --- with a cache as without one --------------------------------------------------------------------------------------


def in_chunks(case: Case) -> None:
    """A long prompt fed in parts of any length."""
    model, ids = student_of(case), random_tokens(2, 40)
    assert_close(cached(model, ids, (0, 17, 18, 19, 32, 40)), uncached(model, ids))


def token_by_token(case: Case) -> None:
    model, ids = student_of(case), random_tokens(2, 26)
    assert_close(cached(model, ids, range(27)), uncached(model, ids))


def left_padded(case: Case) -> None:
    """Left padding leaves no trace, neither in the prompt nor in the steps after it; nor does right padding."""
    model, ids, mask = student_of(case), random_tokens(3, 30), left_padding([9, 0, 20], 30)
    assert_rows_alone(model, ids, mask, uncached(model, ids, mask))
    assert_rows_alone(model, ids, mask.flip(1), uncached(model, ids, mask.flip(1)))
    # The first chunk holds no token at all of the last row.
    assert_rows_alone(model, ids, mask, cached(model, ids, (0, 13, 25, *range(26, 31)), mask))


def padded_without_positions(case: Case) -> None:
    """Where no positions are given, padding leaves no trace either: without a cache, with one, and token by token."""
    model, ids, mask = student_of(case), random_tokens(3, 20), left_padding([7, 0, 11], 20)
    with torch.no_grad():
        assert_rows_alone(model, ids, mask, model(ids, attention_mask=mask, use_cache=False).logits)
        assert_rows_alone(model, ids, mask.flip(1), model(ids, attention_mask=mask.flip(1), use_cache=False).logits)
        cache, logits = DynamicCache(config=model.config), []
        for start, stop in pairwise((0, 13, 17, 18, 19, 20)):
            given = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True}
            logits.append(model(ids[:, start:stop], **given).logits)
    assert_rows_alone(model, ids, mask, torch.cat(logits, dim=1))


def padding_told_otherwise(case: Case) -> None:
    """A state of padded rows goes on under the mask that it was read with, and raises before any work under another."""
    model, ids, mask = student_of(case), random_tokens(2, 20), left_padding([7, 0], 20)
    state = prefilled(model, ids[:, :18], mask[:, :18])
    others = {"none over all slots": [None, mask[:, 18:], mask[:, 1:]]}
    others |= {"one with 12 tokens": [left_padding([6, 0], 20)], "one with 18 tokens": [torch.ones_like(mask)]}
    for found, other in ((found, mask) for found, masks in others.items() for mask in masks):
        with pytest.raises(UserError, match=f"attention_mask: .* row 0 has seen 11 tokens in 18 slots; found {found}"):
            model(ids[:, 18:], attention_mask=other, past_key_values=state)
        with pytest.raises(UserError, match="attention_mask: expected a mask over all 19 slots"):
            one = None if other is None else other[:, :-1]
            model(ids[:, 18:19], attention_mask=one, past_key_values=state)
    with pytest.raises(UserError, match="attention_mask: expected one for the 2 rows of the state, found 3 rows"):
        model(ids[:, 18:], attention_mask=torch.cat([mask, mask[:1]]), past_key_values=state)
    with pytest.raises(UserError, match="attention_mask"):
        model.generate(ids, past_key_values=linearize.fork_state(state), max_new_tokens=1)  # makes positions of its own
    # Positions tell the padding, too, but not to softmax layers.
    fork, positions = linearize.fork_state(state), mask.cumsum(1)[:, 18:] - 1
    with pytest.raises(UserError, match="found none over all slots"):
        model(ids[:, 18:], position_ids=torch.arange(18, 20)[None], past_key_values=fork)
    if holds_keys(state):
        with pytest.raises(UserError, match="found none over all slots"):
            model(ids[:, 18:], position_ids=positions, past_key_values=fork)
    else:
        with torch.no_grad():
            found = model(ids[:, 18:], position_ids=positions, past_key_values=fork).logits
        assert_close(found, cached(model, ids, (18, 20), mask, linearize.fork_state(state)))
    assert state.get_seq_length() == 18
    assert_close(cached(model, ids, (18, 19, 20), mask, state), cached(model, ids, (0, 18, 20), mask)[:, 18:])


def masks_of_new_tokens(case: Case) -> None:
    """Behind a state without padding, a mask of the new tokens alone is as good as the whole one, or as none."""
    model, ids = student_of(case), random_tokens(2, 20)
    whole = left_padding([0, 1], 20).flip(1)
    for options in ({}, {"attention_mask": torch.ones(2, 1)}):
        state = prefilled(model, ids[:, :18])
        with torch.no_grad():
            steps = [model(ids[:, i : i + 1], past_key_values=state, **options).logits for i in (18, 19)]
        assert_close(torch.cat(steps, dim=1), uncached(model, ids)[:, 18:])
    state = prefilled(model, ids[:, :18])
    with pytest.raises(UserError, match=r"attention_mask: .* over all 19 slots, .* over the 1 new .*found one over 3"):
        model(ids[:, :1], attention_mask=whole[:, :3], past_key_values=state)
    with torch.no_grad():
        found = model(ids[:, 18:], attention_mask=whole[:, 18:], past_key_values=state).logits
    assert_rows_alone(model, ids, whole, torch.cat([uncached(model, ids[:, :18]), found], dim=1))


def left_padded_cache(case: Case) -> None:
    """Left padding and a cache, in short: two rows, of which the first chunk holds no token of the first."""
    model, ids, mask = student_of(case), random_tokens(2, 22), left_padding([7, 0], 22)
    assert_rows_alone(model, ids, mask, cached(model, ids, (0, 6, 19, 20, 22), mask))


def two_turns(case: Case) -> None:
    """A left-padded second turn on the same cache, under one mask over both turns."""
    model, ids = student_of(case), random_tokens(2, 40)
    mask = torch.cat([left_padding([5, 0], 16), torch.ones(2, 3, dtype=torch.long), left_padding([2, 12], 21)], dim=1)
    expected, valid = uncached(model, ids, mask), mask.bool()
    for second_turn in ((40,), (23, 36, 37, 40)):
        found = cached(model, ids, (0, 16, 17, 18, 19, *second_turn), mask)
        assert_close(found[valid], expected[valid])


def interior_padding(case: Case) -> None:
    """Padding between the tokens of a document leaves no trace."""
    model, ids = student_of(case), random_tokens(2, 30)
    mask = torch.cat([left_padding([5, 0], 12), left_padding([2, 9], 12), left_padding([3, 0], 6).flip(1)], dim=1)
    assert_rows_alone(model, ids, mask, uncached(model, ids, mask))


def packed(case: Case) -> None:
    """Documents packed into a row know nothing of each other."""
    model, ids, lengths = student_of(case), random_tokens(2, 36), (14, 1, 21)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        logits = model(ids, position_ids=position_ids, use_cache=False).logits
    for part, document in zip(logits.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True):
        assert_close(part, uncached(model, document))


def _assert_same_generation(case: Case, *, uncached: dict[str, Any] | None = None, **options: Any) -> None:
    """Left-padded prompts, with `options` and a cache, and without a cache."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    found = generate(model, ids, mask, **options)
    expected = generate(model, ids, mask, **(options if uncached is None else uncached), use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def beams(case: Case) -> None:
    _assert_same_generation(case, num_beams=3, num_return_sequences=2)


def chunked_prefill(case: Case) -> None:
    """generate() feeds the prompt in chunks; the first holds no token of the first row."""
    _assert_same_generation(case, uncached={}, prefill_chunk_size=4)


def static_cache(case: Case) -> None:
    """A cache whose softmax layers have a fixed number of slots."""
    _assert_same_generation(case, uncached={}, cache_implementation="static")


def next_turn(case: Case) -> None:
    """generate() goes on from the cache of an earlier generate(), with a left-padded second prompt."""
    model, ids, mask = student_of(case), random_tokens(2, 12), left_padding([5, 0], 12)
    first = generate(model, ids, mask)
    ids = torch.cat([first.sequences, random_tokens(2, 9, seed=1)], dim=1)
    mask = torch.cat([mask, torch.ones_like(first.sequences[:, 12:]), left_padding([0, 4], 9)], dim=1)
    found = generate(model, ids, mask, past_key_values=first.past_key_values)
    expected = generate(model, ids, mask, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def generated_alone(case: Case) -> None:
    """Left-padded prompts generate together what each generates by itself."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    together = generate(model, ids, mask, max_new_tokens=3)
    for row, valid in enumerate(mask.bool()):
        alone = generate(model, ids[row : row + 1, valid], mask[row : row + 1, valid], max_new_tokens=3)
        assert torch.equal(together.sequences[row, 14:], alone.sequences[0, int(valid.sum()) :])
        assert_close(torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0])


def copied(case: Case) -> None:
    """Two continuations of one prefix, each from a copy of its cache."""
    model, prefix = student_of(case), random_tokens(2, 18)
    cache = prefilled(model, prefix)
    for seed in (1, 2):
        ids = torch.cat([prefix, random_tokens(2, 7, seed=seed)], dim=1)
        found = cached(model, ids, (18, 22, 23, 25), cache=copy.deepcopy(cache))
        assert_close(found, uncached(model, ids)[:, 18:])


def rows_selected(case: Case) -> None:
    """Rows dropped, swapped and doubled."""
    model, ids, index = student_of(case), random_tokens(3, 25), torch.tensor([2, 0, 0, 2])
    cache = prefilled(model, ids[:, :18])
    cache.batch_select_indices(index)
    assert_close(cached(model, ids[index], (18, 22, 23, 25), cache=cache), uncached(model, ids)[index, 18:])


def rows_repeated(case: Case) -> None:
    model, ids = student_of(case), random_tokens(2, 25)
    cache = prefilled(model, ids[:, :18])
    cache.batch_repeat_interleave(2)
    repeated = ids.repeat_interleave(2, dim=0)
    assert_close(cached(model, repeated, (18, 22, 23, 25), cache=cache), uncached(model, repeated)[:, 18:])


def emptied(case: Case) -> None:
    """A cache that was reset is as good as new, for another batch size too."""
    model = student_of(case)
    cache = prefilled(model, random_tokens(2, 18))
    for batch in (2, 3):
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = random_tokens(batch, 20, seed=batch)
        assert_close(cached(model, ids, (0, 15, 16, 20), cache=cache), uncached(model, ids))


# --- tokens chosen ----------------------------------------------------------------------------------------------------


def greedy_by_hand(case: Case) -> None:
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    expected = by_hand(model, ids, mask, lambda logits: logits.argmax(-1))
    assert torch.equal(generate(model, ids, mask).sequences, expected)


def sampling_by_hand(case: Case) -> None:
    """A seed draws the tokens that it draws in a loop of one line."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    torch.manual_seed(5)
    expected = by_hand(model, ids, mask, lambda logits: torch.multinomial((logits / 3).softmax(-1), 1)[:, 0])
    torch.manual_seed(5)
    found = generate(model, ids, mask, do_sample=True, temperature=3.0, top_k=0, top_p=1.0)
    assert torch.equal(found.sequences, expected)


def _finished_early(case: Case, **options: Any) -> None:
    """Rows end at different tokens, and the others go on as if alone."""
    model, ids, mask = student_of(case), random_tokens(3, 14), left_padding([5, 0, 2], 14)
    options |= dict(eos_token_id=EOS, pad_token_id=0)
    found = generate(model, ids, mask, **options)
    expected = generate(model, ids, mask, use_cache=False, **options)
    assert torch.equal(found.sequences, expected.sequences)
    ends = torch.isin(found.sequences[:, 14:], torch.tensor(EOS)).int()
    assert ends.any() and len(ends.argmax(1).unique()) > 1


def greedy_finished_early(case: Case) -> None:
    _finished_early(case)


def beams_finished_early(case: Case) -> None:
    _finished_early(case, num_beams=3, early_stopping=True, length_penalty=0.0)


def returned_sequences(case: Case) -> None:
    """Several samples of each prompt."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    ids_of, masks = ids.repeat_interleave(3, dim=0), mask.repeat_interleave(3, dim=0)
    torch.manual_seed(5)
    expected = by_hand(model, ids_of, masks, lambda logits: torch.multinomial((logits / 3).softmax(-1), 1)[:, 0])
    torch.manual_seed(5)
    options = dict(do_sample=True, temperature=3.0, top_k=0, top_p=1.0, num_return_sequences=3)
    assert torch.equal(generate(model, ids, mask, **options).sequences, expected)
    assert len(expected.unique(dim=0)) == 6


# --- tokens taken back ------------------------------------------------------------------------------------------------


def _assert_as_plain(model: PreTrainedModel, **options: Any) -> None:
    """Candidates, whoever proposes them, change neither a token nor the state that is left."""
    ids = random_tokens(1, 9).repeat(1, 2)
    found, plain = generate(model, ids, **options), generate(model, ids)
    assert torch.equal(found.sequences, plain.sequences)
    assert_close(torch.stack(found.logits), torch.stack(plain.logits))
    assert_same_state(found.past_key_values, plain.past_key_values)


def assisted(case: Case) -> None:
    """By its teacher, whose candidates are mostly wrong."""
    _assert_as_plain(student_of(case), assistant_model=teacher_of(case))


def assisted_by_itself(case: Case) -> None:
    """All candidates are right: both roles are a linearized model's."""
    _assert_as_plain(student_of(case), assistant_model=student_of(case))


def assisting(case: Case) -> None:
    """A softmax model is assisted, by what the linearized one would generate if it had never been wrong."""
    student, calls = student_of(case), []

    def spy(input_ids: Tensor, **options: Any) -> Any:
        made = type(student).generate(student, input_ids=input_ids, **options)
        calls.append((input_ids, made.sequences))
        return made

    student.generate = spy
    try:
        _assert_as_plain(teacher_of(case), assistant_model=student)
    finally:
        del student.generate
    assert len(calls) > 1
    for given, made in calls:
        plain = generate(student, given, max_new_tokens=made.shape[1] - given.shape[1]).sequences
        assert torch.equal(made, plain)


def prompt_lookup(case: Case) -> None:
    _assert_as_plain(student_of(case), prompt_lookup_num_tokens=4)


def taken_back(case: Case) -> None:
    """Any number of tokens, whatever steps they came in, with padding among them; others take their place."""
    model, ids, other = student_of(case), random_tokens(2, 24), random_tokens(2, 24, seed=1)
    mask = torch.cat([left_padding([5, 0], 18), left_padding([2, 0], 6)], dim=1)
    for count in (2, 9):
        cache = DynamicCache(config=model.config)
        cached(model, ids, (0, 12), mask, cache)
        cache.activate_past_recording()
        cached(model, ids, (12, 13, 17, 18, 19, 22), mask, cache)
        cache.crop(-count)
        stay = 22 - count
        mixed = torch.cat([ids[:, :stay], other[:, stay:]], dim=1)
        found = cached(model, mixed, (stay, stay + 1, 24), mask, cache)
        valid = mask[:, stay:].bool()
        assert_close(found[valid], uncached(model, mixed, mask)[:, stay:][valid])


# --- states -----------------------------------------------------------------------------------------------------------


def forked(case: Case) -> None:
    """One state, continuations of different lengths, one after the other and then the first conversation itself."""
    model, ids, mask = student_of(case), random_tokens(2, 18), left_padding([5, 0], 18)
    state = prefilled(model, ids, mask)
    for rows, length in (([0, 0, 1], 1), ([1], 6), (None, 3), ([1, 0], 4)):
        chosen = slice(None) if rows is None else rows
        longer = torch.cat([ids[chosen], random_tokens(len(ids[chosen]), length, seed=length)], dim=1)
        wider = torch.cat([mask[chosen], torch.ones_like(longer[:, 18:])], dim=1)
        fork = linearize.fork_state(state, rows)
        found = generate(model, longer, wider, past_key_values=fork, max_new_tokens=length)
        expected = generate(model, longer, wider, use_cache=False, max_new_tokens=length)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert_same_state(state, prefilled(model, ids, mask))


def forked_static(case: Case) -> None:
    """A fork shares no storage: a static cache writes its state in place."""
    model, ids = student_of(case), random_tokens(2, 24)
    state = prefilled(model, ids[:, :18], cache=StaticCache(config=model.config, max_cache_len=24))
    mark = linearize.fork_state(state)
    for cache in (state, mark):
        found = cached(model, ids, (18, 19, 20, 24), cache=cache)
        assert_close(found, uncached(model, ids)[:, 18:])


def chosen_static(case: Case) -> None:
    """What is worked out of a static cache, which is written in place, does not outlive a step, whoever chose rows."""
    model, ids = student_of(case), random_tokens(2, 24)
    state = prefilled(model, ids[:, :18], cache=StaticCache(config=model.config, max_cache_len=24))
    rows = {(1, 1, 0): linearize.fork_state(state, [1, 1, 0]), (0, 0, 1, 1): linearize.fork_state(state)}
    rows[0, 0, 1, 1].batch_repeat_interleave(2)
    for chosen, cache in rows.items():
        found = cached(model, ids[list(chosen)], range(18, 25), cache=cache)
        assert_close(found, uncached(model, ids)[list(chosen), 18:])


def saved(case: Case) -> None:
    """A state read from a file goes on as the one that was written, bit for bit."""
    model, ids, mask = student_of(case), random_tokens(2, 26), left_padding([5, 0], 26)
    state = prefilled(model, ids[:, :18], mask)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deep" / "state.safetensors"
        linearize.save_state(state, model, file)
        loaded = linearize.load_state(file, model)
        assert [path.name for path in file.parent.iterdir()] == [file.name]
    cuts = (18, 22, 23, 26)
    found, expected = cached(model, ids, cuts, mask, loaded), cached(model, ids, cuts, mask, state)
    assert torch.equal(found, expected)
    for row, valid in enumerate(mask.bool()):
        assert_close(found[row], uncached(model, ids[row : row + 1, valid])[0, -8:])
