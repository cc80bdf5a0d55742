"""The ways in which a linearized model can read a prompt: its config's `prefill`."""

from __future__ import annotations

STREAMING, FULL = "streaming", "full"
PREFILL_COSTS = {
    STREAMING: "linear time and constant memory, the same as for every later token",
    FULL: "the teacher's own attention over the first call, in the teacher's time, with keys and values of one layer "
    "at a time; then the same state is kept",
}
PREFILLS = (None, *PREFILL_COSTS)  # of a config; None is streaming
