from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from linearize.base import UserError
from linearize.evaluation import perplexity
from linearize.evaluation.perplexity import Quality, TokenLosses, bootstrap, paired_difference, token_losses
from tests.evaluation.fakes import Fake, packed


def synthetic(num_rows: int, *, row_spread: float, seed: int, length: int = 20) -> TokenLosses:
    """Losses around 3.0 with a part that is shared by all tokens of a row."""
    generator = torch.Generator().manual_seed(seed)
    shared = row_spread * torch.randn(num_rows, 1, generator=generator)
    loss = 3.0 + shared + 0.5 * torch.randn(num_rows, length, generator=generator)
    return TokenLosses(loss, torch.ones_like(loss, dtype=torch.bool), torch.arange(length).expand(num_rows, -1))


def test_uniform_logits_cost_log_vocabulary() -> None:
    losses = token_losses(Fake(), packed([[16], [10, 6]]), batch_size=2)
    assert losses.mask.sum() == 15 + 9 + 5
    torch.testing.assert_close(losses.loss[losses.mask], torch.full((29,), math.log(50)))
    quality = Quality.of(losses, window_size=8)
    assert quality.loss.mean == pytest.approx(math.log(50), abs=1e-6)
    assert quality.loss.high - quality.loss.low == pytest.approx(0, abs=1e-6)


def test_entry_t_is_the_loss_of_token_t(llama) -> None:
    rows = packed([[12], [12]])
    logits = llama(input_ids=rows.input_ids).logits
    losses = token_losses(llama, rows, batch_size=2)
    for row, t in [(0, 1), (1, 7), (1, 11)]:
        expected = -logits[row, t - 1].log_softmax(-1)[rows.input_ids[row, t]].item()
        assert losses.loss[row, t].item() == pytest.approx(expected, abs=1e-5)
    assert not losses.mask[:, 0].any() and losses.mask[:, 1:].all()


def test_packed_document_has_the_losses_it_has_alone(llama) -> None:
    together = packed([[9, 15], [24]])
    losses = token_losses(llama, together, batch_size=2)
    alone = replace(
        together,
        input_ids=together.input_ids[:1, 9:],
        position_ids=together.position_ids[:1, 9:],
        labels=together.labels[:1, 9:],
    )
    torch.testing.assert_close(token_losses(llama, alone, batch_size=1).loss[0], losses.loss[0, 9:])


def test_batch_size_and_chunking_do_not_matter(llama, monkeypatch) -> None:
    rows = packed([[30], [12, 18], [7, 7, 16], [30], [29, 1]])
    whole = token_losses(llama, rows, batch_size=5)
    for batch_size in (1, 2, 3):
        torch.testing.assert_close(token_losses(llama, rows, batch_size=batch_size).loss, whole.loss)
    monkeypatch.setattr(perplexity, "_CHUNK_ELEMENTS", 50 * 7)  # 7 tokens at a time; 29 is no multiple of it
    torch.testing.assert_close(token_losses(llama, rows, batch_size=5).loss, whole.loss)


def test_unlabelled_tokens_do_not_count() -> None:
    rows = packed([[16], [16]])
    rows.labels[:, 1:9] = -100
    losses = token_losses(Fake(), rows, batch_size=2)
    assert losses.mask.sum() == 2 * 7 and (losses.loss[~losses.mask] == 0).all()
    assert Quality.of(losses, 4).tokens == 14


def test_first_token_of_a_row_never_counts() -> None:
    rows = packed([[16], [16]])
    labelled = replace(rows, labels=rows.input_ids)
    assert token_losses(Fake(), labelled, batch_size=2).mask.sum() == 2 * 15


def test_dropout_is_off_and_the_training_flag_is_put_back() -> None:
    model, rows = Fake(scale=3.0), packed([[16]])
    expected = token_losses(model.eval(), rows, batch_size=1).loss
    assert not model.training
    assert token_losses(model.train(), rows, batch_size=1).loss.equal(expected)
    assert model.training


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="7 of 7 tokens"):
        token_losses(Fake(scale=float("nan")), packed([[8]]), batch_size=1)


