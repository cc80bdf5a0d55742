"""Per-head KV budget allocation: how a budget of bytes is divided over KV heads."""

from __future__ import annotations

import json
import random
import re
from contextlib import nullcontext

import pytest
import torch

import linearize
from linearize.base import UserError
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import HeadwiseConfig
from linearize.data.rows import PackedRows
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.training.allocation import Allocation, allocate
from linearize.training.memory import budget_bytes, require_room
from tests.hf.models import make_teacher, random_tokens


def rows(count: int, length: int) -> PackedRows:
    ids = random_tokens(count, length)
    position = torch.arange(length).expand(count, -1)
    return PackedRows(ids, position, torch.where(position > 0, ids, -100))


# --- recipes ----------------------------------------------------------------------------------------------------------


def drawn_needs(layers: int = 3, heads: int = 2) -> dict[int, list[list[float]]]:
    """Quantiles of heads that differ much: recall needs most of those of the last layers."""
    draw = random.Random(0)
    return {
        i: [sorted(min(draw.gauss(-5 + 2 * i, 2), -0.1) for _ in range(64)) for _ in range(heads)]
        for i in range(layers)
    }


@pytest.mark.parametrize("recall_fraction", [0.0, 0.4])
@pytest.mark.parametrize("budget", [70_000, 200_000])
def test_bytes_are_those_of_the_states(budget: int, recall_fraction: float) -> None:
    """What an allocation says it holds is what the cache of a student holds, and no more than the budget."""
    teacher = make_teacher("llama")
    shape = TeacherShape.from_config(teacher.config.to_dict())
    memory = MemoryConfig(bytes=budget, reference_length=256, sinks=2, recall_fraction=recall_fraction)
    found = allocate(memory, drawn_needs(), shape, torch.float64)
    student = convert_layers(teacher, found.plan(3))
    with torch.no_grad():
        cache = student(random_tokens(1, 64), use_cache=True).past_key_values
    counts = [x.nbytes for y in cache.layers for name, x in y.kept.named_tensors().items() if name.endswith("seen")]
    assert sum(layer.nbytes for layer in cache.layers) - sum(counts) == found.held <= budget
    assert found.held > 0.9 * budget
    pairs = [pairs for heads in found.recall.values() for pairs in heads]
    assert any(pairs) == (recall_fraction > 0) and not all(pairs)
    assert Allocation.model_validate_json(json.dumps(found.to_json())) == found


def test_caches_for_recall_are_where_recall_needs_them() -> None:
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    found = allocate(MemoryConfig(bytes=200_000, reference_length=256), drawn_needs(), shape, torch.float64)
    assert found.recall[0] == [0, 0] and any(found.recall[2]) and found.text > 0


def test_small_budgets() -> None:
    """With too few bytes for a cache beside it the window takes them; with none for its own key there is one line."""
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    pair = 2 * 8 * 8
    memory = MemoryConfig(bytes=6 * (4 + 5) * pair, reference_length=256, sinks=4, recall_fraction=0)
    found = allocate(memory, drawn_needs(), shape, torch.float64)
    assert found.window == 5 and found.held == memory.bytes
    assert not found.text and found.recall == {layer: [0, 0] for layer in range(3)}
    expected = (
        r"memory: expected at least 3,840 bytes, .* found 3,000; set memory\.bytes to at least 3840, or fewer mem"
    )
    with pytest.raises(UserError, match=expected):
        allocate(memory.model_copy(update={"bytes": 3000}), drawn_needs(), shape, torch.float64)


@pytest.mark.parametrize("sinks", [0, 1, 3, 28])
@pytest.mark.parametrize("reference_length", [1, 29, 100, 1000, 1024, 77_777])
def test_what_a_small_budget_is_told_to_take_suffices(reference_length: int, sinks: int) -> None:
    """And no much smaller fraction does."""
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    memory = MemoryConfig(fraction=1e-6, reference_length=reference_length, sinks=sinks)
    with pytest.raises(UserError) as refused:
        require_room(memory, shape, 3, torch.float32)
    said = re.search(
        r"set (?:memory.fraction=null and )?memory.(bytes|fraction) to at least ([\d.e-]+)", str(refused.value)
    )
    assert said is not None and ("memory.sinks" in str(refused.value)) == (sinks > 0)
    assert (said[1] == "bytes") == (sinks >= reference_length), "the whole cache is not enough"
    nothing = {"bytes": None, "fraction": None}
    value = int(said[2]) if said[1] == "bytes" else float(said[2])
    require_room(memory.model_copy(update=nothing | {said[1]: value}), shape, 3, torch.float32)
    with pytest.raises(UserError):
        less = int(0.9 * value) if said[1] == "bytes" else 0.9 * value
        require_room(memory.model_copy(update=nothing | {said[1]: less}), shape, 3, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_plan_refuses_what_a_run_refuses(dtype: torch.dtype, missing: int) -> None:
    """Before anything is measured, in the dtype of the run."""
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    memory = MemoryConfig(bytes=6 * (1 + 1) * 2 * 8 * dtype.itemsize - missing)
    recipe = Recipe.load("recommended", {"memory": memory.model_dump()})
    for call in (
        lambda: resolve(recipe, shape, dtype=dtype),
        lambda: allocate(memory, drawn_needs(), shape, dtype),
    ):
        with pytest.raises(UserError, match="memory: expected at least") if missing else nullcontext():
            call()


def test_a_fraction_is_of_the_teachers_cache() -> None:
    shape = TeacherShape.from_config(make_teacher("llama").config.to_dict())
    memory = MemoryConfig(fraction=0.25, reference_length=100)
    assert budget_bytes(memory, shape, torch.float32) == 0.25 * 100 * 3 * 2 * 2 * 8 * 4
    assert budget_bytes(MemoryConfig(bytes=1234), shape, torch.float32) == 1234


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"memory": {}}, "either `bytes` or `fraction`, found neither; set memory.fraction"),
        (
            {"memory": {"bytes": 5, "fraction": 0.5}},
            r"found both: memory\.bytes=5 and memory\.fraction=0\.5; add `--set memory\.fraction=null` to keep the by",
        ),
        ({"memory": {"bytes": 5}}, "set transfer=null"),
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
