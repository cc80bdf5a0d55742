"""One more token costs Python calls as well as operations: how often a step goes from one file of ours to another."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

import linearize
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.recipe import Recipe

PACKAGE = linearize.__path__[0]
WINDOW_AND_CACHE: dict[str, Any] = {
    "span": {"type": "terraced", "window_size": 8, "blocks": 2, "sinks": 1},
    "feature_map": None,
    "combine": {"type": "window_only"},
    "cache": {"size": 5},
}
MIXERS = {"lolcats": Recipe.load("lolcats").mixer, "recommended": MixerConfig.model_validate(WINDOW_AND_CACHE)}


def entries(mixer: LinearMixer, inputs: Any, state: Any) -> Counter[str]:
    """Count, by file, the calls of one step that come from another file."""
    found, files = Counter[str](), [""]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            name = frame.f_code.co_filename.removeprefix(PACKAGE)
            found[name] += name != files[-1]
            files.append(name)
        elif event == "return":
            files.pop()

    sys.setprofile(note)
    try:
        mixer.step(inputs, state)
    finally:
        sys.setprofile(None)
    return +found


@pytest.mark.parametrize("name, most", [("lolcats", 49), ("recommended", 13)])
def test_a_step_enters_few_files(name: str, most: int) -> None:
    mixer = LinearMixer(MIXERS[name], LayerShape(4, 2, 8, 16, 256))
    q, k, v = (torch.randn(1, heads, 100, 8) for heads in (4, 2, 2))
    inputs = AttnInputs(q, k, v, 0.3)
    with torch.inference_mode():
        state = mixer.step(inputs.tokens(0, 97), None)[1]
        mixer.step(inputs.tokens(97, 98), state)  # from here on layers share what follows from their position
        found = entries(mixer, inputs.tokens(97, 98), state)
    assert found["/mixers/linear.py"] == 1, found
    assert found.total() <= most, found
