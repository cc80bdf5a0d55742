"""Whether a student uses its linear part: how much of its attention goes there, and what it loses without it.

Window hybrids can learn to ignore their linear part and still score well (arXiv 2510.05901), so attention mass alone
proves little: what counts is the loss without either part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer_parts import Add
from linearize.configs.spans import NoSpan
from linearize.data.rows import PackedRows
from linearize.evaluation.chosen_rows import drawn_rows
from linearize.evaluation.controls import without_linear_part
from linearize.evaluation.intervals import Interval, require_shape
from linearize.evaluation.perplexity import paired_difference, token_losses
from linearize.evaluation.weights import Visit, visit_layers, weight_blocks
from linearize.hf.attention import linearized_layers, replaced_mixers
from linearize.mixers.combine import AddCombine, MixCombine
from linearize.mixers.headwise import HeadwiseMixer


@dataclass(frozen=True)
class ByDistance:
    """Per head and distance bin: `mass` is the share of all weight that lies at that distance.

    `linear` is the share of it that the linear part carries; 0 where there is no weight.
    """

    mass: list[list[float]]
    linear: list[list[float]]


@dataclass(frozen=True)
class LayerUsage:
    """One layer, per query head: shares of each query's absolute weights, means over the queries that have any."""

    layer: int
    linear_share: list[float]
    by_distance: ByDistance

    def __post_init__(self) -> None:
        if not self.linear_share:
            raise ValueError("linear_share: expected a number per head, found none")


@dataclass(frozen=True)
class PathUsage:
    """Attention mass by part, and the loss of the student without either part minus its own, nats per token.

    Attributes:
        edges: of the distance bins, in tokens from key to query; bin i is edges[i] <= distance < edges[i + 1].
        without_linear: each layer attends within its window only, or where it has none, in one of 64 tokens.
        without_window: the linear part reads all keys (`without_window`); None where no layer has both parts.
        documents: how many the losses rest on; None if that was not counted.
    """

    edges: list[int]
    layers: list[LayerUsage]
    without_linear: Interval
    without_window: Interval | None
    documents: int | None

    def __post_init__(self) -> None:
        if not self.layers or len(self.edges) < 2:
            raise ValueError("expected one or more layers and bins, found none")
        for layer in self.layers:
            for name, shares in (("mass", layer.by_distance.mass), ("linear", layer.by_distance.linear)):
                require_shape(name, shares, len(layer.linear_share), len(self.edges) - 1)


def measure_path_usage(
    student: PreTrainedModel, rows: PackedRows, *, max_tokens: int, batch_size: int, seed: int, samples: int = 1000
) -> PathUsage:
    """Attention mass on whole rows of at most `max_tokens` together; losses, paired, on all of `rows`.

    Args:
        batch_size: rows per forward pass.
        seed: draws the rows and the bootstrap's `samples`.

    Raises:
        UserError: a model without converted layers, an encoder, or too few documents with predicted tokens.
    """
    if not all(layer.mixer.causal for layer in linearized_layers(student).values()):
        raise UserError(f"model: expected a decoder, found {type(student).__name__}, whose mixers have no window")
    sample = drawn_rows(rows, max_tokens, seed)
    edges = distance_edges(sample.input_ids.shape[1])
    layers: dict[int, _Masses] = {}

    def visit(at: Visit) -> None:
        layers.setdefault(at.index, _Masses(edges)).add(at)

    visit_layers(student, sample, visit, batch_size=batch_size, title="attention by part")
    usage = [masses.finish(index) for index, masses in sorted(layers.items())]

    options = {"samples": samples, "seed": seed}
    own = token_losses(student, rows, batch_size=batch_size, title="student")
    with without_linear_part(student):
        ablated = token_losses(student, rows, batch_size=batch_size, title="without linear part")
    without_linear, windowless = paired_difference(ablated, own, **options), None
    if any(_has_both(part) for layer in linearized_layers(student).values() for _, part in layer.mixer.parts()):
        with without_window(student):
            ablated = token_losses(student, rows, batch_size=batch_size, title="without window")
        windowless = paired_difference(ablated, own, **options)
    return PathUsage(edges, usage, without_linear, windowless, own.documents)


def distance_edges(length: int) -> list[int]:
    """0, 1, 2, 4, 8 ... and `length`, which no distance reaches."""
    powers = [2**i for i in range(length.bit_length()) if 2**i < length]
    return [0, *powers, length]


class _Masses:
    """Sums over queries of one layer's shares of attention mass."""

    def __init__(self, edges: list[int]) -> None:
        self.inner = torch.tensor(edges[1:-1])
        self.queries: Int[Tensor, "H 1"] | int = 0
        self.mass: Float[Tensor, "H bins"] | float = 0.0
        self.linear: Float[Tensor, "H bins"] | float = 0.0

    def add(self, at: Visit) -> None:
        for block in weight_blocks(at):
            share = block.student.abs().double()
            total = share.sum(-1, keepdim=True)
            share = share / total.clamp_min(torch.finfo(share.dtype).tiny)
            bins = torch.bucketize(block.distance.clamp_min(0), self.inner.to(share.device), right=True)
            which = torch.nn.functional.one_hot(bins.flatten(), len(self.inner) + 1).to(share.dtype)
            self.mass = self.mass + (share.flatten(1) @ which).cpu()
            self.linear = self.linear + ((share * block.linear).flatten(1) @ which).cpu()
            self.queries = self.queries + (total > 0).sum(1).cpu()

    def finish(self, index: int) -> LayerUsage:
        assert isinstance(self.mass, Tensor) and isinstance(self.linear, Tensor) and isinstance(self.queries, Tensor)
        if not self.mass.isfinite().all():
            raise FloatingPointError(f"attention by part: weights of layer {index} are not finite numbers")
        queries, of_it = self.queries.clamp_min(1), torch.where(self.mass > 0, self.linear / self.mass, 0)
        shares = (self.linear / queries).sum(1).tolist()
        return LayerUsage(index, shares, ByDistance((self.mass / queries).tolist(), of_it.tolist()))


# --- without the window -----------------------------------------------------------------------------------------------


def _has_both(mixer: Any) -> bool:
    return mixer.feature_map is not None and mixer.span.max_lag > 0


@contextmanager
def without_window(student: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within, the linear part of layers that have both parts reads every key, those of window and cache too.

    All weights stay as they are. A shared denominator then sums linear weights alone; of a mix or a sum of both parts
    the normalised linear part is left. Layers with one part only stay as they are.
    """

    def ablated(mixer: Any) -> Any:
        if isinstance(mixer, HeadwiseMixer):
            mixer = copy.deepcopy(mixer)
            mixer.groups = nn.ModuleList(ablated(part) for _, part in mixer.parts())
            return mixer
        if not _has_both(mixer):
            return mixer
        mixer = copy.deepcopy(mixer)
        mixer.config = mixer.config.model_copy(update={"span": NoSpan(), "cache": None})
        if isinstance(mixer.combine, MixCombine):
            mixer.config = mixer.config.model_copy(update={"combine": Add()})
            mixer.combine = AddCombine(Add(), mixer.shape)
        return mixer

    with replaced_mixers(student, ablated):
        yield student
