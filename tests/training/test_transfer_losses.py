"""The losses of attention transfer against whole T x T matrices: values, gradients, memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.configs.training import TransferConfig
from linearize.data.rows import PackedRows
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.mixers import attention_weights
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import SequenceLayout
from linearize.training.attention_transfer import TransferObjective, attention_transfer
from linearize.training.eviction_scores import measure_attention
from linearize.training.transfer_losses import transfer_loss
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.mixers.weights import weights_of
from tests.oracles import transfer
from tests.oracles.attention import Documents
from tests.oracles.heads import Inputs, Weights
from tests.probes import LargestTensor

ALL = 1.0
TOLERANCE = 1e-10

NONE: dict[str, Any] = {"type": "none"}
SLIDING: dict[str, Any] = {"type": "sliding", "window_size": 5, "sinks": 2}
TERRACED: dict[str, Any] = {"type": "terraced", "window_size": 4, "blocks": 2}
SHARED, ADD = {"type": "shared_denominator"}, {"type": "add"}
MIX = {"type": "mix", "window_weight_init": 0.3}
ABSOLUTE = {"type": "absolute_scale"}
MAPS: dict[str, dict[str, Any]] = {
    "elu1": {"type": "elu1"},
    "lolcat exp": {"type": "lolcat", "activation": "exp"},
    "lolcat relu": {"type": "lolcat", "activation": "relu"},
    "lolcat elu1": {"type": "lolcat", "activation": "elu1", "per": "kv_head"},
    "hedgehog": {"type": "hedgehog", "feature_dim": 8},
    "hedgehog exp": {"type": "hedgehog", "feature_dim": 8, "activation": "exp", "per": "kv_head"},
}
FIXED, SCALAR = {"type": "fixed", "schedule": "retnet"}, {"type": "scalar"}


@dataclass(frozen=True)
class Losses:
    """Weights of the losses."""

    output_mse: float = 0.0
    weight_cross_entropy: float = 0.0

    @property
    def config(self) -> TransferConfig:
        return TransferConfig(**vars(self))


def make_mixer(feature_map: str, span: dict[str, Any], combine: dict[str, Any], decay: Any = None) -> LinearMixer:
    """Four query heads on two KV heads, fp64, no parameter near its initial value."""
    fields = {"feature_map": MAPS[feature_map], "span": span, "combine": combine, "decay": decay}
    shape = LayerShape(4, 2, 6, hidden_size=8, max_positions=64)
    config = MixerConfig.model_validate(fields).resolved(shape)
    generator = torch.Generator().manual_seed(5)
    mixer = LinearMixer(config, shape).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return mixer


PACKED: Documents = [[[*range(24)]], [[*range(9)], [*range(9, 10)], [*range(10, 24)]]]
PADDED: Documents = [[[*range(5, 24)]], [[0, 1, 2, 5, 6, 9, 10, 11, 12], [14, 15, 16, 17, 18, 19, 20, 21]]]
FULL: Documents = [[[*range(24)]]] * 2


def make_inputs(documents: Documents, softcap: float | None = None) -> tuple[AttnInputs, SequenceLayout | None]:
    generator, rows = torch.Generator().manual_seed(3), len(documents)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    inputs = AttnInputs(2 * normal(4, 24, 6), normal(2, 24, 6), normal(2, 24, 6), 0.4, softcap, normal(24, 8))
    if documents is FULL:
        return inputs, None
    position = torch.full((rows, 24), -1)
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            position[row, slots] = torch.arange(len(slots))
    return inputs, SequenceLayout.from_positions(position)


def layer_of(mixer: LinearMixer, reach: int | None = None) -> Any:
    """What the losses read of a converted attention module."""
    return SimpleNamespace(mixer=mixer, sliding_window=reach, config=SimpleNamespace(model_type="mistral"))


def live_weights(mixer: LinearMixer) -> Weights:
    """Those of the oracles, still connected to the mixer's parameters."""

    class Live(torch.nn.Module):
        config, shape = mixer.config, mixer.shape

        def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
            return dict(mixer.named_parameters())

    return weights_of(Live())  # type: ignore[arg-type]


def definition(found: transfer.Matrices, v: Tensor, losses: Losses) -> Tensor:
    """The weighted sum of the losses, from whole matrices."""
    whole = found.teacher, found.student
    squares = transfer.mean_squared_error(*whole, v, found.valid)
    return losses.output_mse * squares + losses.weight_cross_entropy * transfer.cross_entropy(*whole, found.valid)


