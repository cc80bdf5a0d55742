"""What must hold of conversion and of generation, as functions of a case; `test_mutants` shows that each can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import linearize
from linearize.hf.attention import linearized_layers
from tests.hf.decoders import ONE_DOCUMENT
from tests.hf.models import Case, make_student, make_teacher, random_tokens, student_of, teacher_of

Check = Callable[[Case], None]
TOLERANCE = 1e-10


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance


def positions(mask: Tensor) -> Tensor:
    """Position of every token in its row, padding not counted."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def left_padding(widths: Sequence[int], length: int) -> Tensor:
    """[B, length] attention mask whose rows begin with `widths` slots of padding."""
    return (torch.arange(length) >= torch.tensor(widths)[:, None]).long()


@torch.no_grad()
def uncached(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits [B, T, vocabulary] from one forward without a cache."""
    options = {} if mask is None else dict(attention_mask=mask, position_ids=positions(mask))
    return model(ids, use_cache=False, **options).logits


@torch.no_grad()
def cached(
    model: PreTrainedModel, ids: Tensor, cuts: Sequence[int], mask: Tensor | None = None, cache: Cache | None = None
) -> Tensor:
    """Logits of slots cuts[0].. of `ids`, fed by hand from cut to cut; `mask` covers all slots, cached ones too."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = []
    for start, stop in pairwise(cuts):
        options = {}
        if mask is not None:
            options = dict(attention_mask=mask[:, :stop], position_ids=positions(mask)[:, start:stop])
        logits.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **options).logits)
    return torch.cat(logits, dim=1)


def assert_rows_alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, logits: Tensor) -> None:
    """`logits` of every row are those of its tokens without the padding, by themselves."""
    for row, valid in enumerate(mask.bool()):
        assert_close(logits[row : row + 1, valid], uncached(model, ids[row : row + 1, valid]))


# --- conversion -------------------------------------------------------------------------------------------------------


def whole_window(case: Case) -> None:
    """With a window of at least T tokens the student is the teacher: full, left-padded and packed rows."""
    teacher, student = teacher_of(case), student_of(case)
    ids = random_tokens(2, 30)
    mask = left_padding([7, 0], 30)
    documents = torch.cat([torch.arange(11), torch.arange(1), torch.arange(18)]).expand(2, -1)
    rows = [dict(), dict(attention_mask=mask, position_ids=positions(mask)), dict(position_ids=documents)]
    with torch.no_grad():
        for options in rows[:2] if case.architecture in ONE_DOCUMENT else rows:
            found, expected = (m(ids, use_cache=False, **options).logits for m in (student, teacher))
            valid = options.get("attention_mask", torch.ones_like(ids)).bool()
            assert_close(found[valid], expected[valid])


def softmax_restored(case: Case) -> None:
    """Within `softmax_attention` the student is the teacher, bit for bit, and after it the student again."""
    teacher, student = teacher_of(case), student_of(case)
    ids, mask = random_tokens(2, 30), left_padding([7, 0], 30)
    before = uncached(student, ids, mask)
    with linearize.softmax_attention(student):
        assert torch.equal(uncached(student, ids, mask), uncached(teacher, ids, mask))
        generated = [
            m.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False) for m in (student, teacher)
        ]
        assert torch.equal(*generated)
    assert torch.equal(uncached(student, ids, mask), before)
    assert not torch.allclose(before, uncached(teacher, ids, mask))


def teacher_untouched(case: Case) -> None:
    """Converting, and using the student, changes nothing about the teacher."""
    teacher = make_teacher(case.architecture, **case.teacher)
    next(teacher.parameters()).requires_grad_(False)

    def everything() -> Any:
        modules = {name: (type(module), len(module._forward_pre_hooks)) for name, module in teacher.named_modules()}
        flags = {name: (parameter.requires_grad, id(parameter)) for name, parameter in teacher.named_parameters()}
        configs = [getattr(module, "config", None) for module in teacher.modules()]
        implementations = [getattr(config, "_attn_implementation", None) for config in configs]
        return modules, flags, list(map(id, configs)), implementations, teacher.config.to_dict(), teacher.training

    ids = random_tokens(2, 12)
    before, logits = everything(), uncached(teacher, ids)
    student = make_student(case, teacher)
    with linearize.softmax_attention(student):
        uncached(student, ids)
    assert not torch.allclose(uncached(student, ids), logits)
    assert everything() == before
    assert torch.equal(uncached(teacher, ids), logits)


