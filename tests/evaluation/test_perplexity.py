from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from linearize.base import UserError
from linearize.evaluation import intervals, perplexity
from linearize.evaluation.intervals import Interval, Totals, resample
from linearize.evaluation.perplexity import Quality, TokenLosses, bootstrap, paired_difference, token_losses
from tests.evaluation.fakes import Fake, packed


def synthetic(documents: int, *, spread: float, seed: int, length: int = 20, rows_each: int = 1) -> TokenLosses:
    """Losses around 3.0 with a part that is shared by all tokens of a document, which fills some rows."""
    generator = torch.Generator().manual_seed(seed)
    document = torch.arange(documents).repeat_interleave(rows_each)[:, None].expand(-1, length)
    shared = spread * torch.randn(documents, generator=generator)
    loss = 3.0 + shared[document] + 0.5 * torch.randn(document.shape, generator=generator)
    mask = torch.ones_like(loss, dtype=torch.bool)
    return TokenLosses(loss, mask, torch.arange(length).expand(len(loss), -1), document)


def covers(found: list[Interval]) -> float:
    """How often an interval holds the true mean of `synthetic`."""
    return sum(interval.low <= 3.0 <= interval.high for interval in found) / len(found)


def test_uniform_logits_cost_log_vocabulary() -> None:
    losses = token_losses(Fake(), packed([[16], [10, 6]] * 6), batch_size=2)
    assert losses.mask.sum() == 6 * (15 + 9 + 5) and losses.documents == 18
    torch.testing.assert_close(losses.loss[losses.mask], torch.full((6 * 29,), math.log(50)))
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
    rows = packed([[16]] * 16)
    rows.labels[:, 1:9] = -100
    losses = token_losses(Fake(), rows, batch_size=2)
    assert losses.mask.sum() == 16 * 7 and (losses.loss[~losses.mask] == 0).all()
    assert Quality.of(losses, 4).tokens == 16 * 7


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
    losses = token_losses(Fake(), packed([[20], [6, 14], [10, 10]] * 4), batch_size=3)
    beyond = losses.beyond(8).mask
    # Position 8 is predicted by the query at 7, which sees all of its 8 keys.
    assert beyond[0].tolist() == [False] * 9 + [True] * 11
    assert beyond[1].tolist() == [False] * 15 + [True] * 5
    assert beyond[2].tolist() == ([False] * 9 + [True]) * 2
    assert losses.beyond(0).mask.equal(losses.mask)  # the first token of a document is never predicted
    quality = Quality.of(losses, 8)
    assert (quality.tokens, quality.tokens_beyond) == (4 * (19 + 18 + 18), 4 * (11 + 5 + 2))
    assert (quality.documents, quality.documents_beyond) == (20, 16)


def uneven() -> TokenLosses:
    """16 documents of 3 tokens at a loss of 1, and 16 of one token at 5."""
    mask = torch.tensor([[False, True, True, True]] * 16 + [[False, True, False, False]] * 16)
    loss = torch.tensor([1.0] * 16 + [5.0] * 16)[:, None].expand(-1, 4).contiguous()
    return TokenLosses(loss, mask, torch.arange(4).expand(32, -1), torch.arange(32)[:, None].expand(-1, 4))


def test_means_and_their_resamples_are_weighted_by_tokens() -> None:
    """(3 a + 5 b) / (3 a + b) with a of one kind drawn and b of the other, not the mean of the documents' means."""
    losses, samples = uneven(), 200
    (mean,), draws = resample([losses.totals()], samples=samples, seed=3)
    assert float(mean) == bootstrap(losses).mean == 2.0
    generator = torch.Generator().manual_seed(3)
    for draw in draws[:, 0].tolist():
        short = int((torch.randint(32, (32,), generator=generator) >= 16).sum())
        assert draw == pytest.approx((3 * (32 - short) + 5 * short) / (3 * (32 - short) + short))


