"""The encoder's mixer against its oracle, and what follows from its definition."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from linearize.base import Config
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import Add, DeltaUpdate, FixedDecay, Mix, SharedDenominator, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.evaluation.speed import peak_bytes
from linearize.mixers import feature_maps as maps
from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.inputs import AttnInputs, apply_rope
from linearize.ops.layout import SequenceLayout
from tests.mixers.weights import weights_of
from tests.oracles.attention import Documents
from tests.oracles.heads import Inputs
from tests.oracles.mixer import bidirectional_layer
from tests.probes import LargestTensor, flops

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=10, max_positions=64)


def config(feature_map: maps.FeatureMapConfig, normalizer: str = "sum", **fields: object) -> MixerConfig:
    """An encoder's mixer."""
    norm = {"type": normalizer, "output_gate": True} if normalizer == "gated" else {"type": normalizer}
    norm["type"] = norm["type"].replace("gated", "rms_norm")
    given = {"span": NoSpan(), "combine": Add(), "feature_map": feature_map, "normalizer": norm}
    return MixerConfig.model_validate(given | fields)


CONFIGS = [
    config(maps.IdentityMap(), "none"),
    config(maps.IdentityMap(rotation="after"), "group_norm", scale="head_dim"),
    config(maps.Elu1Map()),
    config(maps.Elu1Map(), combine=SharedDenominator()),
    config(maps.Elu1Map(rotation="none"), "rms_norm"),
    config(maps.ExpMap(temperature=2.0)),
    config(maps.ExpMap(temperature=2.0), "none"),
    config(maps.ExpMap(rotation="after"), "group_norm"),
    config(maps.T2RMap(per="model", rotation="after"), "group_norm", scale="head_dim"),
    config(maps.HedgehogMap(init="kaiming")),
    config(maps.HedgehogMap(activation="exp", per="kv_head", rotation="none")),
    config(maps.LolcatMap(per="kv_head")),
    config(maps.ReglaMap(feature_dim=5), "gated", scale="regla"),
    config(maps.PerformerMap()),
    config(maps.CosformerMap()),
    config(maps.TaylorMap()),
    config(maps.RfaMap()),
    config(maps.DpfpMap(nu=2)),
]


def name_of(mixer_config: MixerConfig) -> str:
    return f"{mixer_config.feature_map.type} {mixer_config.feature_map.rotation} {mixer_config.normalizer.type}"


each_config = pytest.mark.parametrize("mixer_config", CONFIGS, ids=name_of)

LENGTH = 19
ROWS = {  # documents, each the slots of its tokens
    "full": [[*range(LENGTH)]],
    "left": [[*range(5, LENGTH)]],
    "right": [[*range(13)]],
    "interior": [[1, 2, 5, 6, 7, 11, 15, 17]],
    "packed": [[0], [1, 2], [*range(3, 12)], [12], [*range(13, LENGTH)]],
    "mixed": [[1], [3, 4, 6], [7, 9, 10, 11, 14, 15], [17]],
    "empty": [],
}
BATCHES = [["full", "full"], ["left", "right", "interior", "empty"], ["packed", "mixed", "full", "empty"]]
each_batch = pytest.mark.parametrize("rows", BATCHES, ids="-".join)


def make_mixer(mixer_config: MixerConfig, shape: LayerShape = SHAPE) -> BidirectionalMixer:
    """A float64 mixer with random parameters."""
    torch.manual_seed(1)
    mixer = BidirectionalMixer(mixer_config, shape).double()
    for parameter in mixer.parameters():
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64))
    return mixer.requires_grad_(False)


def make_inputs(batch: int, length: int, *, seed: int = 0, shape: LayerShape = SHAPE) -> AttnInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(batch, *sizes, generator=generator, dtype=torch.float64)

    heads = (shape.num_heads, shape.num_kv_heads)
    q, k = (normal(h, length, shape.head_dim) for h in heads)
    angle = torch.arange(length)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)  # of the first 4 dimensions
    cos, sin = (f(angle).repeat(1, 2)[None] for f in (torch.cos, torch.sin))
    rotated = (apply_rope(x, (cos, sin)) for x in (q, k))
    v, hidden = normal(heads[1], length, shape.head_dim), normal(length, shape.hidden_size)
    return AttnInputs(*rotated, v, 0.4, hidden=hidden, unrotated=(q, k), rope=(cos, sin))


