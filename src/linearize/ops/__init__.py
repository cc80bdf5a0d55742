"""Linear attention and windowed softmax as two unnormalised primitives that share one split of the keys.

Axes, throughout: B batch, H query heads, G key/value heads, T queries, K keys, D head dim, F feature dim. Torch only.
"""

from linearize.ops.dispatch import delta_values, linear_scan, window_softmax
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout
from linearize.ops.linear_state import LinearState, linear_state
from linearize.ops.partial import Partial
from linearize.ops.recurrent import linear_step, window_step
from linearize.ops.span import NoSpan, SlidingSpan, Span, TerracedSpan

__all__ = [
    "Kernel",
    "Layout",
    "LinearState",
    "NoSpan",
    "Partial",
    "SlidingSpan",
    "Span",
    "TerracedSpan",
    "delta_values",
    "linear_scan",
    "linear_state",
    "linear_step",
    "window_softmax",
    "window_step",
]
