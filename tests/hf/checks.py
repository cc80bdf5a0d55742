"""What must hold of conversion, as functions of a case; `test_mutants` shows that each can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import linearize
from linearize.hf.attention import linearized_layers
from linearize.hf.layouts import documents_apart
from tests.hf.models import Case, make_student, make_teacher, random_tokens, student_of, teacher_of

Check = Callable[[Case], None]
TOLERANCE = 1e-10


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance


def pairs(cases: Sequence[Case], tables: Sequence[Check]) -> list[Any]:
    """Every check on every case, as parameters of a test."""
    return [pytest.param(case, check, id=f"{case.name}-{check.__name__}") for case in cases for check in tables]


def alternating(cases: Sequence[Case], tables: Sequence[Check]) -> list[Any]:
    """Every check on every other case, and the rest among the slow tests, like the fields of a chessboard."""
    return [
        pytest.param(
            case, check, id=f"{case.name}-{check.__name__}", marks=pytest.mark.slow if (row + column) % 2 else ()
        )
        for row, case in enumerate(cases)
        for column, check in enumerate(tables)
    ]


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
    """With a window of at least T tokens the student is the teacher: full, left-padded and packed rows.

    A document also starts where positions jump forward.
    """
    teacher, student = teacher_of(case), student_of(case)
    ids = random_tokens(2, 30)
    mask = left_padding([7, 0], 30)
    documents = torch.cat([torch.arange(11), torch.arange(1), torch.arange(18)]).expand(2, -1)
    rows = [dict(), dict(attention_mask=mask, position_ids=positions(mask)), dict(position_ids=documents)]
    rows.append(dict(position_ids=torch.cat([torch.arange(11), torch.arange(13, 32)]).expand(2, -1)))
    with torch.no_grad(), documents_apart(teacher):
        for options in rows:
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


def teacher_left_alone(case: Case) -> None:
    teacher, ids = make_teacher(case.architecture, **case.teacher), random_tokens(2, 12)
    assert_left_alone(teacher, lambda: make_student(case, teacher), lambda model: uncached(model, ids))


def assert_left_alone(
    teacher: PreTrainedModel, convert: Callable[[], PreTrainedModel], outputs: Callable[[PreTrainedModel], Tensor]
) -> None:
    """Converting, and using the student, changes nothing about the teacher, whose storage it shares.

    The student's own parameters are the mixers'; all others, tied ones too, lie where the teacher's lie.
    """
    next(teacher.parameters()).requires_grad_(False)

    def everything() -> Any:
        modules = {name: (type(module), len(module._forward_pre_hooks)) for name, module in teacher.named_modules()}
        flags = {name: (parameter.requires_grad, id(parameter)) for name, parameter in teacher.named_parameters()}
        configs = [getattr(module, "config", None) for module in teacher.modules()]
        implementations = [getattr(config, "_attn_implementation", None) for config in configs]
        return modules, flags, list(map(id, configs)), implementations, teacher.config.to_dict(), teacher.training

    before, expected = everything(), outputs(teacher)
    student = convert()
    with linearize.softmax_attention(student):
        outputs(student)
    assert not torch.allclose(outputs(student), expected)
    assert everything() == before
    assert torch.equal(outputs(teacher), expected)
    shared = {n: p for n, p in student.named_parameters(remove_duplicate=False) if ".mixer." not in n}
    theirs = dict(teacher.named_parameters(remove_duplicate=False))
    assert list(shared) == list(theirs)
    places = [{n: (p.data_ptr(), p.requires_grad) for n, p in named.items()} for named in (shared, theirs)]
    assert places[0] == places[1]
    buffers = [buffer for name, buffer in student.named_buffers() if ".mixer." not in name]
    assert all(b.data_ptr() == c.data_ptr() for b, c in zip(buffers, teacher.buffers(), strict=True))
    assert len({id(p) for p in shared.values()}) == len({id(p) for p in theirs.values()})
    assert all(p.requires_grad for layer in linearized_layers(student).values() for p in layer.mixer.parameters())
