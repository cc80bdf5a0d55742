"""The calibrated start of absolute-scale mixing: the far keys get the share that softmax gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.configs.training import TransferConfig
from linearize.data.rows import PackedRows
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout
from linearize.training import attention_transfer
from linearize.training.calibration import calibrate
from tests import tiny
from tests.oracles import eviction_cache

WINDOW = 6
ROWS = tiny.packed([[40, 24], [64], [10, 54]])
EXP = {"type": "hedgehog", "activation": "exp"}


def student(
    feature_map: dict[str, Any] | None = None, teacher: PreTrainedModel | None = None, window: int = WINDOW
) -> PreTrainedModel:
    recipe = tiny.recipe(mixer__span__window_size=window)
    parts = {"mixer.feature_map": feature_map or EXP, "mixer.combine": {"type": "absolute_scale"}}
    return linearize.convert(teacher or tiny.llama().double(), recipe.override(parts))


@torch.no_grad()
def shares(model: PreTrainedModel, rows: PackedRows = ROWS) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the far keys' share of explicit softmax weights, and of the mixer's, [H, N], for queries with any."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        position, document = layout.key_position[0], layout.key_document[0]
        window = layer.mixer.config.span.window_size
        lag = position[:, None] - position
        seen = (lag >= 0) & (document[:, None] == document)
        k = inputs.k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
        weights = (inputs.q @ k.mT * inputs.scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        counts = position >= window
        far = lag >= window
        if layer.mixer.config.cache is not None:
            far, counts = dropped(layer.mixer, inputs, layout)
        teacher = (weights * far).sum(-1)[0, :, counts]
        near, far = layer.mixer.partials(inputs, layout)
        excess = far.log_scale + layer.mixer.combine.offset[:, None] - near.log_scale
        mass = excess.exp() * far.den
        found.setdefault(layer.layer_idx, []).append((teacher, (mass / (mass + near.den))[0, :, counts]))
        return softmax_output(layer, inputs, layout)

    with observed(model, observe):
        for row in range(len(rows)):
            one = rows.rows(slice(row, row + 1))
            model.base_model(input_ids=one.input_ids, position_ids=one.position_ids, use_cache=False)
    return {layer: (torch.cat([a for a, _ in x], 1), torch.cat([b for _, b in x], 1)) for layer, x in found.items()}


def dropped(mixer: LinearMixer, inputs: AttnInputs, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Which keys of one row are beside each query's window and cache, [H, T, T], and which queries have any."""
    length, heads, config = inputs.q.shape[2], inputs.q.shape[1], mixer.config
    k = inputs.k if inputs.unrotated is None else inputs.unrotated[1]
    far = torch.zeros(heads, length, length, dtype=torch.bool)
    for document in layout.key_document[0].unique():
        slots = (layout.key_document[0] == document).nonzero().squeeze(1)
        for head in range(heads):
            g = head * inputs.k.shape[1] // heads
            linear = mixer.scorer.weight[g], mixer.scorer.recency[g]
            scores = eviction_cache.scores(*linear, k[0, g, slots], inputs.v[0, g, slots])
            sizes = {"width": config.span.window_size, "blocks": config.span.blocks, "sinks": 0}
            memory = eviction_cache.remember(len(slots), **sizes, **config.cache.model_dump(), scores=scores)
            for slot, keys in zip(slots, memory.dropped, strict=True):
                far[head, slot, slots[keys]] = True
    return far, far[0].any(-1)


def loss(model: PreTrainedModel) -> float:
    """Cross-entropy of the shares, a mean over layers, heads and queries."""
    terms = [-(p * q.log() + (1 - p) * (1 - q).log()).mean() for p, q in shares(model).values()]
    return float(torch.stack(terms).mean())


@pytest.mark.parametrize("feature_map", [EXP, EXP | {"per": "kv_head"}, {"type": "regla"}, {"type": "performer"}])
def test_the_mean_share_is_that_of_softmax(feature_map: dict[str, Any]) -> None:
    model = student(feature_map)
    before = loss(model)
    calibrate(model, ROWS, tokens=3 * 64)
    for teacher, mixer in shares(model).values():
        torch.testing.assert_close(mixer.mean(1), teacher.mean(1), atol=1e-8, rtol=0)
    assert loss(model) < before


def test_beside_a_cache_it_is_that_of_what_is_dropped() -> None:
    cache = {"size": 4}
    recipe = tiny.recipe(mixer__span={"type": "terraced", "window_size": 3}, mixer__cache=cache)
    parts = {"mixer.feature_map": EXP | {"per": "kv_head"}, "mixer.combine": {"type": "absolute_scale"}}
    model = linearize.convert(tiny.llama().double(), recipe.override(parts))
    calibrate(model, ROWS, tokens=3 * 64)
    for teacher, mixer in shares(model).values():
        torch.testing.assert_close(mixer.mean(1), teacher.mean(1), atol=1e-8, rtol=0)


def test_small_shares_of_a_long_text_are_met_too() -> None:
    """One far key of 256, all with the same weight: less than a hundredth, and not taken for more."""
    teacher, rows = tiny.llama().double(), tiny.packed([[256]])
    for layer in teacher.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    model = student(teacher=teacher, window=255)
    calibrate(model, rows, tokens=256)
    for share, mixer in shares(model, rows).values():
        torch.testing.assert_close(share, torch.full_like(share, 1 / 256))
        torch.testing.assert_close(mixer, share, atol=1e-8, rtol=0)


def test_the_temperature_is_the_best_of_those_tried() -> None:
    """Of maps that are too spiky or too flat; the same for query heads that share their keys' map."""
    model = student(EXP | {"per": "kv_head"})
    for layer in linearized_layers(model).values():
        for parameter in layer.mixer.feature_map.parameters():
            parameter.data.mul_(torch.tensor([8.0, 0.25]).repeat_interleave(len(parameter) // 2)[:, None, None])
    start = {name: p.clone() for name, p in model.named_parameters() if "feature_map" in name}
    calibrate(model, ROWS, tokens=3 * 64)
    reached = loss(model)
    factors = []
    for name, parameter in model.named_parameters():
        if "query_weight" in name:
            factor = (parameter / start[name]).nanmean((1, 2))
            assert torch.equal(factor[0::2], factor[1::2]), "heads 0 and 1 share keys, and so do 2 and 3"
            factors += factor.tolist()
    assert set(factors) <= {2.0**i for i in range(-5, 3)} and len(set(factors)) > 1
    for other in (0.5, 2.0):
        for layer in linearized_layers(model).values():
            for parameter in layer.mixer.feature_map.parameters():
                parameter.data.mul_(other)
        assert loss(model) > reached
        for layer in linearized_layers(model).values():
            for parameter in layer.mixer.feature_map.parameters():
                parameter.data.div_(other)


def test_only_so_many_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = student(), []
    forward = type(model.base_model).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].numel())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.base_model), "forward", counted)
    calibrate(model, ROWS, tokens=65)
    assert seen == [64, 64]


def test_other_mixers_stay_as_they_are() -> None:
    model = linearize.convert(tiny.llama(), tiny.recipe())
    before = tiny.snapshot(model)
    calibrate(model, ROWS, tokens=64)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.snapshot(model).items())


def test_once_and_not_again_when_the_stage_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(attention_transfer, "calibrate", lambda *arguments: calls.append(arguments[2]))
    config = TransferConfig(batch_size=3, max_tokens=3 * 64, calibration_tokens=100)
    for _ in range(2):
        attention_transfer.attention_transfer(student(), ROWS, ROWS, config, output_dir=tmp_path)
    assert calls == [100]