def check(mixer: LinearMixer, documents: Documents, losses: Losses, reach: int | None = None, **options: Any) -> None:
    """One layer's loss and gradients are those of the definition."""
    inputs, layout = make_inputs(documents, **options)
    x = Inputs(inputs.q, inputs.k, inputs.v, inputs.scaling, inputs.softcap, inputs.hidden)
    found = transfer.matrices(mixer.config, live_weights(mixer), x, documents, reach=reach)
    expected = definition(found, inputs.v, losses)
    target = found.teacher @ inputs.v.repeat_interleave(2, dim=1)
    loss = transfer_loss(layer_of(mixer, reach), inputs, layout, target.detach(), losses.config, ALL)
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    named = dict(mixer.named_parameters())
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(2 * loss, list(named.values()), **options)
    expected_gradients = torch.autograd.grad(2 * expected, list(named.values()), **options)
    for name, gradient, other in zip(named, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
        idle = "combine" in name and (mixer.config.span.type == "none" or not losses.weight_cross_entropy)
        idle = (idle or name == "combine.sink_value") and name != "combine.sink_logit"
        assert idle or gradient.abs().max() > 1e-4, name


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Short rows take several blocks."""
    if not any(word in request.node.name for word in ("memory", "learn")):
        monkeypatch.setattr(attention_weights, "MIN_QUERIES", 5)
        monkeypatch.setattr(attention_weights, "BLOCK_WEIGHTS", {"cpu": 1})


CE, EVERYTHING = Losses(weight_cross_entropy=2.0), Losses(3.0, 2.0)


# --- one layer against the definition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [NONE, SLIDING, TERRACED], ids=lambda span: span["type"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_every_map_and_span(feature_map: str, span: dict[str, Any]) -> None:
    if feature_map == "elu1" and span is NONE:
        pytest.skip("elu1 without a window has no parameters to train")
    check(make_mixer(feature_map, span, SHARED), PACKED, CE if span is NONE else EVERYTHING)


@pytest.mark.parametrize("combine", [MIX, ADD], ids=["mix", "add"])
@pytest.mark.parametrize("span", [SLIDING, TERRACED], ids=lambda span: span["type"])
@pytest.mark.parametrize("feature_map", ["hedgehog", "lolcat exp"])
def test_every_combination(feature_map: str, span: dict[str, Any], combine: dict[str, Any]) -> None:
    check(make_mixer(feature_map, span, combine), PACKED, EVERYTHING)


@pytest.mark.parametrize("documents", [PACKED, PADDED], ids=["packed", "padding"])
@pytest.mark.parametrize("span", [NONE, SLIDING, TERRACED], ids=lambda span: span["type"])
def test_the_weight_of_a_learned_sink_is_the_first_tokens(span: dict[str, Any], documents: Documents) -> None:
    check(make_mixer("hedgehog", span, SHARED | {"learned_sink": True}), documents, CE)


@pytest.mark.parametrize("decay", [None, FIXED], ids=["no decay", "fixed"])
@pytest.mark.parametrize("span", [SLIDING, TERRACED], ids=lambda span: span["type"])
@pytest.mark.parametrize("feature_map", ["hedgehog exp", "lolcat exp"])
def test_absolute_scale(feature_map: str, span: dict[str, Any], decay: dict[str, Any] | None) -> None:
    check(make_mixer(feature_map, span, ABSOLUTE, decay), PACKED, EVERYTHING)


@pytest.mark.parametrize("combine", [SHARED, MIX], ids=["shared", "mix"])
@pytest.mark.parametrize("decay", [FIXED, SCALAR], ids=lambda decay: decay["type"])
@pytest.mark.parametrize("feature_map", ["hedgehog", "lolcat exp"])
def test_decays(feature_map: str, decay: dict[str, Any], combine: dict[str, Any]) -> None:
    check(make_mixer(feature_map, SLIDING, combine, decay), PACKED, EVERYTHING)


@pytest.mark.parametrize("documents", [FULL, PADDED], ids=["full rows", "padding"])
@pytest.mark.parametrize("feature_map", ["hedgehog", "hedgehog exp"])
def test_layouts(feature_map: str, documents: Documents) -> None:
    """Outputs at padding are none of the definition's, so weights alone are compared."""
    losses = EVERYTHING if documents is FULL else Losses(0.0, 2.0)
    check(make_mixer(feature_map, SLIDING, SHARED, SCALAR), documents, losses)


def test_capped_scores() -> None:
    check(make_mixer("hedgehog", TERRACED, SHARED), FULL, EVERYTHING, softcap=2.0)


@pytest.mark.parametrize("reach", [4, 9])
def test_a_teacher_with_a_sliding_window(reach: int) -> None:
    """Linear keys beyond the teacher's reach have no target; a reach of 4 leaves none at all."""
    losses = CE if reach == 4 else EVERYTHING
    check(make_mixer("hedgehog", SLIDING | {"sinks": 0}, SHARED), PACKED, losses, reach=reach)


def test_a_window_that_holds_everything() -> None:
    """No query has linear keys; the mixer is the teacher."""
    mixer = make_mixer("hedgehog", SLIDING | {"window_size": 24}, SHARED)
    inputs, layout = make_inputs(PACKED)
    x = Inputs(inputs.q, inputs.k, inputs.v, inputs.scaling)
    teacher = transfer.matrices(mixer.config, live_weights(mixer), x, PACKED).teacher
    entropy = -(teacher * teacher.clamp_min(1e-300).log()).sum(-1).mean()
    loss = transfer_loss(layer_of(mixer), inputs, layout, teacher @ inputs.v.repeat_interleave(2, 1), CE.config, ALL)
    torch.testing.assert_close(loss, 2 * entropy, rtol=0, atol=TOLERANCE)


def test_one_block_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, found = make_mixer("lolcat exp", SLIDING, MIX, SCALAR), []
    inputs, layout = make_inputs(PACKED)
    for queries in (1, 24):
        monkeypatch.setattr(attention_weights, "MIN_QUERIES", queries)
        loss = transfer_loss(layer_of(mixer), inputs, layout, inputs.q, EVERYTHING.config, ALL)
        found.append([loss, *torch.autograd.grad(loss, list(mixer.parameters()))])
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)


