"""The models that a student must be compared with, made from it or its teacher by exchanging mixers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from linearize.evaluation.candidates import DEFAULT_WINDOW
from linearize.hf.attention import replaced_mixers
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import LayerPlan, MixerConfig
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import NoSpan, SlidingSpan, TerracedSpan

SINKS = 4


def control_span(span: NoSpan | SlidingSpan | TerracedSpan, sinks: int | None = None) -> SlidingSpan | TerracedSpan:
    """The span of a window-only control: the mixer's own, or a default window where it has none."""
    windowed = SlidingSpan(window_size=DEFAULT_WINDOW) if isinstance(span, NoSpan) else span
    return windowed if sinks is None else windowed.model_copy(update={"sinks": sinks})


def window_reach(plan: LayerPlan) -> int:
    """Keys that a query sees at most without the linear part; what lies further back is "beyond the window"."""
    spans = [control_span(mixer.span) for mixer in plan if mixer is not None]
    return max(span.window_size * (span.blocks if isinstance(span, TerracedSpan) else 1) for span in spans)


def window_only(mixer: MixerConfig, sinks: int | None = None) -> MixerConfig:
    """A mixer's config without its linear part, optionally with another number of sinks."""
    return MixerConfig(span=control_span(mixer.span, sinks), feature_map=None, combine=WindowOnly())


def window_only_plan(plan: LayerPlan) -> LayerPlan:
    """The layer plan of the window-only control."""
    return tuple(None if mixer is None else window_only(mixer) for mixer in plan)


@contextmanager
def without_linear_part(student: PreTrainedModel, sinks: int | None = None) -> Iterator[PreTrainedModel]:
    """Within, every converted layer attends within its window only; all weights stay as they are."""

    def ablated(mixer: LinearMixer) -> LinearMixer:
        return LinearMixer(window_only(mixer.config, sinks), mixer.shape)

    with replaced_mixers(student, ablated):
        yield student
