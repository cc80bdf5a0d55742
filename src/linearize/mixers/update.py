"""Updates of the state S [F, D] by a key: its value is added, or replaces what the state recalls for the key.

Hs heads of the state, F features per head, D head dimension, x the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from linearize.configs.mixer_parts import DeltaUpdate
from linearize.configs.shape import LayerShape
from linearize.mixers.gates import Affine, layer_input
from linearize.mixers.inputs import AttnInputs

MIN_NORM = 1e-6


class DeltaRule(nn.Module):
    """b = sigmoid(w.x) per head, and the norm of features that it needs."""

    def __init__(self, config: DeltaUpdate, shape: LayerShape, heads: int) -> None:
        super().__init__()
        self.config = config
        self.strength = Affine(shape.hidden_size, heads, 1, None)

    def reset_parameters(self) -> None:
        """Initialise w."""
        self.strength.reset_parameters()

    def forward(self, inputs: AttnInputs) -> Float[Tensor, "B Hs T 1"]:
        """b, how much of what the state recalls of a key is replaced."""
        return self.strength(layer_input(inputs)).sigmoid()

    def normalize(self, phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        """`phi` over its sum or its Euclidean norm, of which there is at least 1e-6."""
        return KEY_NORMS[self.config.key_norm](phi)


def over_sum(phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
    return phi / phi.sum(-1, keepdim=True).clamp_min(MIN_NORM)


def over_norm(phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
    # By way of the square, whose gradient at 0 is 0 where that of the root is infinite.
    return phi * phi.square().sum(-1, keepdim=True).clamp_min(MIN_NORM**2).rsqrt()


KEY_NORMS: dict[str, Callable[[Tensor], Tensor]] = {"sum": over_sum, "l2": over_norm}
