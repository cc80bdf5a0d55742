"""Feature maps phi: linear attention weighs a key by phi_q(q).phi_k(k), where softmax has exp(q.k).

A map is a config, which a recipe names by its `type`, and a module, side by side in one file, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linearize.mixers.feature_maps.base import FeatureMap, FeatureMapConfig
from linearize.mixers.feature_maps.cosformer import Cosformer, CosformerMap
from linearize.mixers.feature_maps.dpfp import Dpfp, DpfpMap
from linearize.mixers.feature_maps.hedgehog import Hedgehog, HedgehogMap
from linearize.mixers.feature_maps.lolcat import Lolcat, LolcatMap
from linearize.mixers.feature_maps.performer import Performer, PerformerMap
from linearize.mixers.feature_maps.pointwise import Elu1, Elu1Map, Exp, ExpMap, Identity, IdentityMap, Relu, ReluMap
from linearize.mixers.feature_maps.regla import Regla, ReglaMap
from linearize.mixers.feature_maps.rfa import Rfa, RfaMap
from linearize.mixers.feature_maps.t2r import T2R, T2RMap
from linearize.mixers.feature_maps.taylor import Taylor, TaylorMap
from linearize.mixers.shape import LayerShape

FEATURE_MAPS: dict[type[FeatureMapConfig], Callable[[Any, LayerShape], FeatureMap]] = {
    IdentityMap: Identity,
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
