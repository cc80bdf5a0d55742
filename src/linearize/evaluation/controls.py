"""Make the controls of a student, from it or its teacher, by replacing mixers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig, each_mixer, is_spread
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.costs import mixer_cost
from linearize.evaluation.candidates import DEFAULT_WINDOW
from linearize.hf.attention import linearized_layers, replaced_mixers
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import share_sinks
from linearize.mixers.eviction_cache import copy_scorers
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer

SINKS = 4


def control_span(span: NoSpan | SlidingSpan | TerracedSpan, sinks: int | None = None) -> SlidingSpan | TerracedSpan:
    """Return the span of a window-only control: the mixer's own, or a default window if it has none."""
    windowed = SlidingSpan(window_size=DEFAULT_WINDOW) if isinstance(span, NoSpan) else span
    return windowed if sinks is None else windowed.model_copy(update={"sinks": sinks})


def window_reach(plan: LayerPlan, model: PreTrainedModel, length: int) -> int:
    """Return the number of keys that a query of the window-only control sees; earlier keys are "beyond the window"."""
    spans = [control_span(mixer.span) for mixer in each_mixer(window_only_plan(plan, model, length))]
    return max(span.max_softmax_keys for span in spans)


def window_only(mixer: MixerConfig, sinks: int | None = None) -> MixerConfig:
    """Return a mixer's config without its linear part, optionally with another number of sinks."""
    return MixerConfig(span=control_span(mixer.span, sinks), feature_map=None, combine=WindowOnly(), cache=mixer.cache)


def window_only_plan(plan: LayerPlan, model: PreTrainedModel, length: int) -> LayerPlan:
    """Return the layer plan of the window-only control: each layer's own window.

    For plans with groups of heads or KV caches with eviction, it is the `equal_bytes_plan`.
    """
    return equal_bytes_plan(plan, model, length) if is_spread(plan) else exact_plan(plan)


def equal_bytes_plan(plan: LayerPlan, model: PreTrainedModel, length: int) -> LayerPlan:
    """Return a plan of windows with SINKS sinks, the same in all heads, that uses as many bytes as the plan's states.

    Args:
        model: teacher or student; bytes are counted in its dtype.
        length: number of tokens at which the bytes of heads that keep all keys are counted.
    """
    shape = TeacherShape.from_config(model.config.to_dict())
    layers = zip(plan, MetaModel.of(shape).rotary_dims, strict=True)
    costs = [mixer_cost(layer, shape, model.dtype, dims) for layer, dims in layers if layer is not None]
    held = sum(cost.state_bytes + length * cost.grows for cost in costs)
    pairs = held / (2 * shape.head_dim * shape.num_kv_heads * model.dtype.itemsize) / len(costs)
    sinks = min(SINKS, max(0, round(pairs) - 1))
    span = SlidingSpan(window_size=max(1, round(pairs) - sinks), sinks=sinks)
    uniform = MixerConfig(span=span, feature_map=None, combine=WindowOnly())
    return tuple(None if layer is None else uniform for layer in plan)


def exact_plan(plan: LayerPlan) -> LayerPlan:
    """Return the plan without linear states: each head keeps its window, KV cache and sinks, or all of its keys.

    A linear part without a window gets the window-only control's.
    """
    return tuple(
        layer.each(window_only) if isinstance(layer, HeadwiseConfig) else layer and window_only(layer) for layer in plan
    )


def copy_eviction_scores(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the eviction scores of a student to another one with the same caches, in place."""
    both = (linearized_layers(model).values() for model in (source, target))
    for one, other in zip(*both, strict=True):
        copy_scorers(one.mixer, other.mixer)


@contextmanager
def without_linear_part(student: PreTrainedModel, sinks: int | None = None) -> Iterator[PreTrainedModel]:
    """Replace every converted layer's mixer by its window alone, in the `with` block; all weights are unchanged.

    A learned sink that is a key of the window stays one.
    """

    def alone(mixer: MixerConfig) -> MixerConfig:
        kept = WindowOnly(learned_sink=mixer.learned_sink and mixer.span.max_softmax_keys > 0)
        return window_only(mixer, sinks).model_copy(update={"combine": kept})

    def ablated(mixer: Any) -> LinearMixer | HeadwiseMixer:
        if isinstance(mixer, HeadwiseMixer):
            made = HeadwiseMixer(mixer.config.each(alone), mixer.shape)
        else:
            made = LinearMixer(alone(mixer.config), mixer.shape)
        if mixer.causal:
            copy_scorers(mixer, made)
            share_sinks(mixer, made)
        return made

    with replaced_mixers(student, ablated):
        yield student
