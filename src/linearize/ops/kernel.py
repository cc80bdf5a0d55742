"""Kernels in closed form: what scores of keys near a query are made of, where features would be many times as wide."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor


class Kernel(ABC):
    """phi(x).phi(y) = f(x.y). A state is a sum of features phi; keys read one by one need f alone."""

    @abstractmethod
    def features(self, x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape F"]:
        """phi(x), differentiable."""

    @abstractmethod
    def features_grad(self, x: Float[Tensor, "*shape X"], grad: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape X"]:
        """The gradient of x, given that of phi(x)."""

    @abstractmethod
    def scores(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """f(u), differentiable; not in place."""

    @abstractmethod
    def slope(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """f'(u)."""
