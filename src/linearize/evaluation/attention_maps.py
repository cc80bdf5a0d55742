"""Attention maps: the weights of a few heads on one document, teacher and student side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.evaluation.chosen_rows import ChosenRows
from linearize.evaluation.intervals import require_shape
from linearize.evaluation.weights import WeightBlock
from linearize.hf.attention import linearized_layers

CELLS = 64  # of a map, on either side, at most
MAP_WINDOWS = 4  # a map shows this many times what the widest window sees: how much of it lies beyond is the question
DECIMALS = 4


@dataclass(frozen=True)
class AttentionMap:
    """Weights of one head, teacher and student: [query cell][key cell], `tokens` the text of each cell.

    A cell is `cell_tokens` neighbouring tokens: the mean over its queries of the weight on its keys together. `rank`:
    "best", "median" or "worst" of all heads by the error of their output.
    """

    layer: int
    head: int
    rank: str
    cell_tokens: int
    tokens: list[str]
    teacher: list[list[float]]
    student: list[list[float]]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens: expected one or more, found none")
        require_shape("teacher", self.teacher, len(self.tokens), len(self.tokens))
        require_shape("student", self.student, len(self.tokens), len(self.tokens))


class Maps:
    """Attention maps of every head on the start of the rows's longest document; of an encoder, of its first row.

    Of a layer that is gone through several times, they are the means over these passes.
    """

    def __init__(self, rows: ChosenRows, student: PreTrainedModel, length: int) -> None:
        """`length`: slots of a row of the rows."""
        self.row, self.start, self.ids = _longest_document(rows, length)
        parts = (part for layer in linearized_layers(student).values() for _, part in layer.mixer.parts())
        reach = max((part.config.span.max_lag for part in parts if part.config is not None), default=0)
        self.ids = self.ids[: max(CELLS, MAP_WINDOWS * reach)]
        self.size = -(-len(self.ids) // CELLS)  # tokens of a cell
        self.sums: dict[int, Float[Tensor, "2 H cells cells"]] = {}
        self.passes: dict[int, int] = {}

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
            first = block.queries.start <= self.start
            self.passes[layer] = self.passes.get(layer, 0) + int(first)

    def _cells(self, slots: slice) -> Float[Tensor, "slots cells"]:
        """1 where a slot belongs to a cell."""
        place = torch.arange(slots.start, slots.stop) - self.start
        inside = ((place >= 0) & (place < len(self.ids)))[:, None]
        cells = torch.arange(-(-len(self.ids) // self.size))
        return ((place.div(self.size, rounding_mode="floor")[:, None] == cells) & inside).float()

    def chosen(self, errors: dict[tuple[int, int], float], tokenizer: Tokenizer | None) -> list[AttentionMap]:
        """The best, the median and the worst head by their error, (layer, head) -> share of the mean square."""
        ordered = sorted(errors, key=lambda at: errors[at])
        named = {"best": ordered[0], "median": ordered[len(ordered) // 2], "worst": ordered[-1]}
        pieces, found = self.ids.split(self.size), []
        tokens = [str(tokenizer.decode(x)) if tokenizer else " ".join(map(str, x.tolist())) for x in pieces]
        per_query = torch.tensor([len(piece) for piece in pieces])[:, None]
        for rank, (layer, head) in named.items():
            if (layer, head) in [(x.layer, x.head) for x in found]:
                continue  # fewer than three heads
            maps = [_rounded(x / per_query / self.passes[layer]) for x in self.sums[layer][:, head]]
            found.append(AttentionMap(layer, head, rank, self.size, tokens, *maps))
        return found


def _longest_document(rows: ChosenRows, length: int) -> tuple[int, int, Int[Tensor, " L"]]:
    """Its row, the slot of its first token, and its tokens; of an image, which has none, the numbers of its slots.

    Where a mask tells padding, each row is a document, whose slots count its tokens alone: the first row's.
    """
    if "input_ids" not in rows.inputs:
        return 0, 0, torch.arange(length)
    mask, positions = rows.inputs.get("attention_mask"), rows.inputs.get("position_ids")
    if mask is not None or positions is None:
        ids = rows.input_ids[0]
        return 0, 0, ids if mask is None else ids[mask[0].bool()]
    begins = positions == 0
    begins[:, 0] = True
    # Documents of all rows, one behind the other: none goes on in the next row.
    first = begins.flatten().nonzero().squeeze(1)
    lengths = torch.diff(first, append=torch.tensor([begins.numel()]))
    longest = int(lengths.argmax())
    row, start = divmod(int(first[longest]), begins.shape[1])
    return row, start, rows.input_ids[row, start : start + int(lengths[longest])]


def _rounded(x: Float[Tensor, "cells cells"]) -> list[list[float]]:
    return [[round(value, DECIMALS) for value in line] for line in x.tolist()]
