"""Converted encoders: exact where they must be, padding without a trace, and equal to a slow loop."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import linearize
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.data.selection import effective_sequence_lengths
from linearize.hf import attention, layouts
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.classes import projections
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.mixers.bidirectional import BidirectionalMixer, sum_over_documents
from linearize.mixers.inputs import AttnInputs
from linearize.training.calibration import calibrate
from tests import tiny
from tests.hf.checks import assert_close, assert_left_alone
from tests.hf.encoders import (
    ENCODERS,
    MIXERS,
    TEXT,
    VISION,
    Case,
    hidden_states,
    images,
    inputs_of,
    make_encoder,
    padded,
    random_ids,
    student_of,
    teacher_of,
)
from tests.probes import LargestTensor

every = pytest.mark.parametrize("architecture", ENCODERS)
text = pytest.mark.parametrize("architecture", TEXT)
# ModernBERT's RoPE rotates in single precision, whatever the model's.
TOLERANCE = {"modernbert": 1e-5}


def valid_tokens(architecture: str, states: Tensor) -> Tensor:
    inputs = inputs_of(architecture)
    return inputs.get("attention_mask", torch.ones(states.shape[:2])).bool()


# --- softmax ----------------------------------------------------------------------------------------------------------


@every
def test_without_a_converted_layer_it_is_the_teacher(architecture: str) -> None:
    teacher = teacher_of(Case(architecture))
    layers = TeacherShape.from_config(teacher.config.to_dict()).num_layers
    student = convert_layers(teacher, (None,) * layers)
    assert type(student).__name__ == f"Linearized{type(teacher).__name__}"
    inputs = inputs_of(architecture)
    assert torch.equal(hidden_states(student, **inputs), hidden_states(teacher, **inputs))


@every
@pytest.mark.parametrize("kept", [(), (0,)], ids=["all", "all but one"])
def test_softmax_attention_is_the_teacher(architecture: str, kept: tuple[int, ...]) -> None:
    case, inputs = Case(architecture, keep_softmax=kept), inputs_of(architecture)
    teacher, student = teacher_of(case), student_of(case)
    expected, before = hidden_states(teacher, **inputs), hidden_states(student, **inputs)
    with linearize.softmax_attention(student):
        assert torch.equal(hidden_states(student, **inputs), expected)
    assert torch.equal(hidden_states(student, **inputs), before)
    assert (before - expected)[valid_tokens(architecture, before)].abs().max() > 0.1


# Eager attention of some takes its softmax in fp32.
@every
@pytest.mark.parametrize("implementation, tolerance", [("sdpa", 1e-10), ("eager", 1e-4)])
def test_softmax_outputs_are_the_layer_s_own(architecture: str, implementation: str, tolerance: float) -> None:
    """What attention transfer learns from: without padding, and within the window to both sides if it has one."""
    teacher, inputs = make_encoder(architecture), inputs_of(architecture)
    if (architecture, implementation) == ("modernbert", "eager"):
        # In double precision, transformers' own gives no numbers for queries that see nothing but padding.
        inputs = padded(architecture, [12, 12, 12], 12)
    teacher.set_attn_implementation(implementation)
    student = linearize.convert(teacher, Case(architecture).recipe()).eval()
    expected = hidden_states(teacher, **inputs)
    with observed(student, softmax_output):
        found = hidden_states(student, **inputs)
    valid = inputs.get("attention_mask", torch.ones(found.shape[:2])).bool()
    assert_close(found[valid], expected[valid], tolerance)


def test_the_window_of_local_layers_counts() -> None:
    """Two tokens to each side in ModernBERT's middle layer: with a wider window the outputs are others."""
    wide = hidden_states(make_encoder("modernbert", local_attention=6), **inputs_of("modernbert"))
    narrow = hidden_states(teacher_of(Case("modernbert")), **inputs_of("modernbert"))
    assert (wide - narrow).abs().max() > 0.1
    student = student_of(Case("modernbert"))
    assert [attention.sliding_window(layer) for layer in linearized_layers(student).values()] == [None, 3, None]
    kept = linearized_layers(student_of(Case("modernbert", convert_sliding=False)))
    assert [layer.layer_idx for layer in kept.values()] == [0, 2]


@every
def test_the_teacher_is_left_alone(architecture: str) -> None:
    teacher, inputs = make_encoder(architecture), inputs_of(architecture)
    convert = functools.partial(linearize.convert, teacher, Case(architecture).recipe())
    assert_left_alone(teacher, convert, lambda model: hidden_states(model, **inputs))


# --- padding and order ------------------------------------------------------------------------------------------------

LENGTHS = [9, 5, 7]


