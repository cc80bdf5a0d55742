"""Window dropout: what is hidden, from whom, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.configs.training import TransferConfig, WindowDropout
from linearize.hf.attention import linearized_layers
from linearize.mixers.inputs import AttnInputs
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import finetune
from linearize.training.loop import Step
from linearize.training.window_dropout import dropped_windows
from tests import tiny

WINDOW = 8
TOKENS = torch.randint(250, (16, 30), generator=torch.Generator().manual_seed(0))


def student(**overrides: Any) -> PreTrainedModel:
    return linearize.convert(tiny.llama(layers=1), tiny.recipe(mixer__span__window_size=WINDOW, **overrides)).eval()


def config(start: float, end: float | None = None) -> TransferConfig:
    return TransferConfig(window_dropout=WindowDropout(start=start, end=start if end is None else end))


@torch.no_grad()
def outputs(model: PreTrainedModel, dropout: TransferConfig, step: Step) -> Tensor:
    """What the only layer's attention gives, [B, T, E]."""
    found = []
    handle = next(iter(linearized_layers(model).values())).register_forward_hook(
        lambda module, args, output: found.append(output[0])
    )
    with dropped_windows(model, dropout, step, 0):
        model(TOKENS)
    handle.remove()
    return found[0]


def test_queries_that_see_nothing_else_keep_their_window() -> None:
    model = student()
    before, hidden = outputs(model, TransferConfig(), Step(0, 1, 0)), outputs(model, config(1.0), Step(0, 1, 0))
    assert torch.equal(outputs(model, config(0.0), Step(0, 1, 0)), before)
    assert torch.equal(hidden[:, :WINDOW], before[:, :WINDOW])
    assert not torch.isclose(hidden[:, WINDOW:], before[:, WINDOW:]).all(-1).any()


def test_what_is_left_is_the_linear_part_alone() -> None:
    model = student()
    hidden = outputs(model, config(1.0), Step(0, 1, 0))
    combine = next(iter(linearized_layers(model).values())).mixer.combine
    with torch.no_grad():
        combine.window_factor.fill_(-100)  # g = 0: nothing but the linear part, where there is one
    alone = outputs(model, config(0.0), Step(0, 1, 0))
    torch.testing.assert_close(hidden[:, WINDOW:], alone[:, WINDOW:])


def test_whole_sequences_by_the_scheduled_share() -> None:
    model = student()
    before = outputs(model, config(0.0), Step(0, 1, 0))[:, WINDOW:]

    def dropped(step: Step, dropout: TransferConfig) -> Tensor:
        changed = ~torch.isclose(outputs(model, dropout, step)[:, WINDOW:], before).all(-1)
        assert (changed.all(1) | ~changed.any(1)).all(), "all queries of a sequence, or none"
        return changed.all(1)

    half = torch.stack([dropped(Step(number, 99, 0), config(0.5)) for number in range(20)])
    assert 0.4 < half.float().mean() < 0.6 and not (half == half[0]).all()
    falling = config(1.0, 0.0)
    assert dropped(Step(0, 5, 0), falling).all() and not dropped(Step(4, 5, 0), falling).any()
    again = dropped(Step(3, 99, 0), config(0.5))
    assert torch.equal(again, half[3]) and not torch.equal(dropped(Step(3, 99, 1), config(0.5)), half[3])


def test_layers_draw_for_themselves() -> None:
    model = linearize.convert(tiny.llama(layers=2), tiny.recipe(mixer__span__window_size=WINDOW))
    mixers = [layer.mixer for layer in linearized_layers(model).values()]
    shape = mixers[0].shape
    sizes = [(64, heads, 30, shape.head_dim) for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    inputs = AttnInputs(*(torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in sizes), 0.5)
    before = [mixer(inputs) for mixer in mixers]
    with dropped_windows(model, config(0.5), Step(0, 1, 0), 0):
        hidden = [(mixer(inputs) != y).flatten(1).any(1) for mixer, y in zip(mixers, before, strict=True)]
    assert all(0 < rows.sum() < 64 for rows in hidden) and not torch.equal(*hidden)


def test_parameters_keep_their_names() -> None:
    """A stage may be written down while windows are hidden."""
    model = student()
    before = [(name, x.data_ptr()) for name, x in model.state_dict().items()]
    with dropped_windows(model, config(1.0), Step(0, 1, 0), 0):
        assert [(name, x.data_ptr()) for name, x in model.state_dict().items()] == before


def test_it_ends_with_the_step() -> None:
    model = student()
    before = model(TOKENS).logits
    with pytest.raises(ZeroDivisionError), dropped_windows(model, config(1.0), Step(0, 1, 0), 0):
        raise ZeroDivisionError
    assert torch.equal(model(TOKENS).logits, before)
    assert not any("combined" in vars(layer.mixer) for layer in linearized_layers(model).values())


def test_transfer_and_finetuning_train_with_it_and_measure_without(tmp_path: Path) -> None:
    rows = tiny.packed([[48]] * 8)
    model = student()
    plain, hiding = TransferObjective(model, TransferConfig()), TransferObjective(model, config(1.0))
    step = Step(0, 1, 0)
    assert plain.backward([rows], step) != hiding.backward([rows], step)
    assert plain.evaluate(rows) == hiding.evaluate(rows)
    results = []
    for dropout in (None, WindowDropout(start=1.0, end=1.0)):
        settings = tiny.recipe().finetune
        assert settings is not None
        settings = settings.model_copy(update={"window_dropout": dropout})
        model = student()
        results.append(finetune(model, rows, rows, settings, output_dir=tmp_path / str(dropout is None)))
    assert results[0].initial_loss == results[1].initial_loss and results[0].best_loss != results[1].best_loss
