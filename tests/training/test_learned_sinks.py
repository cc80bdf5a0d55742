"""Learned sinks beside a linear part: what is measured of the teacher's first token, and which heads receive it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig
from linearize.configs.mixer_parts import Add, SharedDenominator
from linearize.configs.spans import NoSpan, SlidingSpan
from linearize.data.rows import PackedRows
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout
from linearize.run import allocation
from linearize.run.folder import Run
from linearize.run.pipeline import run
from linearize.training.learned_sinks import LearnedSinks, measure_first_tokens
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

SINK = SharedDenominator(learned_sink=True)
WINDOW = MixerConfig(span=SlidingSpan(window_size=8), combine=SINK)
ALONE = MixerConfig(span=NoSpan(), combine=SINK)
TEXTS = [torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return tiny.llama(layers=3, initializer_range=0.5)


def student(teacher: PreTrainedModel, plan: LayerPlan) -> PreTrainedModel:
    return convert_layers(teacher, plan).eval()


@torch.no_grad()
def seen(model: PreTrainedModel, text: list[int]) -> list[tuple[Any, AttnInputs]]:
    """Each converted layer with what its attention reads in the teacher."""
    found: list[tuple[Any, AttnInputs]] = []

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> torch.Tensor:
        found.append((layer, inputs))
        return softmax_output(layer, inputs, layout)

    with observed(model, observe):
        model(input_ids=torch.tensor([text]), use_cache=False)
    return found


@torch.no_grad()
def test_a_sink_without_a_window_has_the_first_tokens_share(teacher: PreTrainedModel) -> None:
    """On average over queries beyond the first 8 tokens; sinks of windows have the mean logit of the first token."""
    model = student(teacher, (ALONE, HeadwiseConfig.of([WINDOW, ALONE]), WINDOW))
    measured = measure_first_tokens(model, TEXTS, 8)
    measured.apply(model)
    shares: dict[int, list[torch.Tensor]] = {}
    expected: dict[int, list[torch.Tensor]] = {}
    logits: dict[int, list[torch.Tensor]] = {}
    for text in TEXTS:
        for layer, inputs in seen(model, text):
            scores = inputs.q[0] @ inputs.k[0].repeat_interleave(2, 0).mT * inputs.scaling
            causal = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            expected.setdefault(layer.layer_idx, []).append(causal.softmax(-1)[:, 8:, 0])
            logits.setdefault(layer.layer_idx, []).append(scores[:, 8:, 0])
            for heads, mixer in layer.mixer.parts():
                if mixer.config != ALONE:
                    continue
                # With values of 0 but the sink's, which is 1, the output is the sink's share.
                mixer.combine.sink_value.fill_(1)
                own = inputs.heads(heads)
                y = mixer(AttnInputs(own.q, own.k, torch.zeros_like(own.v), own.scaling))
                shares.setdefault(layer.layer_idx, []).append(y[0, :, 8:, 0])
    for layer, heads in ((0, slice(0, 4)), (1, slice(2, 4))):
        found, share = (torch.cat(x[layer], -1).mean(-1) for x in (shares, expected))
        torch.testing.assert_close(found, share[heads].clamp_min(1e-4), rtol=1e-3, atol=1e-5)
    means = {layer: torch.cat(x, -1).mean(-1) for layer, x in logits.items()}
    assert measured.logits[2] == pytest.approx(means[2].tolist(), abs=1e-4)
    assert measured.logits[1][:2] == pytest.approx(means[1][:2].tolist(), abs=1e-4)
    combine = model.model.layers[1].self_attn.mixer.groups[0].combine
    assert combine.sink_logit.tolist() == pytest.approx(measured.logits[1][:2])
    assert combine.sink_value.flatten().tolist() == pytest.approx(measured.values[1][0])


def test_texts_are_those_of_the_training_rows(teacher: PreTrainedModel) -> None:
    ids = torch.randint(0, 200, (8, 128), generator=torch.Generator().manual_seed(0))
    rows = PackedRows(ids, torch.arange(128).expand(8, -1), ids)
    found = allocation.measure_sinks(teacher, (WINDOW, None, ALONE), rows, byte_tokenizer(), seed=0)
    assert set(found.logits) == set(found.values) == {0, 2}
    assert found == allocation.measure_sinks(teacher, (WINDOW, None, ALONE), rows, byte_tokenizer(), seed=0)
    assert LearnedSinks.model_validate_json(json.dumps(found.to_json())) == found


def test_a_run_measures_once_and_starts_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.recipe(mixer__combine__learned_sink=True, data__dataset=tiny.text_file())
    started = Run(recipe, tiny.teacher_folder(), tmp_path / "run", torch.float32, torch.device("cpu"))
    run(started, until="convert")
    measured = LearnedSinks.read(tmp_path / "run" / "learned_sinks.json", advice="")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    for layer in linearized_layers(made).values():
        assert layer.mixer.combine.sink_logit.tolist() == pytest.approx(measured.logits[layer.layer_idx])
        assert layer.mixer.combine.sink_value.any()
    monkeypatch.setattr(allocation, "measure_sinks", lambda *_, **__: pytest.fail("measured again"))
    run(started, until="convert")
    (tmp_path / "run" / "learned_sinks.json").write_text("{}")
    with pytest.raises(UserError, match=r"learned_sinks\.json: logits: expected a value, found none.* delete it"):
        run(started, until="convert")


def test_in_python_a_tokenizer_is_needed_to_measure(teacher: PreTrainedModel) -> None:
    recipe = tiny.recipe(mixer__combine__learned_sink=True, data__dataset=tiny.text_file())
    for tokenizer in (None, byte_tokenizer()):
        model = linearize.convert(teacher, recipe, tokenizer)
        for layer in linearized_layers(model).values():
            assert bool(layer.mixer.combine.sink_logit.any()) is (tokenizer is not None)


def test_mixers_without_a_sink_are_not_touched(teacher: PreTrainedModel) -> None:
    plain = MixerConfig(combine=Add())
    model = student(teacher, (plain, None, WINDOW))
    before = tiny.snapshot(model)
    LearnedSinks(logits={0: [1.0] * 4}, values={0: [[1.0] * 8] * 2}).apply(model)
    assert all(torch.equal(x, before[name]) for name, x in tiny.snapshot(model).items())
