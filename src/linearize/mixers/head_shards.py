"""Make the mixer of some of a layer's KV heads, for one of several processes that divide the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linearize.base import UserError
from linearize.configs.mixer import HeadGroup, HeadwiseConfig, MixerConfig
from linearize.configs.shape import LayerShape
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer


@dataclass(frozen=True)
class WeightShard:
    """The part of one tensor of a layer's mixer that belongs to some of its heads.

    Attributes:
        name: name in the mixer of these heads; None: the tensor belongs to other heads.
        shape: shape in the mixer of all heads.
        axis: the axis of heads; None: all heads share the tensor.
        heads: number of heads on this axis.
        mine: indices of the selected heads on this axis.
    """

    name: str | None
    shape: tuple[int, ...]
    axis: int | None = None
    heads: int = 1
    mine: tuple[int, ...] = ()

    def __call__(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of this `shape` that belongs to these heads."""
        if self.axis is None:
            return whole
        divided = whole.unflatten(self.axis, (self.heads, -1))
        mine = torch.tensor(self.mine, device=whole.device)
        return divided.index_select(self.axis, mine).flatten(self.axis, self.axis + 1)


def shard_of_heads(
    config: MixerConfig | HeadwiseConfig, shape: LayerShape, heads: Sequence[int]
) -> tuple[LinearMixer | HeadwiseMixer, dict[str, WeightShard]]:
    """Return a mixer of these KV heads alone, in their order, and a `WeightShard` for every tensor of the whole mixer.

    The mixer's weights are freshly initialised.

    Args:
        heads: indices of the layer's KV heads, in rising order.

    Raises:
        UserError: a feature map reads all heads together (`feature_map.per: model`).
    """
    with torch.device("meta"):
        whole = _mixer(config, shape)
    queries = shape.num_heads // shape.num_kv_heads
    own = _mixer(_of(config, heads), replace(shape, num_heads=len(heads) * queries, num_kv_heads=len(heads)))
    shards = {name: WeightShard(None, tuple(x.shape)) for name, x in whole.state_dict().items()}
    mine = list(_groups(own))
    for prefix, all_of_it, group in _groups(whole):
        places = tuple(place for place, head in enumerate(all_of_it) if head in heads)
        if not places:
            continue
        own_prefix, _, its = mine.pop(0)
        if its.gate is not None:
            its.gate.choose(len(all_of_it) * queries, [p * queries + i for p in places for i in range(queries)])
        have = its.state_dict()
        for name, x in group.state_dict().items():
            axis = _axis(name, x, have[name], len(all_of_it), len(places))
            shards[prefix + name] = WeightShard(own_prefix + name, tuple(x.shape), axis, len(all_of_it), places)
    return own, shards


def _mixer(config: MixerConfig | HeadwiseConfig, shape: LayerShape) -> LinearMixer | HeadwiseMixer:
    return HeadwiseMixer(config, shape) if isinstance(config, HeadwiseConfig) else LinearMixer(config, shape)


def _of(config: MixerConfig | HeadwiseConfig, heads: Sequence[int]) -> MixerConfig | HeadwiseConfig:
    if isinstance(config, MixerConfig):
        return config
    new = {head: place for place, head in enumerate(heads)}
    groups = ((tuple(new[head] for head in g.kv_heads if head in new), g.mixer) for g in config.groups)
    return HeadwiseConfig(groups=tuple(HeadGroup(kv_heads=its, mixer=mixer) for its, mixer in groups if its))


def _groups(mixer: LinearMixer | HeadwiseMixer) -> Iterator[tuple[str, tuple[int, ...], LinearMixer]]:
    """Yield the prefix of the names, the KV heads and the mixer of each group that has weights."""
    for index, (heads, part) in enumerate(mixer.parts()):
        if isinstance(part, LinearMixer):
            yield "" if part is mixer else f"groups.{index}.", heads, part


def _axis(name: str, whole: Tensor, own: Tensor, heads: int, mine: int) -> int | None:
    """Return the axis of heads: the one whose size is proportional to their number; None: all heads share the tensor.

    Raises:
        UserError: the tensor cannot be divided by heads.
    """
    axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    if not axes:
        return None
    if len(axes) > 1 or whole.shape[axes[0]] * mine != own.shape[axes[0]] * heads:
        raise UserError(
            f"{name}: expected weights of single heads, found {tuple(whole.shape)}, which all heads share "
            "(feature_map.per: model); leave the model whole"
        )
    return axes[0]
