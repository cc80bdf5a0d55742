"""Memory by need: what heads are measured to lose, and how a budget is spent."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch

import linearize
from linearize.base import UserError
from linearize.data.repeats import with_few_repeats
from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import HeadwiseConfig
from linearize.recipe import resolve
from linearize.training import allocation
from linearize.training.allocation import allocate, allocated_plan, measured_losses
from linearize.training.memory import MemoryConfig, candidate_bytes, window
from tests import tiny
from tests.hf.decoders import ARCHITECTURES
from tests.hf.models import ARCHITECTURES as FIRST
from tests.hf.models import make_teacher, random_tokens

CONVEX = [8.0, 3.0, 1.0, 0.0]
WINDOW = {"type": "sliding", "window_size": 4}
LINEAR = [
    {"span": WINDOW, "feature_map": {"type": "exp"}, "combine": {"type": "absolute_scale"}},
    {"span": WINDOW, "decay": {"type": "scalar"}, "normalizer": {"type": "rms_norm"}, "combine": {"type": "add"}},
]


def rows(count: int, length: int) -> PackedRows:
    ids = random_tokens(count, length)
    position = torch.arange(length).expand(count, -1)
    return PackedRows(ids, position, torch.where(position > 0, ids, -100))


# --- spending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", range(8, 29, 2))
def test_no_other_spending_within_the_budget_is_better(budget: int) -> None:
    """Where steps are of one size and fall in value, greedy is the best there is."""
    losses = {0: [CONVEX, [x / 4 for x in CONVEX]], 2: [[2 * x for x in CONVEX], [0.0] * 4]}
    sizes = [2, 4, 6, 8]
    chosen = allocate(losses, sizes, budget)
    heads = [(losses[layer][head], chosen[layer][head]) for layer in losses for head in range(2)]
    assert sum(sizes[place] for _, place in heads) <= budget
    best = min(
        sum(its[place] for (its, _), place in zip(heads, places, strict=True))
        for places in itertools.product(range(4), repeat=4)
        if sum(sizes[place] for place in places) <= budget
    )
    assert sum(its[place] for its, place in heads) == pytest.approx(best)


def test_what_is_no_better_for_more_bytes_is_never_chosen() -> None:
    """Candidates above the hull: one that costs more and loses more, one on a step that is worth less than the next."""
    assert allocate({0: [[5.0, 6.0, 4.9, 1.0]]}, [1, 2, 3, 4], 4) == {0: [3]}
    assert allocate({0: [[5.0, 6.0, 4.9, 1.0]]}, [1, 2, 3, 4], 3) == {0: [0]}


def test_a_step_that_does_not_fit_leaves_the_bytes_to_others() -> None:
    assert allocate({0: [[100.0, 0.0, 100.0], [3.0, 3.0, 1.0]]}, [1, 50, 5], 10) == {0: [0, 2]}
    assert allocate({0: [[100.0, 0.0, 0.0], [3.0, 3.0, 1.0]]}, [1, 50, 5], 10) == {0: [2, 2]}
    assert allocate({0: [[100.0, 0.0], [3.0, 3.0]]}, [1, 50], 10) == {0: [0, 0]}


def test_too_small_a_budget_says_what_is_needed() -> None:
    with pytest.raises(UserError, match=r"memory: expected at least 8 bytes, .* found 7; give more, or smaller"):
        allocate({0: [CONVEX] * 4}, [2, 4, 6, 8], 7)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_single_heads_ablated() -> None:
    """The estimate ranks heads and sizes as the divergence that each causes by itself, and is of its size."""
    teacher, data = make_teacher("llama").float(), rows(48, 24)
    shape, candidates = TeacherShape.from_config(teacher.config.to_dict()), [window(n) for n in (4, 8, 12, 16, 20)]
    found = measured_losses(teacher, data, candidates, tokens=48 * 24, seed=0)
    estimates, expected = [], []
    with torch.no_grad():
        whole = teacher(data.input_ids).logits.double().log_softmax(-1)
        for layer in range(shape.num_layers):
            for head, place in itertools.product(range(shape.num_kv_heads), range(len(candidates))):
                heads = [None] * shape.num_kv_heads
                heads[head] = candidates[place]
                plan = [None] * shape.num_layers
                plan[layer] = HeadwiseConfig.of(heads)
                logits = convert_layers(teacher, tuple(plan))(data.input_ids).logits.double().log_softmax(-1)
                expected.append((whole.exp() * (whole - logits)).sum(-1).mean().item())
                estimates.append(found[layer][head][place])
    ranks = torch.tensor([estimates, expected]).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.8
    assert 0.2 < sum(estimates) / sum(expected) < 5


def test_what_recall_counts_beside_text() -> None:
    """Weights stand at the token before, and their squares add up to one per token of text and `recall` of recalled."""
    data, recalled = rows(3, 32), torch.zeros(3, 32, dtype=torch.bool)
    recalled[1, 20:25] = True
    data.labels[0, :8] = -100
    weights, read = allocation._weights(data, recalled, 0.25)
    assert read == 3 * 31 - 7 - 5
    assert weights[1, 19:24].square().sum().item() == pytest.approx(0.25 * read)
    weights[1, 19:24] = 0
    text = torch.zeros(3, 32)
    text[0, 7:31], text[1, :19], text[1, 24:31], text[2, :31] = 1, 1, 1, 1
    assert torch.equal(weights, text)


def test_recall_is_measured_on_spans_that_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rows that have them, what is recalled adds to what text loses; the rows as they are lose no more."""
    teacher, data = make_teacher("llama").float(), rows(2, 256)

    def measured(recall: float) -> list[float]:
        found = measured_losses(teacher, data, [window(4)], tokens=512, seed=0, recall=recall)
        return [loss for heads in found.values() for (loss,) in heads]

    planted, recalled = with_few_repeats(data, seed=0)
    more = measured(1.0)
    monkeypatch.setattr(allocation, "with_few_repeats", lambda *_, **__: (planted, torch.zeros_like(recalled)))
    assert all(x > y for x, y in zip(more, measured(1.0), strict=True))
    monkeypatch.setattr(allocation, "with_few_repeats", lambda *_, **__: (data, torch.zeros_like(recalled)))
    assert measured(1.0) == measured(0.0)


