"""Feature maps phi: what stands for exp(q.k) in linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linearize.mixers import maps
from linearize.mixers.feature_map import FeatureMap
from linearize.mixers.fixed_maps import Cosformer, Dpfp, Elu1, Exp, Identity, Performer, Relu, Rfa, Taylor
from linearize.mixers.learned_maps import T2R, Hedgehog, Lolcat, Regla
from linearize.mixers.shape import LayerShape

__all__ = ["FEATURE_MAPS", "FeatureMap"]

FEATURE_MAPS: dict[type, Callable[[Any, LayerShape], FeatureMap]] = {
    maps.IdentityMap: Identity,
    maps.Elu1Map: Elu1,
    maps.ReluMap: Relu,
    maps.ExpMap: Exp,
    maps.T2RMap: T2R,
    maps.HedgehogMap: Hedgehog,
    maps.LolcatMap: Lolcat,
    maps.ReglaMap: Regla,
    maps.PerformerMap: Performer,
    maps.CosformerMap: Cosformer,
    maps.TaylorMap: Taylor,
    maps.RfaMap: Rfa,
    maps.DpfpMap: Dpfp,
}
