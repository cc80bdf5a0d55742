"""How close each head's mixer comes to the softmax attention that it replaced: outputs, weights, and their character.

`weights` says what is compared. Wherever weights are compared, the student's are its rows over |row sum| (SUPRA
App. A), which changes nothing where they sum to 1 already. Measures that need a distribution are None for mixers whose
weights can be negative. All are means over queries, all queries counting alike, unless said otherwise.

Axes as in `weights`: H heads, C queries, K keys.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.data.rows import Rows
from linearize.evaluation.attention_maps import AttentionMap, Maps
from linearize.evaluation.chosen_rows import drawn_rows
from linearize.evaluation.intervals import require_shape
from linearize.evaluation.metrics import rank_correlation
from linearize.evaluation.weights import Visit, WeightBlock, never_negative, visit_layers, weight_blocks
from linearize.mixers.combine import MixCombine, SharedDenominatorCombine
from linearize.mixers.inputs import AttnInputs

LEAST_WEIGHT = (
    1e-12  # in logarithms: a key that the student cannot see at all costs 27.6 nats times the teacher's weight
)
MATRIX_EVERY = 4  # cosine and singular values: of every fourth block of queries, counted from the end of a row
RANKED_EVERY = 16  # monotonicity: of every sixteenth query, counted from the end of a block
NOTHING = 60.0  # e to minus this, times the greatest weight, is no weight: in single precision softmax soon gives 0
BINS = 20  # of gate histograms, from 0 to 1
STANDS_OUT = 5.0  # times the median head's relative error ...
LEAST_ERROR = 0.02  # ... and at least this much of the teacher's mean square
MOST_WORST = 10


@dataclass(frozen=True)
class Pair:
    """One number per head of teacher and student."""

    teacher: list[float]
    student: list[float] | None

    def __post_init__(self) -> None:
        if self.student is not None:
            require_shape("student", self.student, len(self.teacher))


@dataclass(frozen=True)
class Histogram:
    """How many numbers lie between neighbouring edges; `counts` of gates: one list per head of the state."""

    edges: list[float]
    counts: list[int] | list[list[int]]

    def __post_init__(self) -> None:
        if self.counts and isinstance(self.counts[0], list):
            require_shape("counts", self.counts, len(self.counts), len(self.edges) - 1)
        else:
            require_shape("counts", self.counts, len(self.edges) - 1)


@dataclass(frozen=True)
class LayerFidelity:
    """One layer; every list has one number per query head.

    Attributes:
        output_mse: mean of (student - teacher)^2 over tokens and head dimension, before the output projection.
        output_relative: the same over the mean square of the teacher's output.
        weight_kl: KL(teacher || student), nats per query; the student's weights at least 1e-12.
        weight_cross_entropy: - sum_j teacher_j log student_j, likewise (Hedgehog sec. 4.2).
        cosine: <A, B> / (|A| |B|) of the teacher's and the student's matrices A and B (SUPRA App. A). A matrix is a
            block of at most 64 queries with all keys that they see; mean over every fourth block of each row.
        singular_values: |s(A) - s(B)| / |s(A)|, s the singular values in descending order; of the same matrices.
        entropy: - sum_j w_j log w_j, nats: how spread out the weights are.
        monotonicity: Spearman's rank correlation of a query's weights with its q.k (Hedgehog sec. 3: 1 where more q.k
            always means more weight), over the keys it sees; 0 where all weights are equal, and keys whose softmax
            weight is below e^-60 of the greatest count alike; mean over every sixteenth query that sees two keys.
        esl: effective sequence length, sum_j (i - j) w_ij in tokens (LoLCATs eq. 9); |i - j| in an encoder.
        gates: of the factors by which the linear state is multiplied at each step, per head of the state.
        mix: of what weighs the window, one number per query head: g of a shared denominator, s of a mix.
    """

    layer: int
    output_mse: list[float]
    output_relative: list[float]
    weight_kl: list[float] | None
    weight_cross_entropy: list[float] | None
    cosine: list[float] | None
    singular_values: list[float] | None
    entropy: Pair
    monotonicity: Pair
    esl: Pair
    gates: Histogram | None
    mix: Histogram | None

    def __post_init__(self) -> None:
        names = ("output_relative", "weight_kl", "weight_cross_entropy", "cosine", "singular_values")
        for name in names:
            if (values := getattr(self, name)) is not None:
                require_shape(name, values, len(self.output_mse))


@dataclass(frozen=True)
class Outlier:
    """A head whose output comes much less close than the others'."""

    layer: int
    head: int


@dataclass(frozen=True)
class Fidelity:
    """Every converted layer in order; `worst` is empty where no head stands out."""

    tokens: int
    layers: list[LayerFidelity]
    maps: list[AttentionMap]
    worst: list[Outlier]

    def __post_init__(self) -> None:
        heads = {layer.layer: len(layer.output_relative) for layer in self.layers}
        for chosen in (*self.maps, *self.worst):
            if not 0 <= chosen.head < heads.get(chosen.layer, 0):
                raise ValueError(f"expected a head of a converted layer, found layer {chosen.layer} head {chosen.head}")


