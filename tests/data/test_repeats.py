"""Rows to learn recall from: what is written into them, and what carries a loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.data.repeats import SHORTEST, SLOT, ordinary_tokens, with_repeats, without_repeats
from linearize.data.rows import IGNORED, PackedRows

ROWS, LENGTH, FIRST = 40, 640, 1000
VOCABULARY = torch.arange(100)  # no token of the text


def text() -> PackedRows:
    """Rows of two documents, in which every token is another one."""
    input_ids = (FIRST + torch.arange(ROWS * LENGTH)).view(ROWS, LENGTH)
    position_ids = (torch.arange(LENGTH) % (LENGTH // 2)).expand(ROWS, -1)
    return PackedRows(input_ids, position_ids, input_ids.masked_fill(position_ids == 0, IGNORED))


def runs(mask: Tensor) -> list[list[int]]:
    """The stretches of true places."""
    found: list[list[int]] = []
    for place in mask.nonzero()[:, 0].tolist():
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found


@pytest.mark.parametrize("share, left", [(0.0, ROWS), (0.25, ROWS * 3 // 4), (1.0, ROWS)])
def test_rows_without_repeats(share: float, left: int) -> None:
    """Where every row has some, all are given: there is no other text."""
    made = with_repeats(text(), share, VOCABULARY, seed=3)
    found = without_repeats(made, share, seed=3)
    assert len(found) == left
    assert share == 1 or torch.isin(found.input_ids, text().input_ids).all()


def test_every_span_stands_twice_and_the_second_copy_alone_carries_a_loss() -> None:
    before, after = text(), with_repeats(text(), 0.5, VOCABULARY, seed=0)
    changed = (before.input_ids != after.input_ids).any(1)
    assert int(changed.sum()) == ROWS // 2
    distances, random, words = [], 0, 0
    for row in changed.nonzero()[:, 0].tolist():
        written = after.input_ids[row] != before.input_ids[row]
        assert torch.equal(after.labels[row][~written], before.labels[row][~written])
        spans = runs(written)  # slots are longer than spans, so that no two of them touch
        its = [after.input_ids[row][span].tolist() for span in spans]
        assert len(spans) == LENGTH // SLOT
        for tokens, span in zip(its, spans, strict=True):
            both = [place for place, other in zip(spans, its, strict=True) if other == tokens]
            assert len(both) == 2 and SHORTEST <= len(tokens) <= SLOT * 3 // 4
            labels = after.labels[row][span].tolist()
            if span is both[0]:
                assert labels == [IGNORED] * len(tokens)
                distances.append(both[1][0] - both[0][0])
            else:
                assert labels == [IGNORED, *tokens[1:]]
            random, words = random + (tokens[0] < FIRST), words + (tokens[0] >= FIRST)
            assert len({token < FIRST for token in tokens}) == 1
            if tokens[0] >= FIRST:
                assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), "a span of text from one row"
    assert random == 3 * words / 2  # of five pairs three
    assert min(distances) < 2 * SLOT and max(distances) > LENGTH / 2
    assert len(set(distances)) > 30


def test_a_row_with_repeats_is_one_document_and_the_others_are_as_they_were() -> None:
    before, after = text(), with_repeats(text(), 0.25, VOCABULARY, seed=1)
    changed = (before.input_ids != after.input_ids).any(1)
    assert torch.equal(after.position_ids[changed], torch.arange(LENGTH).expand(ROWS // 4, -1))
    assert bool((after.labels[:, 0] == IGNORED).all())
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(after, name)[~changed], getattr(before, name)[~changed])


def test_the_seed_decides() -> None:
    one, same, other = (with_repeats(text(), 0.5, VOCABULARY, seed=seed).input_ids for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(("share", "length"), [(0.0, LENGTH), (0.01, LENGTH), (1.0, 2 * SLOT - 1)])
def test_nothing_to_write_or_no_room(share: float, length: int) -> None:
    rows = text()
    rows = PackedRows(rows.input_ids[:, :length], rows.position_ids[:, :length], rows.labels[:, :length])
    assert torch.equal(with_repeats(rows, share, VOCABULARY, seed=0).input_ids, rows.input_ids)


def test_ordinary_tokens_leave_the_special_ones_out() -> None:
    assert ordinary_tokens(6, [0, 4]).tolist() == [1, 2, 3, 5]
