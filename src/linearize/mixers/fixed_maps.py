"""Maps without a learned projection: pointwise ones, random features, cosFormer, Taylor, DPFP."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.mixers.feature_map import FeatureMap, accumulated, elu1
from linearize.mixers.maps import CosformerMap, DpfpMap, ExpMap, PerformerMap, RfaMap
from linearize.mixers.shape import LayerShape
from linearize.mixers.taylor import TaylorKernel


class Symmetric(FeatureMap):
    """A map that does the same to queries and keys."""

    @abstractmethod
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        """Features, or logarithms, of queries or keys."""

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return self._map(x, position)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        return self._map(x, position)


class Identity(Symmetric):
    """phi(x) = x (RetNet, GLA, fast decay)."""

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x


class Elu1(Symmetric):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020)."""

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return elu1(x)


class Relu(Symmetric):
    """phi(x) = relu(x)."""

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x.relu()


class Exp(Symmetric):
    """phi(x) = exp(t x) (Hedgehog sec. 3.2)."""

    def __init__(self, config: ExpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.temperature = config.temperature

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x * self.temperature


class Performer(FeatureMap):
    """phi(x) = m^-1/2 exp(W x' - |x'|^2 / 2), x' = x D^-1/4 (Choromanski et al. 2021).

    W [m, D] is fixed, and the same for all heads, queries and keys: blocks of orthogonal rows, the last one cut off,
    whose norms are those of normal vectors.
    """

    weight: Tensor

    def __init__(self, config: PerformerMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.register_buffer("weight", torch.empty(self.feature_dim, shape.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W."""
        m, D = self.weight.shape
        Q, R = torch.linalg.qr(torch.randn(-(-m // D), D, D, device=self.weight.device))
        # Without the signs Q is not uniform over rotations, and the features would not be free of bias.
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        norms = torch.randn(m, D, device=self.weight.device).norm(dim=1, keepdim=True)
        self.weight.copy_(Q.flatten(0, 1)[:m] * norms)

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return x @ (self.weight.mT.to(x.dtype) * x.shape[-1] ** -0.25)

    def _query_constant(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T"]:
        return -(x.square().sum(-1) * (x.shape[-1] ** -0.5 / 2) + math.log(self.feature_dim) / 2)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        # Keys are weighed against each other by |x'|^2 / 2, which reaches 1e9 for inputs of 1e4, where fp32 numbers lie
        # 64 apart; for inputs of 1e3 still 0.5.
        x = x.double()
        logs = self._queries(x, position)
        half_square = x.square().sum(-1, keepdim=True) * (x.shape[-1] ** -0.5 / 2)
        return logs.sub_(half_square + math.log(self.feature_dim) / 2)


class Cosformer(Symmetric):
    """phi(x_i) = [relu(x) cos(pi i / 2M), relu(x) sin(pi i / 2M)] (Qin et al. 2022)."""

    def __init__(self, config: CosformerMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.max_length = config.max_length or shape.max_positions

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        angle = position.clamp_min(0).to(x.dtype)[:, None, :, None, None] * (math.pi / 2 / self.max_length)
        return (x.relu()[..., None, :] * torch.cat([angle.cos(), angle.sin()], dim=-2)).flatten(-2)


class Taylor(Symmetric):
    """phi.phi = 1 + u + u^2 / 2, u = q.k D^-1/2: products of pairs of (1, x'), x' = x D^-1/4."""

    kernel: TaylorKernel = TaylorKernel()

    def kernel_input(self, x: Float[Tensor, "B h T D"]) -> Float[Tensor, "B h T D"]:
        """x'."""
        return accumulated(x) * x.shape[-1] ** -0.25

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        return self.kernel.features(self.kernel_input(x))


class Rfa(FeatureMap):
    """phi(x) = m^-1/2 [sin(W x^), cos(W x^)], x^ = x / (|x| + 1e-3), W = sigma N(0, 1) (Peng et al. 2021).

    The normal numbers [G, m, D] are fixed and sigma [G] learned, both per KV head.
    """

    min_denominator = 1.0
    weight: Tensor

    def __init__(self, config: RfaMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.sigma = nn.Parameter(torch.empty(shape.num_kv_heads))
        self.register_buffer("weight", torch.empty(shape.num_kv_heads, self.feature_dim // 2, shape.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W; sigma starts at 1."""
        self.sigma.fill_(1)
        self.weight.normal_()

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        return self._queries(x, position)

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        weight = self.sigma.to(x.dtype)[:, None, None] * self.weight.to(x.dtype)
        weight = weight.repeat_interleave(x.shape[1] // len(weight), dim=0)
        # The derivative of this norm at 0 is 0, not NaN.
        unit = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-3)
        angle = unit @ weight.mT
        return torch.cat([angle.sin(), angle.cos()], dim=-1).mul_(weight.shape[1] ** -0.5)


class Dpfp(Symmetric):
    """phi(x) = r * roll(r, j) for j = 1 .. nu, side by side, r = [relu(x), relu(-x)] (Schlag et al. 2021)."""

    def __init__(self, config: DpfpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.nu = config.nu

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        # r behind a part of itself, long enough that r rolled by up to nu is a slice.
        twice = [x, -x] * 2
        r = torch.cat(twice[1:] if self.nu <= x.shape[-1] else twice, dim=-1).relu_()
        n = 2 * x.shape[-1]
        start = r.shape[-1] - n
        products = [r[..., start:] * r[..., start - j : start - j + n] for j in range(1, self.nu + 1)]
        return products[0] if self.nu == 1 else torch.cat(products, dim=-1)  # cat would copy even one
