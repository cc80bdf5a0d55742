"""Kernels in closed form: scores of near keys without features, which would be many times as wide as the inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor


class Kernel(ABC):
    """A feature map phi with phi(x).phi(y) = f(x.y). States are sums of phi; scores of single keys need f alone."""

    @abstractmethod
    def features(self, x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape F"]:
        """Return phi(x), differentiable."""

    @abstractmethod
    def features_grad(self, x: Float[Tensor, "*shape X"], grad: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape X"]:
        """Return the gradient of x, given that of phi(x)."""

    @abstractmethod
    def scores(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return f(u), differentiable; not in place."""

    @abstractmethod
    def slope(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return f'(u)."""