def positions(documents: Documents, length: int = LENGTH) -> Tensor:
    position = torch.full((len(documents), length), -1)
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            position[row, slots] = torch.arange(len(slots))
    return position


def assert_equal(found: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol)


@each_batch
@each_config
def test_the_definition(mixer_config: MixerConfig, rows: list[str]) -> None:
    documents = [ROWS[row] for row in rows]
    mixer, inputs = make_mixer(mixer_config), make_inputs(len(rows), LENGTH)
    y = mixer(inputs, SequenceLayout.from_positions(positions(documents)))
    assert y.abs().amax() > 0.1
    x = Inputs(inputs.q, inputs.k, inputs.v, 0.4, None, inputs.hidden, inputs.unrotated, inputs.rope)
    assert_equal(y, bidirectional_layer(mixer.config, weights_of(mixer), x, documents))


def test_elu1_and_exp_without_a_map_of_ours() -> None:
    inputs = make_inputs(2, 9)
    k, v = (x.repeat_interleave(2, dim=1) for x in (inputs.k, inputs.v))
    for mixer_config, weights in (
        (CONFIGS[2], (torch.nn.functional.elu(inputs.q) + 1) @ (torch.nn.functional.elu(k) + 1).mT),
        (CONFIGS[5], (2 * inputs.q).exp() @ (2 * k).exp().mT),
    ):
        assert_equal(make_mixer(mixer_config)(inputs), weights @ v / weights.sum(-1, keepdim=True))


@each_config
def test_a_packed_row_gives_what_its_documents_give_alone(mixer_config: MixerConfig) -> None:
    """Long and short ones, over many chunks, with padding between and inside."""
    length, bounds = 300, [0, 1, 2, 70, 75, 250, 251, 300]
    inputs, mixer = make_inputs(1, length, seed=4), make_mixer(mixer_config)
    rng = random.Random(0)
    documents = [[slot for slot in range(*b) if rng.random() < 0.9] or [b[0]] for b in pairwise(bounds)]
    y = mixer(inputs, SequenceLayout.from_positions(positions([documents], length)))
    for slots in documents:
        q, k, v, hidden = (x[..., slots, :] for x in (inputs.q, inputs.k, inputs.v, inputs.hidden))
        unrotated = tuple(x[..., slots, :] for x in inputs.unrotated)
        rope = tuple(x[:, slots] for x in inputs.rope)
        alone = mixer(AttnInputs(q, k, v, 0.4, hidden=hidden, unrotated=unrotated, rope=rope))
        assert_equal(y[:, :, slots], alone, atol=1e-8)
    padding = sorted(set(range(length)) - {slot for slots in documents for slot in slots})
    assert padding and (y[:, :, padding] == 0).all()


def test_the_order_of_tokens_does_not_matter() -> None:
    """Within a document, for maps that know no positions."""
    order = torch.tensor([*torch.randperm(20).tolist(), *(20 + torch.randperm(15)).tolist()])
    layout = SequenceLayout.from_positions(torch.cat([torch.arange(20), torch.arange(15)])[None])
    for mixer_config in CONFIGS[2], CONFIGS[6], CONFIGS[12]:
        mixer, x = make_mixer(mixer_config), make_inputs(2, 35, seed=5)
        shuffled = AttnInputs(*(y[:, :, order] for y in (x.q, x.k, x.v)), 0.4, hidden=x.hidden[:, order])
        assert_equal(mixer(shuffled, layout), mixer(x, layout)[:, :, order])


