"""Compare the attention weights of each converted head with softmax's, for the tables of the papers.

Wherever weights are compared, the student's are its rows over |row sum| (SUPRA App. A), which changes nothing where
they sum to 1 already. Measures that need a distribution are None for mixers whose weights can be negative. All are
means over queries with equal weights, unless said otherwise.

Axes as in `attention_weights`: H heads, C queries, K keys.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from linearize.data.rows import Rows
from linearize.evaluation.fidelity import Visit, drawn_rows, visit_layers
from linearize.evaluation.metrics import rank_correlation
from linearize.mixers.inputs import AttnInputs

sys.path.insert(0, str(Path(__file__).parent))

from attention_weights import WeightBlock, never_negative, weight_blocks

LEAST_WEIGHT = (
    1e-12  # in logarithms: a key that the student cannot see at all costs 27.6 nats times the teacher's weight
)
MATRIX_EVERY = 4  # cosine and singular values: of every fourth block of queries, counted from the end of a row
RANKED_EVERY = 16  # monotonicity: of every sixteenth query, counted from the end of a block
NOTHING = 60.0  # e to minus this, times the greatest weight, is no weight: in single precision softmax soon gives 0
BINS = 20  # of gate histograms, from 0 to 1


@dataclass(frozen=True)
class Pair:
    """One number per head of teacher and student."""

    teacher: list[float]
    student: list[float] | None


@dataclass(frozen=True)
class LayerMeasures:
    """One layer; every list has one number per query head.

    Attributes:
        output_mse: mean of (student - teacher)^2 over tokens and head dimension, before the output projection.
        output_relative: the same over the mean square of the teacher's output.
        weight_kl: KL(teacher || student), nats per query; the student's weights at least 1e-12.
        cosine: <A, B> / (|A| |B|) of the teacher's and the student's matrices A and B (SUPRA App. A). A matrix is a
            block of at most 64 queries with all keys that they see; mean over every fourth block of each row.
        singular_values: |s(A) - s(B)| / |s(A)|, s the singular values in descending order; of the same matrices.
        entropy: - sum_j w_j log w_j, nats: how spread out the weights are.
        monotonicity: Spearman's rank correlation of a query's weights with its q.k (Hedgehog sec. 3: 1 where more q.k
            always means more weight), over the keys it sees; 0 where all weights are equal, and keys whose softmax
            weight is below e^-60 of the greatest have one rank; mean over every sixteenth query that sees two keys.
        gates: counts, in bins of equal width from 0 to 1, of the factors by which the linear state is multiplied at
            each step, per head of the state; None where nothing decays.
    """

    layer: int
    output_mse: list[float]
    output_relative: list[float]
    weight_kl: list[float] | None
    cosine: list[float]
    singular_values: list[float]
    entropy: Pair
    monotonicity: Pair
    gates: list[list[int]] | None


def measure_weights(
    student: PreTrainedModel, rows: Rows, *, max_tokens: int, batch_size: int, seed: int
) -> list[LayerMeasures]:
    """Measure every converted layer of `student` on whole rows of at most `max_tokens` together.

    Args:
        batch_size: rows per forward pass.
        seed: draws the rows.

    Raises:
        UserError: a model without converted layers.
        FloatingPointError: a mixer's output is not a finite number.
    """
    layers: dict[int, _LayerSums] = {}

    def visit(layer: Visit) -> None:
        sums = layers.setdefault(layer.index, _LayerSums(layer.module.mixer))
        sums.add_outputs(layer)
        for block in weight_blocks(layer):
            sums.add_weights(block)

    visit_layers(student, drawn_rows(rows, max_tokens, seed), visit, batch_size=batch_size, title="attention weights")
    return [sums.finish(index) for index, sums in sorted(layers.items())]


class _LayerSums:
    """What one layer's measures are made of, summed over batches and blocks."""

    def __init__(self, mixer: Any) -> None:
        self.mixer, self.distribution = mixer, all(never_negative(part.config) for _, part in mixer.parts())
        self.sums: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.gates: Tensor | None = None

    def add(self, name: str, x: Float[Tensor, "H N"]) -> None:
        """One number per head and query."""
        self.sums[name] = self.sums[name] + x.double().sum(1).cpu()
        self.counts[name] += x.shape[1]

    def add_outputs(self, layer: Visit) -> None:
        y, target = layer.outputs()
        self.add("output_mse", (y - target).square().mean(-1))
        self.add("output_square", target.square().mean(-1))
        counts = gate_counts(self.mixer, layer.inputs)
        if counts is not None:
            self.gates = counts if self.gates is None else self.gates + counts

    def add_weights(self, block: WeightBlock) -> None:
        teacher, student = block.teacher, block.divided()
        self.add("teacher_entropy", entropy(teacher))
        if self.distribution:
            cross = -(teacher * student.clamp_min(LEAST_WEIGHT).log()).sum(-1)
            self.add("weight_kl", cross - entropy(teacher))
            self.add("student_entropy", entropy(student))
        if block.following % MATRIX_EVERY == 0:
            self.add("cosine", cosine(teacher, student)[:, None])
            self.add("singular_values", singular_value_distance(teacher, student)[:, None])
        ranked = torch.arange(teacher.shape[1] - 1, -1, -RANKED_EVERY, device=teacher.device)
        scores, seen = block.scores[:, ranked], block.seen[ranked]
        enough = seen.sum(-1) > 1
        for name, weights in (("teacher_monotonicity", teacher), ("student_monotonicity", student)):
            self.add(name, monotonicity(scores, weights[:, ranked], seen)[:, enough])

    def mean(self, name: str) -> list[float]:
        """Per head; 0 where there was nothing to measure."""
        return (self.sums[name] / max(self.counts[name], 1)).tolist()

    def pair(self, name: str, both: bool) -> Pair:
        return Pair(self.mean(f"teacher_{name}"), self.mean(f"student_{name}") if both else None)

    def finish(self, index: int) -> LayerMeasures:
        relative = self.sums["output_mse"] / self.sums["output_square"].clamp_min(torch.finfo(torch.float64).tiny)
        return LayerMeasures(
            layer=index,
            output_mse=self.mean("output_mse"),
            output_relative=relative.tolist(),
            weight_kl=self.mean("weight_kl") if self.distribution else None,
            cosine=self.mean("cosine"),
            singular_values=self.mean("singular_values"),
            entropy=self.pair("entropy", self.distribution),
            monotonicity=self.pair("monotonicity", True),
            gates=None if self.gates is None else self.gates.tolist(),
        )