# --- the objective ----------------------------------------------------------------------------------------------------

ROWS = tiny.packed([[48], [20, 28], [1, 30, 17]])


def parameters_of(student: PreTrainedModel) -> list[Tensor]:
    return [p for layer in linearized_layers(student).values() for p in layer.mixer.parameters()]


def explicit_losses(student: PreTrainedModel, rows: PackedRows, losses: Losses) -> list[Tensor]:
    """Each layer's loss on all rows at once, from whole matrices; what enters it are softmax layers' outputs."""
    found: list[Tensor] = []
    documents = []
    for positions in rows.position_ids.tolist():
        starts = [slot for slot, position in enumerate(positions) if position == 0]
        documents.append([[*range(a, b)] for a, b in zip(starts, [*starts[1:], len(positions)], strict=True)])

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        x = Inputs(inputs.q, inputs.k, inputs.v, inputs.scaling)
        with torch.enable_grad():
            all_weights = transfer.matrices(layer.mixer.config, live_weights(layer.mixer), x, documents)
            found.append(definition(all_weights, inputs.v, losses))
        return softmax_output(layer, inputs, layout)

    with torch.no_grad(), observed(student, observe):
        student.base_model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
    return found


@pytest.mark.parametrize("splits", [[3], [2, 1], [1, 1, 1]], ids=str)
def test_micro_batches_add_up_to_the_definition(splits: list[int]) -> None:
    """Rows that have more linear keys than others count more in what is a mean over queries with such keys."""
    student = tiny.moved_student(tiny.llama().double(), mixer__span=SLIDING)
    starts = [sum(splits[:index]) for index in range(len(splits))]
    batches = [ROWS.rows(slice(a, a + n)) for a, n in zip(starts, splits, strict=True)]
    losses = TransferObjective(student, EVERYTHING.config).backward(batches)
    expected = explicit_losses(student, ROWS, EVERYTHING)
    torch.testing.assert_close(list(losses.values()), [x.item() for x in expected], rtol=TOLERANCE, atol=TOLERANCE)
    gradients = torch.autograd.grad(sum(expected), parameters_of(student))
    found = [p.grad for p in parameters_of(student)]
    torch.testing.assert_close(found, list(gradients), rtol=TOLERANCE, atol=TOLERANCE)


def test_held_out_losses_are_training_losses_without_gradients() -> None:
    for combine, feature_map in ((SHARED, "hedgehog"), (MIX, "lolcat exp"), (ADD, "hedgehog"), (SHARED, "elu1")):
        student = tiny.moved_student(
            tiny.llama().double(), mixer__span=SLIDING, mixer__combine=combine, mixer__feature_map=MAPS[feature_map]
        )
        if not parameters_of(student):
            continue
        config = EVERYTHING.config.model_copy(update={"micro_batch_size": 2})
        objective = TransferObjective(student, config)
        held_out = objective.evaluate(ROWS)
        assert all(p.grad is None for p in student.parameters())
        expected = objective.backward([ROWS])
        torch.testing.assert_close(list(held_out.values()), list(expected.values()), rtol=TOLERANCE, atol=TOLERANCE)