@pytest.mark.parametrize("mixer_config", [CONFIGS[2], CONFIGS[6], CONFIGS[9], CONFIGS[12]], ids=name_of)
@pytest.mark.parametrize("junk", [1e30, torch.nan])
def test_padding_may_hold_anything(mixer_config: MixerConfig, junk: float) -> None:
    mixer = make_mixer(mixer_config)
    for rows in BATCHES[1:]:
        inputs = make_inputs(len(rows), LENGTH)
        layout = SequenceLayout.from_positions(positions([ROWS[row] for row in rows]))
        padding = (layout.key_position < 0)[:, None, :, None]
        assert padding.any()
        q, k, v = (x.masked_fill(padding, junk) for x in (inputs.q, inputs.k, inputs.v))
        hidden = inputs.hidden.masked_fill(padding[:, 0], junk)
        dirty = replace(inputs, q=q, k=k, v=v.requires_grad_(), hidden=hidden)
        clean = replace(inputs, v=inputs.v.clone().requires_grad_())
        y, expected = mixer(dirty, layout), mixer(clean, layout)
        assert_equal(y, expected)
        assert (y.masked_select(padding) == 0).all()
        if junk == 1e30:  # what is not a number stays so times the 0 of a gradient
            grads = (torch.autograd.grad(x.square().sum(), z.v)[0] for x, z in ((y, dirty), (expected, clean)))
            assert_equal(*grads)


def test_layouts_of_several_kinds_agree() -> None:
    """A mask, positions, or nothing; and a row without any token."""
    mixer, inputs = make_mixer(CONFIGS[5]), make_inputs(2, 20)
    position = torch.arange(20)[None]
    for layout in SequenceLayout.from_positions(position), SequenceLayout.from_valid(position.expand(2, -1) >= 0):
        assert_equal(mixer(inputs, layout), mixer(inputs))
    valid = torch.stack([torch.arange(20) % 3 > 0, torch.zeros(20, dtype=torch.bool)])
    y = mixer(inputs, SequenceLayout.from_valid(valid))
    assert_equal(y, mixer(inputs, SequenceLayout.from_positions(SequenceLayout.from_valid(valid).key_position)))
    assert (y[1] == 0).all() and (y[0, :, valid[0]] != 0).all()


def test_exponentials_far_apart_from_document_to_document() -> None:
    """The maximum is the document's own: a document of huge keys leaves the others what they were."""
    mixer, inputs = make_mixer(CONFIGS[5]), make_inputs(1, 20)
    layout = SequenceLayout.from_positions(torch.cat([torch.arange(8), torch.arange(12)])[None])
    huge = torch.cat([inputs.k[:, :, :8] + 1e4, inputs.k[:, :, 8:]], dim=2)
    y = mixer(replace(inputs, k=huge), layout)
    # A common factor of all keys' features cancels.
    assert_equal(y, mixer(inputs, layout))


@pytest.mark.parametrize("mixer_config", [CONFIGS[5], CONFIGS[6], CONFIGS[8], CONFIGS[12]], ids=name_of)
@pytest.mark.parametrize("row", ["full", "interior", "packed", "mixed"])
def test_gradients(mixer_config: MixerConfig, row: str) -> None:
    """Against finite differences, in the inputs and in every parameter."""
    mixer, inputs = make_mixer(mixer_config), make_inputs(1, LENGTH, seed=2)
    layout = SequenceLayout.from_positions(positions([ROWS[row]]))
    weights = {name: x.detach().requires_grad_() for name, x in mixer.named_parameters()}
    unrotated = mixer.wants_unrotated
    tensors = [x.requires_grad_() for x in (*(inputs.unrotated if unrotated else (inputs.q, inputs.k)), inputs.v)]

    def layer(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        x = replace(inputs, v=v, unrotated=(q, k)) if unrotated else replace(inputs, q=q, k=k, v=v)
        return torch.func.functional_call(mixer, dict(zip(weights, values, strict=True)), (x, layout))

    assert torch.autograd.gradcheck(layer, (*tensors, *weights.values()), fast_mode=True)


def test_half_precision_and_autocast_stay_outside() -> None:
    for mixer_config in CONFIGS:
        mixer = make_mixer(mixer_config)
        x = make_inputs(2, LENGTH)
        layout = SequenceLayout.from_positions(positions([ROWS["packed"], ROWS["left"]]))
        half = cast(x, torch.bfloat16)
        mixer = mixer.to(torch.bfloat16)
        y = mixer(half, layout)
        assert y.dtype == torch.bfloat16
        exact = mixer.double()(cast(half, torch.float64), layout)
        torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2e-2 * exact.std().item())
        single, mixer = cast(x, torch.float32), mixer.float()
        expected = mixer(single, layout)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(mixer(single, layout), expected, rtol=0, atol=0)