def test_documents_without_tokens_of_one_column_are_left_out_of_all() -> None:
    loss, some = torch.arange(17.0), (torch.arange(17) > 0).double()
    means, draws = resample([Totals.of_each(loss), Totals(loss * some, some)], samples=50)
    assert means.tolist() == [8.5, 8.5]
    assert torch.equal(draws[:, 0], draws[:, 1])


def test_a_document_counts_once_however_many_rows_it_spans() -> None:
    whole = synthetic(40, spread=1.0, seed=0, length=60)
    in_rows = TokenLosses(*(getattr(whole, name).reshape(120, 20) for name in ("loss", "mask", "position", "document")))
    assert in_rows.documents == whole.documents == 40 and bootstrap(in_rows) == bootstrap(whole)
    shared = replace(in_rows, document=in_rows.document // 2)
    assert shared.documents == 20 and bootstrap(shared).mean == pytest.approx(bootstrap(whole).mean)


@pytest.mark.parametrize(
    ("documents", "tokens_beyond", "reason"),
    [([[8, 8]] * 8, 0, "no token stands more than 8"), ([[16]] * 3 + [[8, 8]] * 8, 21, "3 documents have tokens more")],
)
def test_no_interval_beyond_the_window_says_why(documents, tokens_beyond, reason) -> None:
    quality = Quality.of(token_losses(Fake(), packed(documents), batch_size=2), 8)
    assert quality.beyond is None and quality.tokens_beyond == tokens_beyond
    assert reason in quality.beyond_missing


def test_few_documents_are_too_little_for_an_interval() -> None:
    """What percentiles promise of them does not hold: two contain the truth every second time."""
    with pytest.raises(UserError, match=r"expected at least 16 documents or examples, .* found 15"):
        bootstrap(synthetic(15, spread=1.0, seed=0, rows_each=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "ENOUGH", 2)
        two = [bootstrap(synthetic(2, spread=1.0, seed=seed), samples=200) for seed in range(200)]
    assert covers(two) < 0.6


def test_intervals_cover_the_truth_where_rows_would_not() -> None:
    """With the fewest documents that are allowed, each of eight rows."""
    found = [synthetic(16, spread=1.0, seed=seed, rows_each=8) for seed in range(200)]
    assert covers([bootstrap(losses, samples=400) for losses in found]) >= 0.87
    by_row = [replace(x, document=torch.arange(128)[:, None].expand(-1, 20)) for x in found]
    assert covers([bootstrap(losses, samples=400) for losses in by_row]) < 0.6
    many = [bootstrap(synthetic(60, spread=1.0, seed=seed), samples=400) for seed in range(150)]
    assert 0.88 <= covers(many) <= 0.99
    # Drawing tokens instead of documents would promise far too much: 1 / sqrt(60 * 20) instead of 1 / sqrt(60).
    width = sum(i.high - i.low for i in many) / len(many)
    assert width == pytest.approx(2 * 1.96 * math.sqrt((1 + 0.25 / 20) / 60), rel=0.1)


def test_same_seed_same_interval() -> None:
    losses = synthetic(30, spread=1.0, seed=0)
    assert bootstrap(losses, seed=1) == bootstrap(losses, seed=1) != bootstrap(losses, seed=2)


def test_a_model_against_itself_differs_by_exactly_zero(llama) -> None:
    losses = token_losses(llama, packed([[30], [12, 18], [30]] * 5), batch_size=2)
    assert asdict(paired_difference(losses, losses)) == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_pairing_cancels_what_is_hard_for_both() -> None:
    a = synthetic(40, spread=2.0, seed=0)
    b = replace(a, loss=a.loss - 0.01)
    difference, single = paired_difference(a, b), bootstrap(a)
    assert difference.mean == pytest.approx(0.01, abs=1e-6)
    assert difference.low > 0.009 and difference.high < 0.011
    assert single.high - single.low > 0.5


def test_difference_of_other_tokens_is_refused() -> None:
    a = synthetic(40, spread=2.0, seed=0)
    with pytest.raises(ValueError, match="same rows"):
        paired_difference(a, a.beyond(4))
