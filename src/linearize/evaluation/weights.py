"""Attention weights as matrices: the teacher's beside the student's, a block of queries of one row at a time.

What is compared. The student's model runs with softmax attention in every converted layer, the softmax outputs feeding
the next layer, as in attention transfer; so no layer is judged by what the layers before it lost. In each layer the
mixer is compared with softmax on the same q, k and v: those of the model that is measured. After a fine-tuning stage
these are the fine-tuned projections', not the original teacher's; before it (or where only mixers were trained) they
are the teacher's own, bit for bit. "Teacher" means that softmax, "student" the mixer.

A mixer's weights are read off the mixer without knowing its parts: its output is linear in the values, so values that
are 1 for one key and 0 for the others give the weight of that key. One call does that for D keys in each of P rows of
a batch, and the mixer's own carried state takes these rows from one block of queries to the next. Nothing larger than
H x C x K exists, for C = 64 queries and the K slots back to the start of the first query's document.

Axes: B rows, H query heads, G KV heads, T slots of a row, C queries, K keys, D head dimension, N rows, L tokens each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.errors import UserError
from linearize.evaluation.perplexity import Rows, inference
from linearize.hf.attention import linearized_layers, observed, sliding_window, softmax_output
from linearize.mixers import AttnInputs, LinearMixer
from linearize.mixers.combine import NoNorm, SumNorm
from linearize.ops import Layout
from linearize.parts import DeltaUpdate, MixerConfig, NoNormalizer, RfaMap

QUERIES = 64  # of a block
CELLS = 64  # of a map, on either side, at most
MAP_WINDOWS = 4  # a map shows this many times what the widest window sees: how much of it lies beyond is the question
DECIMALS = 4
CANCELLED = 1e-6


@dataclass(frozen=True)
class Sample:
    """The rows that weights are measured on, on the CPU."""

    input_ids: Int[Tensor, "N L"]
    position_ids: Int[Tensor, "N L"]

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


@dataclass(frozen=True)
class AttentionMap:
    """Weights of one head, teacher and student: [query cell][key cell], `tokens` the text of each cell.

    A cell is one token, or some neighbouring ones: the mean over its queries of the weight on its keys together.
    """

    layer: int
    head: int
    why: str
    tokens: list[str]
    teacher: list[list[float]]
    student: list[list[float]]


@dataclass(frozen=True)
class Visit:
    """One converted layer at work on some rows.

    Attributes:
        index: of the layer in the model.
        module: its attention module, with `.mixer`.
        target: softmax attention's output [B, H, T, D] before the output projection.
        first_row: which row of the sample is the first of `inputs`.
    """

    index: int
    module: Any
    inputs: AttnInputs
    layout: Layout | None
    target: Tensor
    first_row: int


@dataclass(frozen=True)
class WeightBlock:
    """Weights of C neighbouring queries of one row on all keys that one of them sees; fp32, or fp64 for fp64 models.

    Attributes:
        row: in the sample.
        queries, keys: slots of that row; the keys end with the last query.
        following: how many blocks of the row follow this one.
        scores: the logits of the teacher's softmax, q.k scaled and soft-capped, of unseen keys too.
        teacher: softmax weights; each row sums to 1.
        student: what the mixer multiplies each value by. A normaliser that is not linear in the values (group and RMS
            norm) counts as the number by which it makes that token's output longer or shorter. Where a decay weighs
            each value differently, the weight of the key in slot t is that of its value t mod D.
        seen: the key stands in the query's document, not behind it. All weights are 0 elsewhere.
        linear: the mixer reads the key through its linear part (the window and the linear part share no key).
        distance: tokens from key to query; 0 is the query's own.
    """

    row: int
    queries: slice
    keys: slice
    following: int
    scores: Float[Tensor, "H C K"]
    teacher: Float[Tensor, "H C K"]
    student: Float[Tensor, "H C K"]
    seen: Bool[Tensor, "C K"]
    linear: Bool[Tensor, "C K"]
    distance: Int[Tensor, "C K"]

    def divided(self) -> Float[Tensor, "H C K"]:
        """The student's weights, each row over the absolute value of its sum (SUPRA App. A).

        0 where that sum is none: below 1e-6 of what the weights come to without their signs, so mere rounding.
        """
        total, mass = self.student.sum(-1, keepdim=True).abs(), self.student.abs().sum(-1, keepdim=True)
        return torch.where(total > CANCELLED * mass, self.student / total, 0)


def never_negative(config: MixerConfig) -> bool:
    """Whether no weight of such a mixer can be negative, so that a row over its sum is a distribution."""
    if config.feature_map is None:
        return True
    signed = config.feature_map.signed or isinstance(config.feature_map, RfaMap)
    return not signed and not isinstance(config.update, DeltaUpdate)


def sample_rows(rows: Rows, max_tokens: int, seed: int) -> Sample:
    """As many of the rows, drawn by `seed`, as hold at most `max_tokens`; of one row, if it is longer, the start."""
    total, length = rows.input_ids.shape
    count = min(total, max(1, max_tokens // length))
    index = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    length = min(length, max_tokens)
    return Sample(rows.input_ids.cpu()[index, :length], rows.position_ids.cpu()[index, :length])


def visit_layers(
    student: PreTrainedModel, sample: Sample, visit: Callable[[Visit], None], *, batch_size: int, title: str
) -> None:
    """Call `visit` for each converted layer, in order, on each `batch_size` rows; softmax outputs feed what follows.

    Raises:
        UserError: a model without converted layers.
    """
    if not linearized_layers(student):
        raise UserError(f"model: expected a linearized one, found {type(student).__name__}; convert it first")
    console = Console(stderr=True)
    with inference(student) as device:
        starts = range(0, len(sample.input_ids), batch_size)
        for first in track(starts, title, console=console, transient=True, disable=not console.is_terminal):

            def observe(module: Any, inputs: AttnInputs, layout: Layout | None, first: int = first) -> Tensor:
                target = softmax_output(module, inputs, layout)
                visit(Visit(module.layer_idx, module, inputs, layout, target, first))
                return target

            part = slice(first, first + batch_size)
            input_ids, position_ids = sample.input_ids[part].to(device), sample.position_ids[part].to(device)
            with observed(student, observe):
                student.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)


def weight_blocks(visit: Visit) -> Iterator[WeightBlock]:
    """All queries of the layer's rows, row by row, in order."""
    mixer, inputs = visit.module.mixer, visit.inputs.accumulated()
    batch, _, length, _ = inputs.q.shape
    layout = Layout.full(length, inputs.q.device) if visit.layout is None else visit.layout
    stretch = _stretch(mixer, inputs, layout)
    position, document = (x.expand(batch, -1).cpu() for x in (layout.query_position, layout.query_document))
    for row in range(batch):
        for keys, queries, student in _probed(mixer, inputs, row, position[row], document[row]):
            at = position[row, queries, None].to(student.device)
            key_at = position[row, keys].to(student.device)
            distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(keys.start, keys.stop)
            seen = (document[row, queries, None] == document[row, keys]) & (distance >= 0)
            seen, distance = seen.to(student.device), distance.to(student.device)
            linear = torch.zeros_like(seen)
            if mixer.feature_map is not None:
                linear = seen & (key_at < mixer.span.lo(at)) & (key_at >= mixer.span.sinks)
            if stretch is not None:
                student = student * torch.where(linear, stretch[row, :, queries, None], 1)
            reach = sliding_window(visit.module)
            visible = seen if reach is None else seen & (distance < reach)
            scores, teacher = _softmax_weights(inputs, row, queries, keys, visible)
            following = (length - 1) // QUERIES - queries.start // QUERIES
            yield WeightBlock(
                visit.first_row + row, queries, keys, following, scores, teacher, student, seen, linear, distance
            )