# --- measures of weights ----------------------------------------------------------------------------------------------


def entropy(weights: Float[Tensor, "H C K"]) -> Float[Tensor, "H C"]:
    """- sum_j w_j log w_j, nats."""
    return torch.special.entr(weights).sum(-1)


def cosine(a: Float[Tensor, "H C K"], b: Float[Tensor, "H C K"]) -> Float[Tensor, " H"]:
    """<A, B> / (|A| |B|) of each head's matrices, each as one long vector; 0 where one is zero."""
    return torch.cosine_similarity(a.double().flatten(1), b.double().flatten(1), dim=1)


def singular_value_distance(a: Float[Tensor, "H C K"], b: Float[Tensor, "H C K"]) -> Float[Tensor, " H"]:
    """|s(A) - s(B)| / |s(A)|, s the singular values in descending order, | | the Euclidean norm."""
    # By way of A A^T, which is small; a singular value below 1e-8 of the largest is lost, and does not count here.
    s, t = (torch.linalg.eigvalsh(x.double() @ x.double().mT).clamp_min(0).sqrt() for x in (a, b))
    return (s - t).norm(dim=-1) / s.norm(dim=-1)


def monotonicity(
    scores: Float[Tensor, "H C K"], weights: Float[Tensor, "H C K"], seen: Bool[Tensor, "C K"]
) -> Float[Tensor, "H C"]:
    """Rank correlation of weights with scores (logits), both without differences that single precision cannot hold."""
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = scores.maximum(scores.amax(-1, keepdim=True) - NOTHING)
    least = weights.abs().amax(-1, keepdim=True) * math.exp(-NOTHING)
    return rank_correlation(scores, weights.where(weights.abs() >= least, 0), seen)


# --- gates -----------------------------------------------------------------------------------------------------------


def _counts(x: Tensor) -> Int[Tensor, " bins"]:
    return torch.histc(x.float(), BINS, 0, 1).long().cpu()


def gate_counts(mixer: Any, inputs: AttnInputs) -> Int[Tensor, "Hs bins"] | None:
    """How often the factors of the state, on either axis, lie in each bin; None where nothing decays."""
    counts = []
    for kv_heads, part in mixer.parts():
        if part.gate is None:
            continue
        own = inputs.heads(kv_heads).accumulated()
        gates = part.gate(own)
        steps = [x.expand(len(own.v), -1, -1, -1) for x in (gates.log_decay_k, gates.log_decay_v) if x is not None]
        counts += [torch.stack([_counts(x[:, h].exp()) for x in steps]).sum(0) for h in range(part.state_heads)]
    return torch.stack(counts) if counts else None