def storage_shared(case: Case) -> None:
    """The student's own parameters are the mixers'; all others, tied ones too, lie where the teacher's lie."""
    teacher = make_teacher(case.architecture, **case.teacher)
    next(teacher.parameters()).requires_grad_(False)
    student = make_student(case, teacher)
    shared = {n: p for n, p in student.named_parameters(remove_duplicate=False) if ".mixer." not in n}
    expected = dict(teacher.named_parameters(remove_duplicate=False))
    assert list(shared) == list(expected)
    assert {n: (p.data_ptr(), p.requires_grad) for n, p in shared.items()} == {
        n: (p.data_ptr(), p.requires_grad) for n, p in expected.items()
    }
    buffers = [buffer for name, buffer in student.named_buffers() if ".mixer." not in name]
    assert all(b.data_ptr() == c.data_ptr() for b, c in zip(buffers, teacher.buffers(), strict=True))
    assert len({id(p) for p in shared.values()}) == len({id(p) for p in expected.values()})
    assert all(p.requires_grad for layer in linearized_layers(student).values() for p in layer.mixer.parameters())


# --- generation -------------------------------------------------------------------------------------------------------


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


def left_padded_cache(case: Case) -> None:
    """The same in short: cached, of two rows. The first chunk holds no token of the first."""
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


def _generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    settings = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return model.generate(ids, attention_mask=mask, **(settings | options))


def _assert_same_generation(case: Case, *, uncached: dict[str, Any] | None = None, **options: Any) -> None:
    """Left-padded prompts, with `options` and a cache, and without a cache."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    found = _generate(model, ids, mask, **options)
    expected = _generate(model, ids, mask, **(options if uncached is None else uncached), use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def greedy(case: Case) -> None:
    _assert_same_generation(case)


def sampling(case: Case) -> None:
    _assert_same_generation(case, do_sample=True, temperature=3.0)


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
    first = _generate(model, ids, mask)
    ids = torch.cat([first.sequences, random_tokens(2, 9, seed=1)], dim=1)
    mask = torch.cat([mask, torch.ones_like(first.sequences[:, 12:]), left_padding([0, 4], 9)], dim=1)
    found = _generate(model, ids, mask, past_key_values=first.past_key_values)
    expected = _generate(model, ids, mask, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def generated_alone(case: Case) -> None:
    """Left-padded prompts generate together what each generates by itself."""
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    together = _generate(model, ids, mask, max_new_tokens=3)
    for row, valid in enumerate(mask.bool()):
        alone = _generate(model, ids[row : row + 1, valid], mask[row : row + 1, valid], max_new_tokens=3)
        assert torch.equal(together.sequences[row, 14:], alone.sequences[0, int(valid.sum()) :])
        assert_close(torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0])


def _prefilled(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cached(model, ids, (0, ids.shape[1] - 1, ids.shape[1]), cache=cache)
    return cache


def copied(case: Case) -> None:
    """Two continuations of one prefix, each from a copy of its cache."""
    model, prefix = student_of(case), random_tokens(2, 18)
    cache = _prefilled(model, prefix)
    for seed in (1, 2):
        ids = torch.cat([prefix, random_tokens(2, 7, seed=seed)], dim=1)
        found = cached(model, ids, (18, 22, 23, 25), cache=copy.deepcopy(cache))
        assert_close(found, uncached(model, ids)[:, 18:])


def rows_selected(case: Case) -> None:
    """Rows dropped, swapped and doubled."""
    model, ids, index = student_of(case), random_tokens(3, 25), torch.tensor([2, 0, 0, 2])
    cache = _prefilled(model, ids[:, :18])
    cache.batch_select_indices(index)
    assert_close(cached(model, ids[index], (18, 22, 23, 25), cache=cache), uncached(model, ids)[index, 18:])


def rows_repeated(case: Case) -> None:
    model, ids = student_of(case), random_tokens(2, 25)
    cache = _prefilled(model, ids[:, :18])
    cache.batch_repeat_interleave(2)
    repeated = ids.repeat_interleave(2, dim=0)
    assert_close(cached(model, repeated, (18, 22, 23, 25), cache=cache), uncached(model, repeated)[:, 18:])


def emptied(case: Case) -> None:
    """A cache that was reset is as good as new, for another batch size too."""
    model = student_of(case)
    cache = _prefilled(model, random_tokens(2, 18))
    for batch in (2, 3):
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = random_tokens(batch, 20, seed=batch)
        assert_close(cached(model, ids, (0, 15, 16, 20), cache=cache), uncached(model, ids))