def test_beyond_reads_positions_within_documents() -> None:
    losses = token_losses(Fake(), packed([[20], [6, 14], [10, 10]]), batch_size=3)
    beyond = losses.beyond(8).mask
    # Position 8 is predicted by the query at 7, which sees all of its 8 keys.
    assert beyond[0].tolist() == [False] * 9 + [True] * 11
    assert beyond[1].tolist() == [False] * 15 + [True] * 5
    assert beyond[2].tolist() == ([False] * 9 + [True]) * 2
    assert losses.beyond(0).mask.equal(losses.mask)  # the first token of a document is never predicted
    quality = Quality.of(losses, 8)
    assert (quality.tokens, quality.tokens_beyond) == (19 + 18 + 18, 11 + 5 + 2)


def test_quality_is_weighted_by_tokens() -> None:
    loss = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 5.0, 9.0, 9.0]])
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    losses = TokenLosses(loss, mask, torch.arange(4).expand(2, -1))
    assert bootstrap(losses).mean == 2.0  # (1 + 1 + 1 + 5) / 4, not the mean of the rows' means
    assert bootstrap(losses).low == 1.0 and bootstrap(losses).high == 5.0


@pytest.mark.parametrize(
    ("documents", "tokens_beyond", "reason"),
    [([[8, 8], [8, 8]], 0, "no token stands more than 8"), ([[16], [8, 8]], 7, "only one sequence")],
)
def test_no_interval_beyond_the_window_says_why(documents, tokens_beyond, reason) -> None:
    quality = Quality.of(token_losses(Fake(), packed(documents), batch_size=2), 8)
    assert quality.beyond is None and quality.tokens_beyond == tokens_beyond
    assert reason in quality.beyond_missing
    json.dumps(quality.to_json(), allow_nan=False)


def test_one_sequence_is_too_little_for_an_interval() -> None:
    with pytest.raises(UserError, match="at least 2 sequences"):
        bootstrap(token_losses(Fake(), packed([[8]]), batch_size=1))


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    intervals = [bootstrap(synthetic(60, row_spread=1.0, seed=seed), samples=400) for seed in range(150)]
    coverage = sum(i.low <= 3.0 <= i.high for i in intervals) / len(intervals)
    assert 0.88 <= coverage <= 0.99
    # Drawing tokens instead of rows would promise far too much: 1 / sqrt(60 * 20) instead of 1 / sqrt(60).
    width = sum(i.high - i.low for i in intervals) / len(intervals)
    assert width == pytest.approx(2 * 1.96 * math.sqrt((1 + 0.25 / 20) / 60), rel=0.1)


def test_same_seed_same_interval() -> None:
    losses = synthetic(30, row_spread=1.0, seed=0)
    assert bootstrap(losses, seed=1) == bootstrap(losses, seed=1) != bootstrap(losses, seed=2)


def test_a_model_against_itself_differs_by_exactly_zero(llama) -> None:
    losses = token_losses(llama, packed([[30], [12, 18], [30]]), batch_size=2)
    assert asdict(paired_difference(losses, losses)) == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_pairing_cancels_what_is_hard_for_both() -> None:
    a = synthetic(40, row_spread=2.0, seed=0)
    b = replace(a, loss=a.loss - 0.01)
    difference, single = paired_difference(a, b), bootstrap(a)
    assert difference.mean == pytest.approx(0.01, abs=1e-6)
    assert difference.low > 0.009 and difference.high < 0.011
    assert single.high - single.low > 0.5


def test_difference_of_other_tokens_is_refused() -> None:
    a = synthetic(40, row_spread=2.0, seed=0)
    with pytest.raises(ValueError, match="same rows"):
        paired_difference(a, a.beyond(4))