def measure_fidelity(
    student: PreTrainedModel,
    rows: Rows,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int,
    batch_size: int,
    seed: int,
) -> Fidelity:
    """Every converted layer of `student` beside softmax attention, on whole rows of at most `max_tokens` together.

    Args:
        tokenizer: for the tokens of the attention maps; without one they are numbers.
        batch_size: rows per forward pass.
        seed: draws the rows.

    Raises:
        FloatingPointError: a mixer's output is not a finite number.
    """
    sample = drawn_rows(rows, max_tokens, seed)
    layers: dict[int, _LayerSums] = {}
    maps: Maps | None = None

    def visit(at: Visit) -> None:
        nonlocal maps
        maps = Maps(sample, student, at.inputs.q.shape[2]) if maps is None else maps
        found = layers.setdefault(at.index, _LayerSums(at.module.mixer))
        found.add_outputs(at)
        for block in weight_blocks(at):
            found.add_weights(block)
            maps.add(at.index, block)

    visit_layers(student, sample, visit, batch_size=batch_size, title="fidelity")
    assert maps is not None
    measured = [sums.finish(index) for index, sums in sorted(layers.items())]
    errors = {(x.layer, head): error for x in measured for head, error in enumerate(x.output_relative)}
    return Fidelity(sample.tokens, measured, maps.chosen(errors, tokenizer), worst_heads(errors))


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

    def add_outputs(self, at: Visit) -> None:
        y, target = at.module.mixer(at.inputs, at.layout).double(), at.target.double()
        if at.layout is not None:  # without padding
            valid = (at.layout.query_position >= 0).expand(len(y), -1)
            y, target = (x.transpose(1, 2)[valid].transpose(0, 1)[None] for x in (y, target))
        if bad := int((~y.isfinite()).any(-1).sum()):
            raise FloatingPointError(f"fidelity: layer {at.index}: {bad} outputs of heads are not finite numbers")
        self.add("output_mse", (y - target).square().mean(-1).transpose(0, 1).flatten(1))
        self.add("output_square", target.square().mean(-1).transpose(0, 1).flatten(1))
        counts = gate_counts(self.mixer, at.inputs)
        if counts is not None:
            self.gates = counts if self.gates is None else self.gates + counts

    def add_weights(self, block: WeightBlock) -> None:
        teacher, student = block.teacher, block.divided()
        self.add("teacher_entropy", entropy(teacher))
        self.add("teacher_esl", effective_length(teacher, block.distance))
        if self.distribution:
            cross = -(teacher * student.clamp_min(LEAST_WEIGHT).log()).sum(-1)
            self.add("weight_cross_entropy", cross)
            self.add("weight_kl", cross - entropy(teacher))
            self.add("student_entropy", entropy(student))
            self.add("student_esl", effective_length(student, block.distance))
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

    def finish(self, index: int) -> LayerFidelity:
        some = self.distribution
        relative = self.sums["output_mse"] / self.sums["output_square"].clamp_min(torch.finfo(torch.float64).tiny)
        gates = None if self.gates is None else Histogram(_edges(), self.gates.tolist())
        return LayerFidelity(
            layer=index,
            output_mse=self.mean("output_mse"),
            output_relative=relative.tolist(),
            weight_kl=self.mean("weight_kl") if some else None,
            weight_cross_entropy=self.mean("weight_cross_entropy") if some else None,
            cosine=self.mean("cosine"),
            singular_values=self.mean("singular_values"),
            entropy=self.pair("entropy", some),
            monotonicity=self.pair("monotonicity", True),
            esl=self.pair("esl", some),
            gates=gates,
            mix=mix_histogram(self.mixer),
        )


# --- measures of weights ----------------------------------------------------------------------------------------------


def entropy(weights: Float[Tensor, "H C K"]) -> Float[Tensor, "H C"]:
    """- sum_j w_j log w_j, nats."""
    return torch.special.entr(weights).sum(-1)


def effective_length(weights: Float[Tensor, "H C K"], distance: Int[Tensor, "C K"]) -> Float[Tensor, "H C"]:
    """ESL(i) = sum_{j <= i} (i - j) w_ij (LoLCATs eq. 9), in tokens; `distance` is i - j."""
    return (weights * distance).sum(-1)


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


# --- histograms -------------------------------------------------------------------------------------------------------


def _edges() -> list[float]:
    return [edge / BINS for edge in range(BINS + 1)]


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


def mix_histogram(mixer: Any) -> Histogram | None:
    """What weighs the window in each query head, where it is learned and there is a window."""
    weights = []
    for _, part in mixer.parts():
        if isinstance(part.combine, SharedDenominatorCombine) and part.span.max_lag:
            weights.append(part.combine.window_factor)
        elif isinstance(part.combine, MixCombine):
            weights.append(part.combine.window_weight)
    if not weights:
        return None
    return Histogram(_edges(), _counts(torch.cat([x.detach().float().flatten() for x in weights]).sigmoid()).tolist())


# --- heads that stand out ---------------------------------------------------------------------------------------------


def worst_heads(errors: dict[tuple[int, int], float]) -> list[Outlier]:
    """Heads whose relative output error is over 5 times the median head's and at least 2 %; at most 10, worst first.

    Args:
        errors: `output_relative` by (layer, head).
    """
    if not errors:
        return []
    middle = median(errors.values())
    found = [(error, at) for at, error in errors.items() if error > STANDS_OUT * middle and error >= LEAST_ERROR]
    return [Outlier(*at) for _, at in sorted(found, reverse=True)[:MOST_WORST]]