@pytest.mark.parametrize("name", [*FIRST, *ARCHITECTURES])
def test_layers_that_are_computed_again_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, data, candidates = make_teacher(name), rows(2, 20), [window(4), window(8)]

    def measured() -> dict[int, list[list[float]]]:
        return measured_losses(teacher, data, candidates, tokens=40, seed=0)

    found = measured()
    monkeypatch.setattr(allocation, "recomputed_layers", lambda _: nullcontext())
    for layer, heads in measured().items():
        assert found[layer] == [pytest.approx(its, rel=1e-9) for its in heads]
        assert min(min(its) for its in heads) > 0


def test_memory_is_that_of_one_layer() -> None:
    """Six more layers take their inputs and nothing else; kept whole they take many times that."""
    data, candidates = rows(1, 512), [window(4)]
    peaks = {}
    for layers in (2, 8):
        teacher = tiny.llama(layers=layers, max_position_embeddings=512)
        peaks[layers] = peak_bytes(lambda it=teacher: measured_losses(it, data, candidates, tokens=512, seed=0))
    inputs = 512 * 32 * 4
    assert peaks[8] - peaks[2] < 2 * 6 * inputs


def test_the_teacher_is_left_alone_and_a_seed_says_all() -> None:
    teacher, data = make_teacher("llama").float(), rows(4, 16)
    before = {name: x.clone() for name, x in teacher.state_dict().items()}
    first, again, other = (measured_losses(teacher, data, [window(4)], tokens=64, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_states() -> None:
    teacher = make_teacher("llama")
    shape, memory = (
        TeacherShape.from_config(teacher.config.to_dict()),
        MemoryConfig(bytes=10_000, of_cache_at=64, grows=True, mixers=LINEAR),
    )
    candidates = memory.candidates()
    sizes = candidate_bytes(candidates, shape, torch.float64, 64)
    assert candidates[-1] is None and sizes[-1] == 64 * 2 * 8 * 8
    losses = {layer: [[1.0 / size for size in sizes]] * 2 for layer in range(3)}
    losses[1] = [[float(place != len(sizes) - 3 + head) for place in range(len(sizes))] for head in range(2)]
    chosen = allocate(losses, sizes, 30_000)
    assert chosen[1] == [len(sizes) - 3, len(sizes) - 2]
    student = convert_layers(teacher, allocated_plan(chosen, candidates, 3))
    with torch.no_grad():
        cache = student(random_tokens(1, 64), use_cache=True).past_key_values
    held = sum(layer.nbytes for layer in cache.layers)
    counts = 8 * sum(1 for layer in cache.layers for name in layer.kept.named_tensors() if name.endswith("seen"))
    assert held - counts == sum(sizes[place] for heads in chosen.values() for place in heads) <= 30_000


def test_a_fraction_is_of_the_teachers_cache() -> None:
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    memory = MemoryConfig(fraction=0.25, of_cache_at=100)
    assert memory.budget(shape, torch.float32) == 0.25 * 100 * 3 * 2 * 2 * 8 * 4
    assert MemoryConfig(bytes=1234).budget(shape, torch.float32) == 1234


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"memory": {}}, "either `bytes` or `fraction`"),
        ({"memory": {"bytes": 5, "fraction": 0.5}}, "either `bytes` or `fraction`"),
        ({"memory": {"bytes": 5}}, "set transfer=null"),
        ({"memory": {"bytes": 5, "mixers": [{"feature_map": {"type": "relu", "rotation": "after"}}]}}, "rotation"),
        ({"memory": {"bytes": 5}, "transfer": None, "heads": [{"kv_heads": ["0.0"]}]}, r"set heads=\[\]"),
    ],
)
def test_recipes_without_meaning(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        linearize.Recipe.load("lolcats", fields)


def test_heads_by_name() -> None:
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    recipe = linearize.Recipe.load("lolcats", {"heads": [{"kv_heads": ["0.1", "2.0"]}, {"kv_heads": ["2.1"]}]})
    plan = resolve(recipe, shape)
    assert (
        isinstance(plan[0], HeadwiseConfig) and plan[0].groups[1].kv_heads == (1,) and plan[0].groups[1].mixer is None
    )
    assert plan[1] == recipe.mixer.resolved(shape.layer) and plan[2] is None
    for name in ("3.0", "0.2", "1", "a.b"):
        wrong = linearize.Recipe.load("lolcats", {"heads": [{"kv_heads": [name]}]})
        with pytest.raises(UserError, match=r"heads.kv_heads: expected layer.head, from 0.0 to 2.1, found"):
            resolve(wrong, shape)
    kept = linearize.Recipe.load("lolcats", {"heads": [{"kv_heads": ["1.0"]}], "layers.keep_softmax": [1]})
    with pytest.raises(UserError, match=r"expected heads of layers that are converted, found 1\.0"):
        resolve(kept, shape)