def padding_leaves_no_trace(architecture: str, mixer: str = "hedgehog") -> None:
    """A row's outputs are those of its tokens alone, whatever stands beside them, left or right."""
    student, tolerance = student_of(Case(architecture, mixer)), TOLERANCE.get(architecture, 1e-10)
    alone = padded(architecture, LENGTHS, max(LENGTHS))
    for width in (9, 13):
        for left in (False, True):
            inputs = padded(architecture, LENGTHS, width, left=left)
            found = hidden_states(student, **inputs)
            for row, length in enumerate(LENGTHS):
                one = {name: x[row : row + 1, :length] for name, x in alone.items() if name != "attention_mask"}
                kept = found[row : row + 1, inputs["attention_mask"][row].bool()]
                assert_close(kept, hidden_states(student, **one), tolerance)


@every
def test_an_encoder_that_is_offloaded_after_it_was_loaded(architecture: str) -> None:
    student, inputs = student_of(Case(architecture)), inputs_of(architecture)
    model = copy.deepcopy(student)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert_close(hidden_states(model, **inputs), hidden_states(student, **inputs))


@text
@pytest.mark.parametrize("mixer", MIXERS)
def test_padding(architecture: str, mixer: str) -> None:
    padding_leaves_no_trace(architecture, mixer)


@text
def test_padding_with_softmax_layers_between(architecture: str) -> None:
    student = student_of(Case(architecture, keep_softmax=(0,)))
    inputs = padded(architecture, LENGTHS, 13, left=True)
    found = hidden_states(student, **inputs)
    one = {name: x[1:2, 13 - 5 :] for name, x in inputs.items() if name != "attention_mask"}
    assert_close(found[1:2, 13 - 5 :], hidden_states(student, **one), TOLERANCE.get(architecture, 1e-10))


def ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layouts, "read_layout", lambda mask, *_: None)


def counted(patch: pytest.MonkeyPatch) -> None:
    """Padding is left out of the outputs, but is among the keys."""
    import linearize.mixers.bidirectional as module

    patch.setattr(module, "without_padding", lambda x, layout: x)


@pytest.mark.parametrize("mutant", [ignored, counted])
@text
def test_padding_that_counts_is_noticed(
    architecture: str, mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    padding_leaves_no_trace(architecture)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        padding_leaves_no_trace(architecture)


@every
def test_the_order_of_rows_does_not_matter(architecture: str) -> None:
    student, inputs, order = student_of(Case(architecture)), inputs_of(architecture), torch.tensor([2, 0, 1])
    found = hidden_states(student, **{name: x[order] for name, x in inputs.items()})
    assert_close(found, hidden_states(student, **inputs)[order])


def test_a_row_of_padding_alone_stays_finite() -> None:
    mask = torch.tensor([[0] * 6, [1] * 6])
    for name in TEXT:
        assert hidden_states(student_of(Case(name)), input_ids=random_ids(2, 6), attention_mask=mask).isfinite().all()


def test_masks_and_positions_that_cannot_be_honoured() -> None:
    student, ids = student_of(Case("bert")), random_ids(1, 6)
    with pytest.raises(linearize.UserError, match="position_ids: expected positions that go up by 1"):
        student(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match=r"attention_mask: expected a 2D mask .* found 4D"):
        student(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match=r"attention_mask: expected a 2D mask .* found dict"):
        student_of(Case("modernbert"))(ids, attention_mask={"full_attention": None, "sliding_attention": None})


def test_patches_can_be_masked_where_the_model_says_so() -> None:
    student, pixels = student_of(Case("vit")), images(2)
    mask = torch.ones(2, 17, dtype=torch.long)
    assert torch.equal(
        hidden_states(student, pixel_values=pixels, attention_mask=mask), hidden_states(student, pixel_values=pixels)
    )
    mask[0, 9:] = 0
    found = hidden_states(student, pixel_values=pixels, attention_mask=mask)
    pixels[0, :, 8:] = 100.0  # the lower half: patches 8 .. 15, behind the special token
    assert_close(hidden_states(student, pixel_values=pixels, attention_mask=mask)[0, :9], found[0, :9])


# --- the definition ---------------------------------------------------------------------------------------------------

HEADS, WIDTH = 4, 8
_THETA = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}


