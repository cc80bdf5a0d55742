"""Every part that a recipe can name has a module."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from linearize.configs.feature_maps import FEATURE_MAP_CONFIGS
from linearize.configs.mixer_parts import Combine, Decay, Normalizer
from linearize.mixers.combine import COMBINES
from linearize.mixers.feature_maps import FEATURE_MAPS
from linearize.mixers.gates import DECAYS
from linearize.mixers.normalizers import NORMALIZERS


@pytest.mark.parametrize(
    ("configs", "modules"),
    [
        (FEATURE_MAP_CONFIGS, FEATURE_MAPS),
        (get_args(Decay), DECAYS),
        (get_args(Normalizer), NORMALIZERS),
        (get_args(Combine), COMBINES),
    ],
)
def test_every_config_has_a_module(configs: Any, modules: dict[type, Any]) -> None:
    assert set(configs) == set(modules)
