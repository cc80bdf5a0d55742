"""Measure on the teacher which key-value pairs later tokens need, and fit eviction scores that predict it.

The teacher reads a context, a request to repeat it, and the context again. Two maxima are measured for each pair of the
context. The largest attention from the repetition says how much recall needs the pair (KVzip, arXiv 2505.23416). The
largest attention from later tokens of the context itself says how much text needs it. Linear functions of key and
value, fitted in closed form, predict both for each new pair (after KVzap, arXiv 2601.07891, which reads hidden states).
The distribution of recall's needs over KV heads decides the size of each head's cache for recall.

Axes: G KV heads of a layer, H query heads, S tokens of a context, T of a row, Q quantiles, F features of a pair.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.spans import TerracedSpan
from linearize.data.rows import PackedRows
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.hf.sharding import run_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.eviction_cache import features
from linearize.mixers.inputs import AttnInputs
from linearize.ops.heads import repeat_kv
from linearize.ops.layout import SequenceLayout
from linearize.ops.reference import softmax_scores

REQUEST = "\n\nRepeat the previous context exactly.\n"
LONGEST, SHORTEST = 640, 384  # tokens of a context
CONTEXTS = 40
FIRST = 8  # first tokens of a context, which are not fitted: some are sinks, whatever their content
FACTS = ("The code of {} is {}.", "The number of {} is {}.", "{} has the password {}.")
NAMES = ("Alice", "Peru", "lamp", "engine", "Robert", "garden", "museum", "Nairobi", "violin", "Clara")
BLOCK = 16  # queries over which the largest attention is taken
QUERIES_AT_ONCE = 8 * BLOCK  # queries whose attention weights exist at a time
AGES = (16, 64, 256)  # tokens between a pair and the first query that may need it
LEAST = 1e-6  # the least attention weight before its logarithm is fitted
RIDGE = 50.0  # penalty on weights of standardised features
QUANTILES = 256
FADE = 0.07  # decrease of a pair's text score per token, relative to newer pairs, times the square root of the size


@dataclass(frozen=True)
class EvictionScores:
    """Weights [G, F] of the eviction scores of each layer's KV heads, fp32: for recall, and for text."""

    recall: dict[int, Float[Tensor, "G F"]]
    text: dict[int, Float[Tensor, "G F"]]

    def apply(self, student: PreTrainedModel) -> None:
        """Set the eviction scores of all caches of a student of the teacher that was measured, in place."""
        for layer in linearized_layers(student).values():
            for heads, mixer in layer.mixer.parts():
                scorer = getattr(mixer, "scorer", None)
                if scorer is None:
                    continue
                cache = mixer.config.cache
                for place, head in enumerate(heads):
                    scorer.weight[place, -1].copy_(self.text[layer.layer_idx][head])
                    scorer.recency[place, -1] = FADE / math.sqrt(cache.size - cache.recall_size)
                    if cache.recall_size:
                        scorer.weight[place, 0].copy_(self.recall[layer.layer_idx][head])
                        scorer.recency[place, 0] = 0  # recall needs old facts as much as new ones

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, for a safetensors file."""
        named = {f"layers.{layer}.recall": x for layer, x in self.recall.items()}
        return named | {f"layers.{layer}.text": x for layer, x in self.text.items()}

    @classmethod
    def from_named_tensors(cls, named: Mapping[str, Tensor]) -> EvictionScores:
        """Return the scores with these tensors (`named_tensors`)."""
        found: dict[str, dict[int, Tensor]] = {"recall": {}, "text": {}}
        for name, x in named.items():
            _, layer, kind = name.split(".")
            found[kind][int(layer)] = x
        return cls(found["recall"], found["text"])


def contexts(rows: PackedRows, tokenizer: Tokenizer, *, longest: int, seed: int, count: int) -> Iterator[list[int]]:
    """Yield token ids of contexts to repeat: spans of the rows, each with one inserted random fact.

    Args:
        longest: the most tokens of a context; contexts have from 3/5 of it to all of it.

    Raises:
        UserError: there is too little text.
    """
    draw, text = random.Random(seed), rows.input_ids.flatten()
    shortest = longest * SHORTEST // LONGEST
    if len(text) <= longest:
        raise UserError(f"data: expected more than {longest} training tokens to measure on, found {len(text)}")
    for _ in range(count):
        size = draw.randint(shortest, longest)
        start = draw.randrange(len(text) - size)
        found = text[start : start + size].tolist()
        number = "".join(draw.choices("0123456789", k=draw.choice((4, 5, 6, 7))))
        sentence = f"\n{draw.choice(FACTS).format(draw.choice(NAMES), number)}\n"
        fact = tokenizer(sentence, add_special_tokens=False).input_ids
        place = draw.randrange(max(1, size - len(fact)))
        yield (found[:place] + fact + found[place:])[:size]


def context_length(shape: TeacherShape, request: int) -> int:
    """Return the most tokens of a context that the teacher can repeat after a request of `request` tokens.

    Raises:
        UserError: the model has too few positions.
    """
    longest = min(LONGEST, (shape.max_positions - request) // 2)
    if longest < 4 * BLOCK + FIRST:
        raise UserError(
            f"memory: expected a teacher with at least {2 * (4 * BLOCK + FIRST) + request} positions to repeat a "
            f"context in, found {shape.max_positions}"
        )
    return longest


@torch.no_grad()
def measure_attention(
    teacher: PreTrainedModel, rows: PackedRows, tokenizer: Tokenizer, *, seed: int
) -> tuple[dict[int, Float[Tensor, "G Q"]], EvictionScores]:
    """Measure how much recall needs each KV head, and fit eviction scores for recall and for text.

    Costs CONTEXTS forward passes of about 1,050 tokens, without a T x T matrix. Statistics leave out the first FIRST
    tokens of each context.

    Args:
        rows: training text.

    Returns:
        by layer that can be converted, quantiles in rising order of the log of the largest attention weight that any
        query of the repetition, in any query head of the KV head, gives to a pair, fp32; and the scores.

    Raises:
        UserError: the model has too few positions, or there is too little text.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    request: list[int] = tokenizer(REQUEST, add_special_tokens=False).input_ids
    longest = context_length(shape, len(request))
    cache = MixerConfig(
        span=TerracedSpan(window_size=BLOCK), feature_map=None, combine=WindowOnly(), cache=EvictionCache(size=1)
    )  # any mixer with a cache receives the inputs of eviction scores
    plan = tuple(None if index in shape.sliding_layers else cache for index in range(shape.num_layers))
    watched = convert_layers(teacher, plan)
    needs: dict[int, list[Tensor]] = {}
    recall, text = dict[int, Tensor](), dict[int, Tensor]()
    size = 0

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        index, x = layer.layer_idx, features(inputs)[0, :, :size].double()
        by_block = largest_attention(inputs, size)
        later = -(-(size + len(request)) // BLOCK)  # the first block of the repetition alone
        need = by_block[:, later:].amax(1)[:, FIRST:]
        needs.setdefault(index, []).append(need.cpu())
        add(recall, index, x[:, FIRST:], need)
        # Text: queries from each age to the end of the context, for pairs with at least that many queries left.
        ahead = by_block[:, : size // BLOCK].flip(1).cummax(1).values.flip(1)
        for age in AGES:
            last = min(size - 2 * age, BLOCK * (size // BLOCK - 1) - age)
            pairs = torch.arange(FIRST, max(FIRST, last), device=x.device)
            if len(pairs):
                block = (pairs + age) // BLOCK + 1
                aged = torch.cat([x[:, pairs], torch.full_like(x[:, pairs, :1], math.log2(age))], dim=-1)
                add(text, index, aged, ahead[:, block, pairs])
        return softmax_output(layer, inputs, layout)

    given = contexts(rows, tokenizer, longest=longest, seed=seed, count=CONTEXTS)
    with observed(watched, observe):
        for context in progress(list(given), "attention of each KV head"):
            size = len(context)
            ids = torch.tensor([context + request + context], device=watched.device)
            run_layers(watched, {"input_ids": ids, "use_cache": False})
    middles = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = {index: torch.cat(x, dim=1).quantile(middles, dim=1).T.contiguous() for index, x in needs.items()}
    width = 2 * shape.head_dim + 2
    scores = EvictionScores(
        {index: fitted(sums) for index, sums in recall.items()},
        {index: fitted(sums)[:, :width].contiguous() for index, sums in text.items()},  # the age is regressed out
    )
    return quantiles, scores


def add(moments: dict[int, Tensor], index: int, x: Float[Tensor, "G N F"], y: Float[Tensor, "G N"]) -> None:
    """Add sums of products of features, 1, and target to the sums of a layer, fp64 [G, F + 2, F + 2]."""
    x = torch.cat([x, torch.ones_like(x[..., :1]), y[..., None].to(x.dtype)], dim=-1)
    products = (x.mT @ x).cpu()
    moments[index] = moments[index] + products if index in moments else products


def fitted(sums: Float[Tensor, "G M M"]) -> Float[Tensor, "G F"]:
    """Return the weights of a ridge regression, fp32, from sums of products of features, 1, and target."""
    count = sums[:, -2, -2, None]
    mean = sums[:, -2] / count
    moments = sums / count[..., None] - mean[:, :, None] * mean[:, None]
    covariance, target = moments[:, :-2, :-2], moments[:, :-2, -1]
    scale = covariance.diagonal(dim1=1, dim2=2).clamp_min(1e-12).sqrt()
    penalty = RIDGE / count[..., None] * torch.eye(scale.shape[1], dtype=scale.dtype)
    standard = covariance / (scale[:, :, None] * scale[:, None]) + penalty
    return (torch.linalg.solve(standard, target / scale) / scale).float().contiguous()


def largest_attention(inputs: AttnInputs, context: int) -> Float[Tensor, "G J S"]:
    """Return the log of the largest softmax weight that each block of BLOCK queries gives to each key of the context.

    The maximum is also over the query heads of a KV head. A key that a block does not see has the log of LEAST.

    Args:
        inputs: of one row, which is one document.
        context: S, tokens of the context, the first ones of the row.
    """
    q, k = inputs.q.float(), inputs.k.float()
    heads, length = q.shape[1:3]
    found = []
    for first in range(0, length, QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, length)
        scores = softmax_scores(q[:, :, first:last], repeat_kv(k[:, :, :last], heads), inputs.scaling, inputs.softcap)
        later = torch.ones(last - first, last, dtype=torch.bool, device=q.device).triu(first + 1)
        weights = scores[0].masked_fill(later, -torch.inf).softmax(-1)[..., :context]
        missing = -(last - first) % BLOCK, context - weights.shape[-1]
        weights = torch.nn.functional.pad(weights, (0, missing[1], 0, missing[0]))
        found.append(weights.unflatten(0, (k.shape[1], -1)).amax(1).unflatten(1, (-1, BLOCK)).amax(2))
    return torch.cat(found, dim=1).clamp_min(LEAST).log()
