"""KV budget allocation per layer: how many layers stay full, which, and what is measured for it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from linearize.base import UserError
from linearize.configs.memory import MemoryConfig
from linearize.data.rows import PackedRows
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.training import layer_allocation
from linearize.training.eviction_scores import REQUEST, contexts
from linearize.training.layer_allocation import (
    CONTEXTS,
    SINK_CONTEXTS,
    LayerAllocation,
    allocate_layers,
    measure_layers,
)
from linearize.training.learned_sinks import LearnedSinks
from linearize.training.memory import layer_mixer, layer_sizes
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.hf.models import make_teacher, random_tokens


def shape_of(teacher: PreTrainedModel) -> TeacherShape:
    return TeacherShape.from_config(teacher.config.to_dict())


Measured = tuple[dict[int, float], LearnedSinks]
LOSSES = dict(enumerate([1.0, 5.0, 2.0, 4.0, 3.0]))  # by layer


@pytest.mark.parametrize(
    "fraction, expected", [(0.02, (0, 20)), (0.0625, (0, 64)), (0.25, (2, 64)), (0.5, (4, 170)), (1.0, (9, 1024))]
)
def test_as_many_layers_are_full_as_the_budget_allows(fraction: float, expected: tuple[int, int]) -> None:
    """A window of a sixteenth of the reference length comes first; what is left makes the windows longer."""
    teacher = make_teacher("llama", num_hidden_layers=10)
    memory = MemoryConfig(per="layer", fraction=fraction, reference_length=1024, sinks=0)
    assert layer_sizes(memory, shape_of(teacher), 10, torch.float32) == expected


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("sinks", [0, 2])
def test_bytes_are_those_of_the_cache(fraction: float, sinks: int) -> None:
    """What an allocation says it holds is what a student holds behind as many tokens, and no more than the budget."""
    teacher = make_teacher("llama", num_hidden_layers=5)
    memory = MemoryConfig(per="layer", fraction=fraction, reference_length=128, sinks=sinks, learned_sink=True)
    allocation = allocate_layers(memory, LOSSES, shape_of(teacher), torch.float64)
    student = convert_layers(teacher, allocation.plan(5))
    with torch.no_grad():
        cache = student(random_tokens(1, 128), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        named = {} if not hasattr(layer, "kept") else layer.kept.named_tensors()
        tensors = [x for name, x in named.items() if not name.endswith("seen")] or [layer.keys, layer.values]
        held += sum(x.nbytes for x in tensors)
    assert held == allocation.held <= allocation.budget
    assert allocation.held > 0.8 * allocation.budget


def test_the_layers_whose_window_costs_most_stay_full() -> None:
    teacher = make_teacher("llama", num_hidden_layers=5)
    memory = MemoryConfig(per="layer", fraction=0.5, reference_length=1024, sinks=0)
    allocation = allocate_layers(memory, LOSSES, shape_of(teacher), torch.float32)
    assert allocation.full == [1, 3]
    assert [mixer is None for mixer in allocation.plan(5)] == [False, True, False, True, False]
    assert LayerAllocation.model_validate_json(json.dumps(allocation.to_json())) == allocation


def test_the_plan_before_measuring_has_as_many_bytes() -> None:
    teacher = make_teacher("llama", num_hidden_layers=6)
    recipe = Recipe.load("local-global", {"memory.reference_length": 128, "memory.fraction": 0.5})
    plan = resolve(recipe, shape_of(teacher), dtype=torch.float32)
    assert recipe.memory is not None
    losses = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    allocation = allocate_layers(recipe.memory, losses, shape_of(teacher), torch.float32)
    assert plan.count(None) == len(allocation.full) > 1
    assert {mixer for mixer in plan if mixer is not None} == {x for x in allocation.plan(6) if x is not None}


def test_a_learned_sink_needs_windows_per_layer() -> None:
    with pytest.raises(UserError, match=r"set memory\.per=layer"):
        Recipe.load("recommended", {"memory.learned_sink": True})


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return tiny.llama(layers=3, initializer_range=0.5)


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    ids = torch.randint(0, 200, (8, 128), generator=torch.Generator().manual_seed(0))
    position = torch.arange(128).expand(8, -1)
    return PackedRows(ids, position, torch.where(position > 0, ids, -100))


MEMORY = MemoryConfig(per="layer", fraction=0.5, reference_length=128, sinks=0, learned_sink=True)


@pytest.fixture(scope="module")
def measured(teacher: PreTrainedModel, rows: PackedRows) -> Measured:
    return measure_layers(teacher, [0, 2], MEMORY, rows, byte_tokenizer(), seed=0)


@torch.no_grad()
def test_losses_are_those_of_one_converted_layer(
    teacher: PreTrainedModel, rows: PackedRows, measured: Measured
) -> None:
    tokenizer = byte_tokenizer()
    request = tokenizer(REQUEST, add_special_tokens=False).input_ids
    longest = (256 - len(request)) // 2
    texts = list(contexts(rows, tokenizer, longest=longest, seed=0, count=SINK_CONTEXTS))[:CONTEXTS]
    window = longest // 4
    losses, sinks = measured
    assert set(losses) == {0, 2}
    for layer, loss in losses.items():
        mixer = layer_mixer(window, 0, learned_sink=True)
        student = convert_layers(teacher, tuple(mixer if i == layer else None for i in range(3)))
        sinks.apply(student)
        expected = 0.0
        for text in texts:
            ids = torch.tensor([text + request + text])
            p, q = (model(input_ids=ids).logits[0, window:].log_softmax(-1) for model in (teacher, student))
            expected += float((p.exp() * (p - q)).sum(-1).mean()) / CONTEXTS
        assert loss == pytest.approx(expected, rel=1e-3, abs=2e-6) and loss > 1e-4


@torch.no_grad()
def test_sinks_are_the_first_tokens(teacher: PreTrainedModel, rows: PackedRows, measured: Measured) -> None:
    """Of the first layer, whose queries, keys and values are known without the model."""
    sinks, tokenizer = measured[1], byte_tokenizer()
    request = tokenizer(REQUEST, add_special_tokens=False).input_ids
    longest = (256 - len(request)) // 2
    layer = teacher.model.layers[0]
    values, logits = [], []
    for text in contexts(rows, tokenizer, longest=longest, seed=0, count=SINK_CONTEXTS):
        hidden = layer.input_layernorm(teacher.model.embed_tokens(torch.tensor([text])))
        q = layer.self_attn.q_proj(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
        k = layer.self_attn.k_proj(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        values.append(layer.self_attn.v_proj(hidden)[0, 0].unflatten(-1, (2, 8)))
        cos, sin = teacher.model.rotary_emb(hidden, torch.arange(len(text))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        scores = q[0] @ k[0, :, :1].repeat_interleave(2, 0).mT * 8**-0.5
        logits.append(scores[:, longest // 4 :, 0].mean(-1))
    torch.testing.assert_close(torch.tensor(sinks.values[0]), torch.stack(values).mean(0), rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(torch.tensor(sinks.logits[0]), torch.stack(logits).mean(0), rtol=1e-3, atol=2e-5)


def test_sinks_are_set(teacher: PreTrainedModel, measured: Measured) -> None:
    mixer = layer_mixer(8, 0, learned_sink=True)
    student = convert_layers(teacher, (mixer, None, mixer))
    sinks = measured[1]
    sinks.apply(student)
    combine = student.model.layers[2].self_attn.mixer.combine
    assert combine.sink_logit.tolist() == pytest.approx(sinks.logits[2])
    assert combine.sink_value.tolist() == [pytest.approx(head) for head in sinks.values[2]]


def test_logits_that_are_not_finite_are_refused(
    teacher: PreTrainedModel, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tiny.llama(layers=3)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    monkeypatch.setattr(layer_allocation, "CONTEXTS", 1)
    with pytest.raises(UserError, match="memory: expected finite logits of the teacher"):
        measure_layers(broken, [0], MEMORY, rows, byte_tokenizer(), seed=0)