def _softmax_weights(
    inputs: AttnInputs, row: int, queries: slice, keys: slice, visible: Bool[Tensor, "C K"]
) -> tuple[Float[Tensor, "H C K"], Float[Tensor, "H C K"]]:
    """Logits, and their softmax over the visible keys."""
    q, k = inputs.q[row, :, queries], inputs.k[row, :, keys]
    scores = (q.unflatten(0, (len(k), -1)) @ k[:, None].mT).flatten(0, 1) * inputs.scaling
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    return scores, scores.masked_fill(~visible, -torch.inf).softmax(-1)


def _stretch(mixer: LinearMixer, inputs: AttnInputs, layout: Layout) -> Float[Tensor, "B H T"] | None:
    """How much longer the normaliser makes the linear part's output of each token; None where it is linear in v."""
    if isinstance(mixer.normalizer, SumNorm | NoNorm):
        return None
    linear = mixer.partials(inputs, layout)[1]
    assert linear is not None and mixer.feature_map is not None
    before = linear.num.double().norm(dim=-1)
    after = mixer.normalizer(linear, inputs, mixer.feature_map.min_denominator).double().norm(dim=-1)
    return (after / before.clamp_min(torch.finfo(before.dtype).tiny)).to(inputs.v.dtype)


def _probed(
    mixer: LinearMixer, inputs: AttnInputs, row: int, position: Int[Tensor, " T"], document: Int[Tensor, " T"]
) -> Iterator[tuple[slice, slice, Float[Tensor, "H C K"]]]:
    """(keys, queries, weights) of each block of one row.

    Probe i has the values of keys i D .. i D + D - 1. Those whose keys no query sees any more are dropped, and one more
    row of the batch, without any values yet, stands for all to come.
    """
    if not isinstance(mixer.normalizer, SumNorm | NoNorm):
        mixer = copy.deepcopy(mixer)
        mixer.normalizer = NoNorm(NoNormalizer(), mixer.shape)
    length, width, device = len(position), inputs.v.shape[-1], inputs.v.device
    state, before = None, range(0)
    for start in range(0, length, QUERIES):
        queries = slice(start, min(start + QUERIES, length))
        probes = range((start - int(position[start])) // width, (queries.stop - 1) // width + 1)
        if state is not None:
            index = [i - before.start if i in before else len(before) for i in probes]
            state = state.select(torch.tensor([*index, len(before)], device=device))
        values = _one_hot([*probes, length], queries, width).to(inputs.v)
        part = _row(inputs, row, queries, values[:, None].expand(-1, inputs.v.shape[1], -1, -1))
        y, state = mixer.step(part, state, _own_layout(position, document, queries, device))
        before, keys = probes, slice(probes.start * width, queries.stop)
        yield keys, queries, y[:-1].permute(1, 2, 0, 3).flatten(2)[..., : keys.stop - keys.start]


def _one_hot(probes: list[int], slots: slice, width: int) -> Float[Tensor, "P C D"]:
    """Values of the slots in each probe: 1 in one place for the slots i D .. i D + D - 1 of probe i, else 0."""
    place = torch.arange(slots.start, slots.stop) - width * torch.tensor(probes)[:, None]
    return (place[..., None] == torch.arange(width)).float()


def _row(inputs: AttnInputs, row: int, slots: slice, values: Float[Tensor, "P G C D"]) -> AttnInputs:
    """The tokens in some slots of one row, once for each of P sets of values."""
    part = inputs.tokens(slots.start, slots.stop)

    def one(x: Tensor) -> Tensor:
        x = x if len(x) == 1 else x[row : row + 1]
        return x.expand(len(values), *x.shape[1:])

    def pair(x: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        return None if x is None else (one(x[0]), one(x[1]))

    hidden = None if part.hidden is None else one(part.hidden)
    both = {"unrotated": pair(part.unrotated), "rope": pair(part.rope)}
    return replace(part, q=one(part.q), k=one(part.k), v=values, hidden=hidden, **both)


def _own_layout(
    position: Int[Tensor, " T"], document: Int[Tensor, " T"], slots: slice, device: torch.device
) -> Layout | None:
    """Of a piece of a row alone: document 0 is the one that went before; None where all of it goes on in that."""
    at, own = position[slots], document[slots] - document[max(slots.start - 1, 0)]
    if not own.any():
        return None
    at = torch.where(own == 0, at - at[0], at)
    return Layout(at[None].to(device), own[None].to(device), len(at))


class Maps:
    """Attention maps of every head on the start of the sample's longest document."""

    def __init__(self, sample: Sample, student: PreTrainedModel) -> None:
        begins = sample.position_ids == 0
        begins[:, 0] = True
        # Documents of all rows, one behind the other: none goes on in the next row.
        first = begins.flatten().nonzero().squeeze(1)
        lengths = torch.diff(first, append=torch.tensor([begins.numel()]))
        longest = int(lengths.argmax())
        self.row, self.start = divmod(int(first[longest]), begins.shape[1])
        reach = max((layer.mixer.span.max_lag for layer in linearized_layers(student).values()), default=0)
        length = min(int(lengths[longest]), max(CELLS, MAP_WINDOWS * reach))
        self.size = -(-length // CELLS)  # tokens of a cell
        self.ids = sample.input_ids[self.row, self.start : self.start + length]
        self.sums: dict[int, Float[Tensor, "2 H cells cells"]] = {}

    def add(self, layer: int, block: WeightBlock) -> None:
        """Take in what the block has of the document."""
        if (
            block.row == self.row
            and block.queries.start < self.start + len(self.ids)
            and self.start < block.queries.stop
        ):
            both = torch.stack([block.teacher, block.divided()])
            queries, keys = (self._cells(slots).to(both) for slots in (block.queries, block.keys))
            pooled = (queries.mT @ both @ keys).cpu()
            self.sums[layer] = self.sums[layer] + pooled if layer in self.sums else pooled

    def _cells(self, slots: slice) -> Float[Tensor, "slots cells"]:
        """1 where a slot belongs to a cell."""
        place = torch.arange(slots.start, slots.stop) - self.start
        inside = ((place >= 0) & (place < len(self.ids)))[:, None]
        cells = torch.arange(-(-len(self.ids) // self.size))
        return ((place.div(self.size, rounding_mode="floor")[:, None] == cells) & inside).float()

    def chosen(self, errors: dict[tuple[int, int], float], tokenizer: Tokenizer | None) -> list[AttentionMap]:
        """Of the best, the median and the worst head by their error, (layer, head) -> share of the mean square."""
        ordered = sorted(errors, key=lambda at: errors[at])
        named = {"best": ordered[0], "median": ordered[len(ordered) // 2], "worst": ordered[-1]}
        pieces, found = self.ids.split(self.size), []
        tokens = [str(tokenizer.decode(x)) if tokenizer else " ".join(map(str, x.tolist())) for x in pieces]
        per_query = torch.tensor([len(piece) for piece in pieces])[:, None]
        for name, (layer, head) in named.items():
            if (layer, head) in [(x.layer, x.head) for x in found]:
                continue  # fewer than three heads
            why = f"{name} of {len(errors)} heads: output off by {errors[layer, head]:.1%} of the mean square"
            why += f"; cells of {self.size} tokens" if self.size > 1 else ""
            maps = [_rounded(x / per_query) for x in self.sums[layer][:, head]]
            found.append(AttentionMap(layer, head, why, tokens, *maps))
        return found


def _rounded(x: Float[Tensor, "cells cells"]) -> list[list[float]]:
    return [[round(value, DECIMALS) for value in line] for line in x.tolist()]