def test_layers_learn_from_each_loss(tmp_path: Path) -> None:
    rows, held_out = tiny.packed([[64], [20, 44]] * 8, seed=1), tiny.packed([[64], [30, 34]], seed=2)
    fields = {"lr": 0.1, "max_tokens": 6 * 4 * 64, "batch_size": 4, "eval_every": 3, "epochs": 9}
    for index, losses in enumerate((CE, Losses(1000.0, 0.0), Losses(1000.0, 1.0))):
        student = linearize.convert(tiny.llama(), tiny.recipe(mixer__span=SLIDING))
        config = TransferConfig(**vars(losses), **fields)
        result = attention_transfer(student, rows, held_out, config, output_dir=tmp_path / str(index))
        assert all(result.best_loss[name] < 0.98 * result.initial_loss[name] for name in result.best_loss)


def test_a_student_in_bfloat16() -> None:
    student = tiny.moved_student(tiny.llama(), mixer__span=SLIDING).to(torch.bfloat16)
    exact = list(TransferObjective(student.double(), EVERYTHING.config).backward([ROWS]).values())
    student = student.to(torch.bfloat16)
    student.zero_grad()
    losses = TransferObjective(student, EVERYTHING.config).backward([ROWS])
    torch.testing.assert_close(list(losses.values()), exact, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters_of(student))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixer, losses, message",
    [
        (
            {"normalizer": {"type": "group_norm"}, "combine": ADD},
            CE,
            r"transfer\.weight_cross_entropy: expected .* found normalizer `group_norm`.* in model\.layers\.0\.",
        ),
        ({"normalizer": {"type": "none"}, "combine": ADD, "update": {"type": "delta"}}, CE, "found normalizer `none`"),
        ({"decay": {"type": "feature"}}, CE, "found decay `feature`"),
        (
            {"feature_map": {"type": "rfa"}, "combine": MIX},
            CE,
            "found feature_map `rfa`, whose weights can be negative",
        ),
        (
            {"span": TERRACED, "cache": {"size": 3}},
            CE,
            "expected only output_mse with a KV cache with eviction, found more for model",
        ),
    ],
)
def test_refused(mixer: dict[str, Any], losses: Losses, message: str) -> None:
    student = linearize.convert(tiny.llama(), tiny.recipe(**{f"mixer__{name}": part for name, part in mixer.items()}))
    with pytest.raises(linearize.UserError, match=message):
        TransferObjective(student, losses.config)


def test_outputs_teach_a_linear_part_beside_a_cache(tmp_path: Path) -> None:
    rows, held_out = tiny.packed([[64], [20, 44]] * 8, seed=1), tiny.packed([[64], [30, 34]], seed=2)
    recipe = tiny.recipe(mixer__span=TERRACED, mixer__cache={"size": 3}, mixer__feature_map=MAPS["hedgehog exp"])
    teacher = tiny.llama()
    student = linearize.convert(teacher, recipe.override({"mixer.combine": ABSOLUTE}))
    measure_attention(teacher, rows, byte_tokenizer(), seed=0)[1].apply(student)  # as a run fits its scores
    for layer in linearized_layers(student).values():
        layer.mixer.scorer.recency.fill_(0.5 / 3)  # a cache of what is both recent and important
    fields = {"lr": 0.1, "max_tokens": 6 * 4 * 64, "batch_size": 4, "eval_every": 3, "epochs": 9}
    config = TransferConfig(**fields | {"lr": 0.02}, calibration_tokens=256)
    result = attention_transfer(student, rows, held_out, config, output_dir=tmp_path)
    assert all(result.best_loss[name] < 0.98 * result.initial_loss[name] for name in result.best_loss)


# --- memory -----------------------------------------------------------------------------------------------------------


def step(length: int) -> Callable[[], Any]:
    """Gradients of every loss on one packed row, on a model whose weights and gradients are there already."""
    teacher = tiny.llama(layers=1, max_position_embeddings=length)
    student = tiny.moved_student(teacher, mixer__span__window_size=64)
    rows = tiny.packed([[3, length - 3]])
    objective = TransferObjective(student, EVERYTHING.config)
    for parameter in parameters_of(student):
        parameter.grad = torch.zeros_like(parameter)
    return lambda: objective.backward([rows])


def test_no_tensor_in_memory_is_quadratic() -> None:
    with LargestTensor() as largest:
        step(2048)()
    assert 2048 * 48 <= largest.elements < 2048 * 2048 // 8
