"""Feature maps phi: linear attention weighs a key by phi_q(q).phi_k(k), where softmax has exp(q.k).

A map is a config in `linearize.configs.feature_maps`, which a recipe names by its `type`, a module, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from linearize.base import Config
from linearize.configs.feature_maps import (
    FEATURE_MAP_CONFIGS,
    CosformerMap,
    DpfpMap,
    Elu1Map,
    ExpMap,
    FeatureMapConfig,
    HedgehogMap,
    IdentityMap,
    LolcatMap,
    PerformerMap,
    ReglaMap,
    ReluMap,
    RfaMap,
    SiluMap,
    T2RMap,
    TaylorMap,
)
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import FeatureMap
from linearize.mixers.feature_maps.cosformer import Cosformer
from linearize.mixers.feature_maps.dpfp import Dpfp
from linearize.mixers.feature_maps.learned import T2R, Hedgehog, Lolcat, Regla
from linearize.mixers.feature_maps.performer import Performer
from linearize.mixers.feature_maps.pointwise import Elu1, Exp, Identity, Relu, Silu
from linearize.mixers.feature_maps.rfa import Rfa
from linearize.mixers.feature_maps.taylor import Taylor

AnyMapConfig = TypeVar("AnyMapConfig", bound=FeatureMapConfig)

FEATURE_MAPS: dict[type[FeatureMapConfig], Callable[[Any, LayerShape], FeatureMap]] = {
    IdentityMap: Identity,
    SiluMap: Silu,
    Elu1Map: Elu1,
    ReluMap: Relu,
    ExpMap: Exp,
    T2RMap: T2R,
    HedgehogMap: Hedgehog,
    LolcatMap: Lolcat,
    ReglaMap: Regla,
    PerformerMap: Performer,
    CosformerMap: Cosformer,
    TaylorMap: Taylor,
    RfaMap: Rfa,
    DpfpMap: Dpfp,
}


def register_feature_map(config: type[AnyMapConfig], module: Callable[[AnyMapConfig, LayerShape], FeatureMap]) -> None:
    """Add a feature map of your own, which recipes, plans and checkpoints then name by its `type`.

    Its chunked and recurrent forms, cache, checkpoints and costs need no further code. Register it before you load a
    model that has it.

    Args:
        config: a `FeatureMapConfig` with a field `type: Literal["your name"] = "your name"`.
        module: makes its `FeatureMap` from the config and the layer's sizes; usually the class.

    Raises:
        ValueError: another map has this `type`.
    """
    name = config.model_fields["type"].default
    if name in (other.model_fields["type"].default for other in FEATURE_MAP_CONFIGS):
        raise ValueError(f"feature_map: expected a type of its own, found {name!r}, which is there already")
    FEATURE_MAP_CONFIGS.append(config)
    FEATURE_MAPS[config] = module
    # In the order of definition, so that classes with a mixer's config as a field are rebuilt after it.
    for data in Config.__subclasses__():
        data.model_rebuild(force=True)
