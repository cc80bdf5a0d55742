"""Which layers are linearized and which stay softmax, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from linearize.errors import UserError
from linearize.part import Part


class KeepLayers(Part):
    """Which layers stay softmax; indices may be negative, from the end."""

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        """Of layers with these transfer errors; None: not measured yet."""
        raise NotImplementedError

    def _known(self, indices: Iterable[int], num_layers: int) -> set[int]:
        for index in indices:
            if not -num_layers <= index < num_layers:
                raise UserError(
                    f"layers.keep_softmax: expected indices from {-num_layers} to {num_layers - 1}, found {index}"
                )
        return {index % num_layers for index in indices}


class KeepListed(KeepLayers):
    """These layers stay softmax. A plain list of indices means the same."""

    type: Literal["listed"] = "listed"
    layers: tuple[int, ...] = ()

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return self._known(self.layers, num_layers)


class KeepAllBut(KeepLayers):
    """All layers but these stay softmax."""

    type: Literal["all_but"] = "all_but"
    layers: tuple[int, ...]

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return set(range(num_layers)) - self._known(self.layers, num_layers)


class KeepEvery(KeepLayers):
    """Every n-th layer stays softmax: layers n - 1, 2 n - 1, ..."""

    type: Literal["every"] = "every"
    n: PositiveInt

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return set(range(self.n - 1, num_layers, self.n))


class KeepRatio(KeepLayers):
    """This share of the layers stays softmax, rounded, evenly spread."""

    type: Literal["ratio"] = "ratio"
    ratio: float = Field(ge=0, lt=1)

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        count = round(self.ratio * num_layers)
        return {(2 * i + 1) * num_layers // (2 * count) for i in range(count)}


class KeepByTransferError(KeepLayers):
    """The n layers whose held-out transfer loss is largest stay softmax. All are transferred, for that to be known."""

    type: Literal["transfer_error"] = "transfer_error"
    n: PositiveInt

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        if errors is None:
            return set()
        return set(sorted(range(num_layers), key=lambda index: errors[index], reverse=True)[: self.n])


def _listed(value: Any) -> Any:
    return {"type": "listed", "layers": value} if isinstance(value, list | tuple) else value


Keep = Annotated[KeepListed | KeepAllBut | KeepEvery | KeepRatio | KeepByTransferError, Field(discriminator="type")]


class LayersConfig(Part):
    """Which layers are linearized."""

    keep_softmax: Annotated[Keep, BeforeValidator(_listed)] = Field(
        default=KeepListed(), description="which layers stay softmax: a list of indices, or a rule"
    )
    convert_sliding: bool = Field(
        default=False, description="also convert layers whose teacher attention slides already"
    )