def cast(x: AttnInputs, dtype: torch.dtype) -> AttnInputs:
    def pair(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return tensors[0].to(dtype), tensors[1].to(dtype)

    q, k, v, hidden = (y.to(dtype) for y in (x.q, x.k, x.v, x.hidden))
    return AttnInputs(q, k, v, x.scaling, hidden=hidden, unrotated=pair(x.unrotated), rope=pair(x.rope))


# One document, one document with padding, and documents of every length between 1 and most of the row.
LENGTHS = {
    "full": lambda length: [length],
    "padded": lambda length: [length - 100],
    "packed": lambda length: [*[1] * (length // 8), 3, length // 4, 70, length // 2],
}


def layout_of(sizes: list[int], length: int) -> SequenceLayout:
    position = torch.cat([*(torch.arange(n) for n in sizes), torch.full((length - sum(sizes),), -1)])
    return SequenceLayout.from_positions(position[None])


@pytest.mark.parametrize("packing", LENGTHS)
def test_memory_is_linear_in_length(packing: str) -> None:
    shape = LayerShape(2, 1, 16, 10, 64)
    mixer = BidirectionalMixer(config(maps.ReglaMap(feature_dim=16), "rms_norm"), shape)

    def call(length: int) -> None:
        inputs = AttnInputs(*(torch.randn(1, h, length, 16) for h in (2, 1, 1)), 0.4)
        mixer(inputs, layout_of(LENGTHS[packing](length), length)).sum().backward()

    with LargestTensor() as largest:
        call(2048)
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 8
    short, long = (peak_bytes(lambda n=n: call(n)) for n in (1024, 4096))
    assert long < 4.3 * short


def test_one_document_takes_two_matrix_products() -> None:
    """A sum and its read, with or without padding; several documents take scans."""
    mixer, inputs = make_mixer(CONFIGS[2]), make_inputs(1, 512)
    padded, packed = (flops(lambda sizes=sizes: mixer(inputs, layout_of(sizes, 512))) for sizes in ([400], [400, 112]))
    assert padded == flops(lambda: mixer(inputs)) == 2 * 512 * 6 * (6 * (2 + 4) + 4)
    assert packed > 2 * padded


@pytest.mark.parametrize(
    "field, part, message",
    [
        ("span", SlidingSpan(), "span: expected `none`.*found `sliding`"),
        ("span", TerracedSpan(), "span: expected `none`.*found `terraced`"),
        ("decay", FixedDecay(), "decay: expected null.*found `fixed`"),
        ("update", DeltaUpdate(), "update: expected `additive`.*found `delta`"),
        ("combine", Mix(), "combine: expected `add` or `shared_denominator`.*found `mix`"),
        ("combine", WindowOnly(), "combine: expected `add` or `shared_denominator`.*found `window_only`"),
        ("combine", SharedDenominator(learned_sink=True), "combine.learned_sink: expected false.*found `true`"),
    ],
)
def test_parts_that_need_an_order_are_refused(field: str, part: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BidirectionalMixer(CONFIGS[2].model_copy(update={field: part}), SHAPE)


def test_what_a_mixer_asks_for() -> None:
    asks = {(x.wants_hidden, x.wants_unrotated) for x in map(make_mixer, CONFIGS)}
    assert asks == {(False, False), (False, True), (True, False)}
    with pytest.raises(ValueError, match=r"AttnInputs\.hidden"):
        make_mixer(CONFIGS[12])(replace(make_inputs(1, 5), hidden=None))


def test_parameters_can_be_set_anew() -> None:
    mixer = BidirectionalMixer(CONFIGS[12], SHAPE)
    for parameter in mixer.parameters():
        parameter.data.fill_(100)
    mixer.reset_parameters()
    assert all(x.abs().amax() < 10 for x in mixer.parameters())
