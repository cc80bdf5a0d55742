"""Scores of exact caches that are fitted to the teacher: against loops, and their way into a saved student."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_model
from linearize.hf.convert import convert_layers
from linearize.mixers.config import HeadwiseConfig
from linearize.mixers.exact_cache import CALIBRATED, ExpectedAttention, Learned
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.shape import LayerShape
from linearize.ops.layout import Layout
from linearize.run.pipeline import run
from linearize.training import allocation
from linearize.training.allocation import measured_losses
from linearize.training.cache_scores import FITS, RIDGE, copy_scores, fit_mixers, fit_scores
from linearize.training.memory import cached, window
from tests import tiny
from tests.hf.models import make_teacher
from tests.run.test_frontier import job
from tests.training.test_allocation import rows

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=24, max_positions=512)
EVERY = pytest.mark.parametrize("score", sorted(CALIBRATED))


def drawn(batch: int, length: int, seed: int = 0) -> AttnInputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, length, 6, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    return AttnInputs(1.5 * q, 1.5 * k, v, 0.5)


def scores_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.named_buffers() if ".worth." in name}


def test_expected_attention_is_the_mean_over_normal_queries() -> None:
    """Of a million draws; weights over the candidates, added over the query heads, times the value's length."""
    x, score = drawn(1, 5), ExpectedAttention(SHAPE)
    generator = torch.Generator().manual_seed(3)
    root = 0.15 * torch.randn(4, 6, 6, generator=generator, dtype=torch.float64)
    mean = 0.5 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    score.double().load_state_dict({"mean": mean, "covariance": root @ root.mT})
    queries = torch.randn(4, 1_000_000, 6, generator=generator, dtype=torch.float64) @ root.mT + mean[:, None]
    expected = torch.zeros(1, 2, 5, dtype=torch.float64)
    for head in range(4):
        weights = (queries[head] @ x.k[0, head // 2].mT).exp().mean(0)
        expected[0, head // 2] += weights / weights.sum()
    found = score.compare(score.pairs(x.k, x.v), torch.arange(5).expand(1, 2, -1)).exp()
    torch.testing.assert_close(found, expected * x.v.norm(dim=-1), rtol=0.02, atol=0)


def test_candidates_that_are_none_take_no_share() -> None:
    x, score = drawn(1, 5), ExpectedAttention(SHAPE)
    position = torch.tensor([-1, 3, 4, 6, 7]).expand(1, 2, -1)
    k = x.k.clone()
    k[:, :, 0] *= 100
    found, expected = (score.compare(score.pairs(keys, x.v), position)[:, :, 1:] for keys in (k, x.k))
    torch.testing.assert_close(found, expected)


def fitted(score: str, lengths: tuple[int, ...]) -> tuple[LinearMixer, AttnInputs, Layout]:
    """A mixer's score fitted to two rows of documents of these lengths."""
    mixer, x = LinearMixer(cached(4, score), SHAPE), drawn(2, sum(lengths))  # type: ignore[arg-type]
    layout = Layout.from_positions(torch.cat([torch.arange(n) for n in lengths]).expand(2, -1))
    fit = FITS[type(mixer.worth)](mixer.span)
    for row in range(2):
        fit.add(
            x.map(lambda t, row=row: t[row : row + 1]),
            Layout(layout.key_position[:1], layout.key_document[:1], sum(lengths)),
        )
    assert isinstance(mixer.worth, nn.Module)
    mixer.worth.load_state_dict(fit.result())
    return mixer, x, layout


def test_the_queries_that_are_expected() -> None:
    mixer, x, _ = fitted("expected_attention", (40,))
    q = 0.5 * x.q.transpose(0, 1).flatten(1, 2)
    assert isinstance(mixer.worth, ExpectedAttention)
    torch.testing.assert_close(mixer.worth.mean.double(), q.mean(1), rtol=0, atol=1e-6)
    covariance = torch.stack([one.mT.cov(correction=0) for one in q])
    torch.testing.assert_close(mixer.worth.covariance.double(), covariance, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [(70,), (45, 30)], ids=str)
def test_what_is_learned_is_the_regression_of_a_loop(lengths: tuple[int, ...]) -> None:
    mixer, x, layout = fitted("learned", lengths)
    position, document = layout.key_position[0], layout.key_document[0]
    total, lag = sum(lengths), mixer.span.fold_lag
    for kv in range(2):
        features, targets = [], []
        for row in range(2):
            weights = []
            for head in (2 * kv, 2 * kv + 1):
                logits = x.q[row, head] @ x.k[row, kv].mT * x.scaling
                seen = (document[:, None] == document) & (position[:, None] >= position)
                weights.append(logits.masked_fill(~seen, -torch.inf).softmax(-1))
            largest = torch.stack(weights).amax(0)
            for j in range(total):
                for age in (1, 2, 4, 8, 16, 32):
                    later = [float(largest[i, j]) for i in range(j + lag + age, total) if document[i] == document[j]]
                    if later:
                        k, v = x.k[row, kv, j], x.v[row, kv, j]
                        extra = torch.stack([k.norm(), v.norm(), torch.tensor(age, dtype=torch.float64).log2()])
                        features.append(torch.cat([k, v, extra]))
                        targets.append(torch.tensor(max(later), dtype=torch.float64).log())
        X, y = torch.stack(features), torch.stack(targets)
        X, scale = X - X.mean(0), X.std(0, correction=0)
        X = X / scale
        expected = torch.linalg.solve(X.mT @ X / len(X) + RIDGE * torch.eye(15), X.mT @ (y - y.mean()) / len(X)) / scale
        assert isinstance(mixer.worth, Learned)
        torch.testing.assert_close(mixer.worth.weight[kv].double(), expected, rtol=1e-5, atol=1e-6)


@EVERY
def test_a_students_scores_are_those_the_heads_were_measured_with(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head's mixer has what the mixer of all heads has for that head; and not what it began with."""
    teacher, data = make_teacher("llama").float(), rows(8, 64)
    seen = dict[int, dict[str, Tensor]]()

    def kept(model, mixers, *rest) -> None:  # type: ignore[no-untyped-def]
        fit_mixers(model, mixers, *rest)
        seen.update({index: its[-1][1].worth.state_dict() for index, its in mixers.items()})

    monkeypatch.setattr(allocation, "fit_mixers", kept)
    measured_losses(teacher, data, [window(8), cached(4, score), cached(9, score)], tokens=8 * 64, seed=0)  # type: ignore[arg-type]
    plan = HeadwiseConfig.of([window(8), cached(9, score)])  # type: ignore[arg-type]
    student = convert_layers(teacher, (plan,) * teacher.config.num_hidden_layers)
    begun = {name: x.clone() for name, x in scores_of(student).items()}
    fit_scores(student, data)
    assert begun and all((x - begun[name]).abs().max() > 1e-3 for name, x in scores_of(student).items())
    for layer in linearized_layers(student).values():
        for heads, part in layer.mixer.parts():
            if part.config.cache is not None:
                assert heads == (1,)
                for name, x in part.worth.state_dict().items():
                    whole = seen[layer.layer_idx][name]
                    expected = whole.unflatten(0, (2, -1))[1]
                    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@EVERY
def test_scores_are_saved_and_loaded_and_copied(score: str, tmp_path: Path) -> None:
    teacher, data = tiny.llama(), rows(8, 64)
    plan = HeadwiseConfig.of([window(8), cached(4, score)])  # type: ignore[arg-type]
    student = convert_layers(teacher, (plan,) * 2)
    fit_scores(student, data)
    expected = scores_of(student)
    student.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    again = convert_layers(teacher, (plan,) * 2)
    copy_scores(student, again)
    ids = data.input_ids
    with torch.no_grad():
        y = student(ids).logits
        for other in (loaded, again):
            found = scores_of(other)
            assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())
            torch.testing.assert_close(other(ids).logits, y, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_student_of_a_run_has_them_when_it_is_loaded(tmp_path: Path) -> None:
    small = {"memory.score": "learned", "memory.windows": [4], "memory.caches": [24], "memory.fraction": 0.9}
    made = job(tmp_path / "out", **small)
    with tiny.quick_measures():
        run(made)
    saved = load_model(str(made.folder / "model"), dtype=torch.float32, device=torch.device("cpu"))
    found = scores_of(saved)
    assert found and all(bool((x[:, :-1] != 0).all()) for x in found.values())
