"""The second-order Taylor polynomial of the exponential, a kernel in closed form."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.mixers.feature_maps.base import Symmetric, accumulated
from linearize.ops.kernel import Kernel


class TaylorKernel(Kernel):
    """f(u) = 1 + u + u^2 / 2 > 0. The features of X inputs are the (X + 1)(X + 2) / 2 products of pairs of (1, x)."""

    def features(self, x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape F"]:
        return _PairProducts.apply(_with_one(x))

    def features_grad(self, x: Float[Tensor, "*shape X"], grad: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape X"]:
        return _pair_products_grad(_with_one(x), grad)[..., 1:]

    def scores(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 + u + u.square() / 2

    def slope(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 + u


def _with_one(x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape n"]:
    return torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)


def _pairs(y: Float[Tensor, "*shape n"]) -> tuple[int, int, Float[Tensor, "*shape m"]]:
    """Return n, the number of shifts j that yield all pairs, and y concatenated twice: y shifted by j is a slice."""
    return y.shape[-1], y.shape[-1] // 2 + 1, torch.cat([y, y], dim=-1)


def _square_weights(y: Float[Tensor, "*shape n"]) -> Float[Tensor, " n"]:
    """Return factors of the squares of (1, x): 1 for the constant, 2^-1/2 for x_i^2, which is halved in the kernel."""
    weights = y.new_full(y.shape[-1:], 0.5**0.5)
    weights[0] = 1
    return weights


class _PairProducts(torch.autograd.Function):
    """Compute y_i y_i+j (indices modulo n) for j = 0 .. n / 2: every pair once. y [..., n] -> [..., n (n + 1) / 2].

    Both passes use one product for many pairs: autograd takes five times as long.
    """

    @staticmethod
    def forward(ctx: Any, y: Float[Tensor, "*shape n"]) -> Float[Tensor, "*shape F"]:
        ctx.save_for_backward(y)
        n, rows, twice = _pairs(y)
        # Without `out`, torch would store the product with j as the first axis, because of the overlap.
        phi = y.new_empty(*y.shape[:-1], rows, n)
        torch.mul(y[..., None, :], twice.unfold(-1, n, 1)[..., :rows, :], out=phi)
        phi[..., 0, :].mul_(_square_weights(y))
        # For even n the last row has every pair twice.
        return phi.flatten(-2)[..., : n * (n + 1) // 2]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Float[Tensor, "*shape F"]
    ) -> Float[Tensor, "*shape n"]:
        (y,) = ctx.saved_tensors
        return _pair_products_grad(y, grad)


def _pair_products_grad(y: Float[Tensor, "*shape n"], grad: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape n"]:
    n, rows, twice = _pairs(y)
    g_first, g_twice = torch.zeros_like(y), torch.zeros_like(twice)
    for j in range(rows):
        g = grad[..., j * n : (j + 1) * n]
        g = g if j else g * _square_weights(y)
        size = g.shape[-1]
        g_first[..., :size].addcmul_(g, twice[..., j : j + size])
        g_twice[..., j : j + size].addcmul_(g, y[..., :size])
    return g_first.add_(g_twice[..., :n]).add_(g_twice[..., n:])


_KERNEL = TaylorKernel()


class Taylor(Symmetric):
    """The map to products of pairs of (1, x'), x' = x D^-1/4."""

    kernel = _KERNEL

    def kernel_input(self, x: Float[Tensor, "B h T D"]) -> Float[Tensor, "B h T D"]:
        """Return x' = x D^-1/4."""
        return accumulated(x) * x.shape[-1] ** -0.25

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        return _KERNEL.features(self.kernel_input(x))