def by_loop(features: Callable[[str, int, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention over all tokens [H, T, D]: query by query, key by key."""
    y = torch.zeros_like(q)
    for h in range(len(q)):
        phi_q, phi_k = features("query", h, q[h]), features("key", h, k[h])
        for n in range(q.shape[1]):
            num, den = torch.zeros_like(v[h, 0]), 0.0
            for j in range(q.shape[1]):
                weight = float(phi_q[n] @ phi_k[j])
                num, den = num + weight * v[h, j], den + weight
            y[h, n] = num / den  # a sum of positive weights, in whatever scale they come
    return y


def features_of(mixer: BidirectionalMixer, name: str) -> Callable[[str, int, Tensor], Tensor]:
    """phi of one head's queries or keys [T, D], as the papers write it, from the mixer's weights."""
    weights = dict(mixer.feature_map.named_parameters())

    def elu(role: str, head: int, x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    def hedgehog(role: str, head: int, x: Tensor) -> Tensor:
        z = x @ weights[f"{role}_weight"][head] + weights[f"{role}_bias"][head]
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], dim=-1)

    def lolcat(role: str, head: int, x: Tensor) -> Tensor:
        """Relative to the largest of a query's features, and to the largest of all keys'."""
        z = x @ weights[f"{role}_weight"][head] + x
        return (z - (z.amax(-1, keepdim=True) if role == "query" else z.max())).exp()

    return {"elu": elu, "hedgehog": hedgehog, "lolcat": lolcat}[name]


def projected(student: PreTrainedModel, name: str, hidden: Tensor) -> list[Tensor]:
    """q, k, v [T, H D] of an attention module, by the model's own matrices."""
    parts = {}
    for role in "qkv":
        (module,) = [m for path, m in projections(student, role).items() if path.startswith(f"{name}.")]
        parts[role] = module(hidden)
    if all(torch.equal(parts[role], parts["q"]) for role in "kv"):
        return list(parts["q"].chunk(3, dim=-1))
    return [parts[role] for role in "qkv"]


def rotated(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """RoPE as complex numbers: dimension d and d + 4 turn by the angle n theta^(-d / 4)."""
    angle = position[:, None] * theta ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(*x.split(4, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@every
@pytest.mark.parametrize("mixer", ["hedgehog", "lolcat", "elu"])
def test_the_definition(architecture: str, mixer: str) -> None:
    student, inputs = student_of(Case(architecture, mixer)), inputs_of(architecture)
    calls: list[tuple[str, Any, Tensor]] = []
    read: list[Tensor] = []
    handles = []
    for name, layer in linearized_layers(student).items():

        def entered(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            calls.append((name, module, args[0] if args else kwargs["hidden_states"]))

        handles.append(layer.register_forward_pre_hook(entered, with_kwargs=True))
    for module in projections(student, "o").values():
        handles.append(module.register_forward_pre_hook(lambda _, args: read.append(args[0])))
    states = hidden_states(student, **inputs)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(read) == 3  # of ALBERT's two, one is gone through twice
    valid = valid_tokens(architecture, states)
    for (name, module, hidden), found in zip(calls, read, strict=True):
        with torch.no_grad():
            q, k, v = (x.unflatten(-1, (HEADS, WIDTH)) for x in projected(student, name, hidden))
        for row in (0, 1):
            at = valid[row]
            one = [x[row, at].transpose(0, 1) for x in (q, k, v)]
            if architecture == "modernbert":
                theta = _THETA["sliding_attention" if module.layer_idx == 1 else "full_attention"]
                one[:2] = [rotated(x, torch.arange(int(at.sum())), theta) for x in one[:2]]
            with torch.no_grad():
                expected = by_loop(features_of(module.mixer, mixer), *one).transpose(0, 1).flatten(1)
            # Cosines are taken in single precision.
            assert_close(found[row, at], expected, 1e-4 if architecture == "modernbert" else 1e-9)


# --- length -----------------------------------------------------------------------------------------------------------


def test_longer_than_the_teacher_has_seen() -> None:
    """ModernBERT's positions are angles: nothing ends at `max_position_embeddings`, 64 here."""
    student, ids = student_of(Case("modernbert")), random_ids(1, 300)
    found = hidden_states(student, input_ids=ids)
    assert found.shape == (1, 300, 32) and found.isfinite().all()
    ids = ids.clone()
    ids[0, 299] = 2
    assert (hidden_states(student, input_ids=ids)[0, 0] - found[0, 0]).abs().max() > 1e-9  # it is read


@pytest.mark.parametrize("architecture", VISION)
def test_larger_images_than_the_teacher_has_seen(architecture: str) -> None:
    case, pixels = Case(architecture), images(2, size=32)
    options = {} if architecture == "dinov2" else {"interpolate_pos_encoding": True}
    found = hidden_states(student_of(case), pixel_values=pixels, **options)
    assert found.shape == (2, 64 + (2 if architecture == "deit" else 1), 32)
    with linearize.softmax_attention(student_of(case)) as softmax:
        expected = hidden_states(teacher_of(case), pixel_values=pixels, **options)
        assert torch.equal(hidden_states(softmax, pixel_values=pixels, **options), expected)
    assert (found - expected).abs().max() > 0.1


def attend(length: int, mask: bool) -> Callable[[], Tensor]:
    """The forward pass of a model of one layer whose MLP is next to nothing."""
    model = make_encoder("bert", num_hidden_layers=1, max_position_embeddings=length, intermediate_size=1).float()
    student = linearize.convert(model, Case("bert").recipe()).eval()
    inputs = {"input_ids": random_ids(1, length)}
    if mask:
        inputs["attention_mask"] = (torch.arange(length) < length - 100).long()[None]
    return lambda: hidden_states(student, **inputs)


@pytest.mark.parametrize("mask", [False, True], ids=["full", "padded"])
def test_no_tensor_is_quadratic(mask: bool) -> None:
    with LargestTensor() as largest:
        attend(4096, mask)()
    assert 4096 * 32 <= largest.elements < 4096 * 4096 // 16


def test_time_is_linear_in_length() -> None:
    """16 times the tokens take about 16 times as long, far from the 256 times of softmax."""
    mixer = BidirectionalMixer(MixerConfig.model_validate(MIXERS["hedgehog"]), LayerShape(4, 4, 16, 64, 16384))

    def seconds(length: int) -> float:
        inputs = AttnInputs(*(torch.randn(1, 4, length, 16) for _ in range(3)), 0.25)
        times = []
        with torch.no_grad():
            mixer(inputs)
            for _ in range(5):
                started = time.perf_counter()
                mixer(inputs)
                times.append(time.perf_counter() - started)
        return min(times)

    assert seconds(16384) < 4 * 16 * seconds(1024)


# --- what encoders are not --------------------------------------------------------------------------------------------


@every
def test_projections_are_found_by_role(architecture: str) -> None:
    student = student_of(Case(architecture))
    layers = len(linearized_layers(student))
    for role in "qkvo":
        found = projections(student, role)
        assert len(found) == layers
        assert all(module.weight.shape[1] == 32 for module in found.values())
        assert all(student.get_submodule(name) is module for name, module in found.items())
    assert len(projections(student, "qkv")) == layers * (1 if architecture == "modernbert" else 3)


def test_what_needs_a_decoder_is_refused(tmp_path: Any) -> None:
    student, teacher = student_of(Case("bert")), teacher_of(Case("bert"))
    with pytest.raises(linearize.UserError, match="expected a decoder to generate with, found the encoder Linearized"):
        student.generate(random_ids(1, 4))
    with pytest.raises(linearize.UserError, match="past_key_values: expected none, because an encoder"):
        student(random_ids(1, 4), past_key_values=DynamicCache())
    shape = TeacherShape.from_config(teacher.config.to_dict())
    recipe = linearize.Recipe.load("hedgehog-bert", {"transfer.layers_per_block": 1})
    with pytest.raises(linearize.UserError, match=r"transfer.layers_per_block: expected null, because an encoder"):
        resolve(recipe, shape)
    with pytest.raises(
        linearize.UserError, match=r"data.select_rows_by_esl: expected a decoder, found the encoder 'bert'"
    ):
        effective_sequence_lengths(teacher, tiny.packed([[8]]))
    with pytest.raises(linearize.UserError, match=r"calibration_tokens: expected a decoder, found the encoder"):
        calibrate(student, tiny.packed([[8]]), 8)
    with pytest.raises(linearize.UserError, match="is_decoder: expected false, found true"):
        linearize.convert(make_encoder("bert", is_decoder=True), Case("bert").recipe())


def test_causal_attention_is_refused() -> None:
    layer = next(iter(linearized_layers(student_of(Case("vit"))).values()))
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    call = attention.Call(None, None, None, None, None)
    with pytest.raises(ValueError, match="expected bidirectional attention without is_causal=True"):
        attention.linearized_attention(layer, q, q, q, None, is_causal=True, **{attention.CALL: call})
    y, _ = attention.linearized_attention(layer, q, q, q, None, is_causal=False, **{attention.CALL: call})
    assert y.shape == (1, 5, 4, 8)


# --- these tests can fail ---------------------------------------------------------------------------------------------


def causal_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, layout: Any) -> Any:
    from linearize.configs.spans import NoSpan
    from linearize.ops.backend import linear_scan
    from linearize.ops.inputs import LinearInputs

    return linear_scan(LinearInputs(phi_q, phi_k, v, NoSpan(), layout))


def one_sided(module: Any, inputs: AttnInputs, layout: Any) -> Tensor:
    length = inputs.q.shape[2]
    scores = inputs.q @ inputs.k.mT * inputs.scaling
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1) @ inputs.v


def test_causal_sums_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import linearize.mixers.bidirectional as module

    assert module.sum_over_documents is sum_over_documents
    monkeypatch.setattr(module, "sum_over_documents", causal_sums)
    with pytest.raises(AssertionError):
        test_the_definition("vit", "elu")


def test_a_window_to_one_side_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "softmax_output", one_sided)
    with pytest.raises(AssertionError):
        test_softmax_outputs_are_the_layer_s_own("modernbert", "sdpa", 1e-10)
