"""The models that a student must be compared with, made from it or its teacher by exchanging mixers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from linearize.evaluation.candidates import DEFAULT_WINDOW
from linearize.hf.attention import replaced_mixers
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import HeadwiseConfig, LayerPlan, MixerConfig, each_mixer
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import NoSpan, SlidingSpan, TerracedSpan

SINKS = 4


def control_span(span: NoSpan | SlidingSpan | TerracedSpan, sinks: int | None = None) -> SlidingSpan | TerracedSpan:
    """The span of a window-only control: the mixer's own, or a default window where it has none."""
    windowed = SlidingSpan(window_size=DEFAULT_WINDOW) if isinstance(span, NoSpan) else span
    return windowed if sinks is None else windowed.model_copy(update={"sinks": sinks})


def window_reach(plan: LayerPlan, length: int) -> int:
    """Keys that a query of the window-only control sees; what lies further back is "beyond the window"."""
    spans = [control_span(mixer.span) for mixer in each_mixer(window_only_plan(plan, length))]
    return max(span.window_size * (span.blocks if isinstance(span, TerracedSpan) else 1) for span in spans)


def window_only(mixer: MixerConfig, sinks: int | None = None) -> MixerConfig:
    """A mixer's config without its linear part, optionally with another number of sinks."""
    return MixerConfig(span=control_span(mixer.span, sinks), feature_map=None, combine=WindowOnly(), cache=mixer.cache)


def window_only_plan(plan: LayerPlan, length: int) -> LayerPlan:
    """The layer plan of the window-only control.

    Where memory is spread over heads or kept in exact caches, it is one window for all heads of all converted layers,
    of as many pairs of key and value as the plan holds after `length` tokens.
    """
    spread = any(isinstance(layer, HeadwiseConfig) for layer in plan)
    if not spread and all(mixer.cache is None for mixer in each_mixer(plan)):
        return tuple(None if mixer is None else window_only(mixer) for mixer in plan)  # type: ignore[arg-type]
    pairs = [_pairs(layer, length) for layer in plan if layer is not None]
    uniform = MixerConfig(
        span=SlidingSpan(window_size=max(1, round(sum(pairs) / len(pairs)))), feature_map=None, combine=WindowOnly()
    )
    return tuple(None if layer is None else uniform for layer in plan)


def _pairs(layer: MixerConfig | HeadwiseConfig, length: int) -> float:
    """Pairs of key and value that a KV head of the layer holds after `length` tokens, in the mean."""
    if isinstance(layer, HeadwiseConfig):
        heads = [(len(g.kv_heads), length if g.mixer is None else _pairs(g.mixer, length)) for g in layer.groups]
        return sum(count * pairs for count, pairs in heads) / sum(count for count, _ in heads)
    return float(layer.span.sinks + layer.span.context + (0 if layer.cache is None else layer.cache.size))


@contextmanager
def without_linear_part(student: PreTrainedModel, sinks: int | None = None) -> Iterator[PreTrainedModel]:
    """Within, every converted layer attends within its window only; all weights stay as they are."""

    def ablated(mixer: Any) -> LinearMixer | HeadwiseMixer:
        if not isinstance(mixer, HeadwiseMixer):
            return LinearMixer(window_only(mixer.config, sinks), mixer.shape)
        groups = tuple(
            group.model_copy(update={"mixer": group.mixer and window_only(group.mixer, sinks)})
            for group in mixer.config.groups
        )
        return HeadwiseMixer(HeadwiseConfig(groups=groups), mixer.shape)

    with replaced_mixers(student, ablated):
        yield student
