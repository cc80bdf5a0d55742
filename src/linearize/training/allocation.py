"""Which KV head gets how much memory: what each loses with less, measured on the teacher, and who gains most per byte.

Axes: L layers, G KV heads of a layer, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from linearize.base import UserError, progress
from linearize.data.repeats import with_few_repeats
from linearize.data.rows import IGNORED, PackedRows, on_device
from linearize.hf.architectures import architecture_of
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import HeadwiseConfig, LayerPlan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import Layout
from linearize.training.cache_scores import fit_mixers
from linearize.training.memory import BLOCK, Choice, window


def measured_losses(
    teacher: PreTrainedModel,
    rows: PackedRows,
    candidates: Sequence[Choice],
    *,
    tokens: int,
    seed: int,
    recall: float = 0.0,
) -> dict[int, list[list[float]]]:
    """How much each candidate, in one KV head alone, raises the loss: of each layer that can be converted, [G][C].

    Exact caches whose scores are measured on the teacher are fitted to it first, on the same rows (`fit_mixers`).

    Nats per token of KL(teacher, student), to second order in the change of the head's output: where the teacher is the
    best there is, the first order vanishes. 1/2 E (g . dy)^2, where g is the gradient of a sampled next token's loss at
    the head's output y (the Fisher information of the teacher's own distribution), and dy what the candidate changes.
    Changes at different positions are taken for independent. One pass forward and back, in which each layer is computed
    again on the way back: memory is that of inference, the inputs of all layers, and one layer's forward and backward;
    no T x T matrix exists.

    Text asks for little that is far away, and then once. So spans that come twice are written into the rows, and what
    a head loses is the mean over tokens of text, plus `recall` times the mean over tokens that only recall foretells.
    One pass measures both: scores of different sampled tokens are independent, so that a token whose loss is multiplied
    by w counts w^2 times.

    Args:
        rows: of which the first `tokens` are read, and of these the tokens that carry a loss count.
        seed: draws the next tokens, and the spans.
        recall: what a recalled token counts beside one of text; 0: the rows as they are.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    sliding = set(shape.sliding_layers)
    plan = tuple(None if index in sliding else window(BLOCK) for index in range(shape.num_layers))
    watched = convert_layers(teacher, plan)
    watched.requires_grad_(False)
    first = watched.get_input_embeddings()
    # For all heads of a layer at once: each reads its own alone.
    mixers = {
        layer.layer_idx: [choice and LinearMixer(choice, shape.layer).to(teacher.device) for choice in candidates]
        for layer in linearized_layers(watched).values()
    }
    every = range(shape.num_kv_heads)
    of_all = {index: [(every, x) for x in of_layer if x is not None] for index, of_layer in mixers.items()}
    fit_mixers(watched, of_all, rows, tokens)
    sums = {index: torch.zeros(shape.num_kv_heads, len(candidates), dtype=torch.float64) for index in mixers}

    def observe(layer: Any, inputs: AttnInputs, layout: Layout | None) -> Tensor:
        y = softmax_output(layer, inputs, layout)
        if y.requires_grad:
            kept, softmax = inputs.map(Tensor.detach), y.detach()
            y.register_hook(lambda gradient: add(layer.layer_idx, kept, layout, softmax, gradient))
        return y

    @torch.no_grad()
    def add(index: int, inputs: AttnInputs, layout: Layout | None, y: Tensor, gradient: Tensor) -> None:
        for place, mixer in enumerate(mixers[index]):
            if mixer is not None:
                change = (mixer(inputs, layout) - y).float() * gradient.float()
                by_head = change.unflatten(1, (shape.num_kv_heads, -1)).sum((2, 4)).double()
                sums[index][:, place] += 0.5 * by_head.square().sum((0, 2)).cpu()

    def embedded(module: Any, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()

    generator, count = torch.Generator().manual_seed(seed), min(len(rows), -(-tokens * len(rows) // rows.num_tokens))
    rows, recalled = rows.rows(slice(count)), None
    if recall:
        rows, recalled = with_few_repeats(rows, seed=seed)
    weights, read = _weights(rows, recalled, recall)
    handle = first.register_forward_hook(embedded)
    try:
        with observed(watched, observe), recomputed_layers(watched), torch.enable_grad():
            for row in progress(range(count), "what each head needs"):
                inputs = on_device(rows.rows(slice(row, row + 1)).inputs(), watched.device)
                logits = watched(**inputs).logits.float().log_softmax(-1)
                drawn = torch.multinomial(logits[0].detach().exp().cpu(), 1, generator=generator).to(logits.device)
                losses = -logits[0].gather(1, drawn).squeeze(1)
                (losses * weights[row].to(losses.device)).sum().backward()
    finally:
        handle.remove()
    return {index: (x / read).tolist() for index, x in sums.items()}


def _weights(rows: PackedRows, recalled: Bool[Tensor, "N L"] | None, recall: float) -> tuple[Float[Tensor, "N L"], int]:
    """By what the loss of the token after each one is multiplied; and how many tokens of text there are."""
    counts = rows.labels != IGNORED
    text = counts if recalled is None else counts & ~recalled
    read, weights = int(text[:, 1:].sum()), text.float()
    if recalled is not None and recalled.any():
        weights[recalled] = (recall * read / int(recalled.sum())) ** 0.5
    return torch.nn.functional.pad(weights[:, 1:], (0, 1)), read


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within, each layer of a decoder keeps its inputs alone, and is computed again for its gradients.

    The first computation is without gradients, so what is done with those is done once.
    """
    known = architecture_of(model)
    assert known is not None and known.parts is not None
    layers: Any = model.base_model.get_submodule(known.parts.layers)

    def again(forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(hidden: Tensor, *rest: Any, **options: Any) -> Any:
            return checkpoint(lambda x: forward(x, *rest, **options), hidden, use_reentrant=True)

        return called

    for layer in layers:
        layer.forward = again(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def allocate(losses: dict[int, list[list[float]]], sizes: Sequence[int], budget: int) -> dict[int, list[int]]:
    """Which candidate each KV head of each layer gets, so that all together take no more than `budget` bytes.

    Greedy: from the smallest candidate on, always the step that lowers the losses most per byte, along the lower convex
    hull of a head's losses over bytes; to the end of the budget. The steps on a hull fall in value, so that greedy is
    within one step of the best there is.

    Raises:
        UserError: the budget is less than the smallest candidate in every head takes.
    """
    steps, chosen = [], dict[tuple[int, int], int]()
    for layer, heads in losses.items():
        for head, its in enumerate(heads):
            hull = _hull(its, sizes)
            chosen[layer, head] = hull[0]
            for before, after in pairwise(hull):
                gain, more = its[before] - its[after], sizes[after] - sizes[before]
                steps.append((-gain / more, layer, head, after, more))
    left = budget - sum(sizes[place] for place in chosen.values())
    if left < 0:
        raise UserError(
            f"memory: expected at least {budget - left:,} bytes, which the smallest window in every KV head takes, "
            f"found {budget:,}; give more, or smaller memory.windows"
        )
    ended = set[tuple[int, int]]()
    for _, layer, head, after, more in sorted(steps):
        # A step too large ends its head's: what follows on the hull rests on it.
        if more > left:
            ended.add((layer, head))
        elif (layer, head) not in ended:
            chosen[layer, head], left = after, left - more
    return {layer: [chosen[layer, head] for head in range(len(heads))] for layer, heads in losses.items()}


def _hull(losses: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Places of the lower convex hull of losses over sizes, from the smallest size to the least loss."""
    hull: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda at: (sizes[at], losses[at])):
        if hull and losses[place] >= losses[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(losses, sizes, hull[-2], hull[-1]) >= _slope(losses, sizes, hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _slope(losses: Sequence[float], sizes: Sequence[int], a: int, b: int) -> float:
    return (losses[b] - losses[a]) / (sizes[b] - sizes[a])


def allocated_plan(chosen: dict[int, list[int]], candidates: Sequence[Choice], num_layers: int) -> LayerPlan:
    """The layer plan of an allocation; layers that are not in it stay as they are."""
    return tuple(
        HeadwiseConfig.of([candidates[place] for place in chosen[layer]]) if layer in chosen else None
        for layer in range(num_layers)
    )
