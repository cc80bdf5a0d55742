"""Our linear part against the naive operators of flash-linear-attention, wherever both define the function.

Theirs: tensors are [B,T,H,*] (but in retention and the delta rule), queries are multiplied by F^-1/2 inside, scalar
gates and beta have no axis of size 1, and most functions compute in float32 whatever they are given. Each adapter below
takes our inputs to one of their functions, and its outputs back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.configs.spans import NoSpan
from linearize.ops.backend import Backend, named
from linearize.ops.dispatch import IMPLEMENTATIONS, missing
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.layout import SequenceLayout
from tests.ops.parity import FP64, assert_near

# This import comes first because it ignores warnings, which are errors elsewhere: fla warns of a missing GPU and a
# missing FlashAttention and uses a deprecated decorator of torch's. Its naive functions need none of these.
pytest.importorskip("fla.ops", reason="fla is not installed; `make test-fla` installs it and runs this")

from fla.ops.delta_rule.naive import delta_rule_chunkwise, delta_rule_parallel, delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import (
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_chunk_linear_attn, naive_recurrent_linear_attn
from fla.ops.retention.naive import naive_retention
from fla.ops.simple_gla.naive import (
    naive_chunk_simple_gla,
    naive_parallel_simple_gla,
    naive_recurrent_simple_gla,
)

FP32 = 1e-4
CPU = [named(name) for name in IMPLEMENTATIONS if missing(name, torch.device("cpu")) is None]


@dataclass(frozen=True)
class Inputs:
    """q, k [B,H,T,F], v [B,H,T,D]; if the operator has them, log_decay [B,H,T,1 or F], beta [B,H,T,1] and a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if x is not None}

    def to_float32(self) -> Inputs:
        return replace(self, **{name: x.float() for name, x in self.tensors.items()})

    def padded(self, multiple: int) -> Inputs:
        """Zeros for tokens at the end, which leave the state as it is: some functions take only whole chunks."""
        missing = -self.q.shape[2] % multiple
        tokens = {name: x for name, x in self.tensors.items() if name not in ("S", "z")}
        return replace(self, **{name: F.pad(x, (0, 0, 0, missing)) for name, x in tokens.items()})

    def by_token(self, *names: str) -> list[Tensor]:
        """These tensors as [B,T,H,*]; scalar decays and beta as [B,T,H]."""
        return [swap(x.squeeze(-1) if x.shape[-1] == 1 else x) for x in map(self.tensors.__getitem__, names)]


# o [B,H,T,D], and as far as a function gives them: "normalized" (o by what 1 for every value would give), S, z.
Outputs = dict[str, Tensor]


def swap(x: Tensor) -> Tensor:
    """[B,T,H,*] from [B,H,T,*], and back."""
    return x.transpose(1, 2)


# --- theirs -----------------------------------------------------------------------------------------------------------


def recurrent_linear_attn(x: Inputs) -> Outputs:
    tensors = x.by_token("q", "k", "v")
    state = None if x.S is None or x.z is None else (x.S, x.z[:, None])
    o, S = naive_recurrent_linear_attn(*tensors, initial_state=x.S, output_final_state=True)
    normalized, (_, z) = naive_recurrent_linear_attn(
        *tensors, initial_state=state, output_final_state=True, normalize=True
    )
    return {"o": swap(o), "normalized": swap(normalized), "S": S, "z": z[:, 0]}


def chunk_linear_attn(x: Inputs) -> Outputs:
    return {"o": swap(naive_chunk_linear_attn(*x.padded(64).by_token("q", "k", "v")))}


def retention(x: Inputs) -> Outputs:
    return {"o": naive_retention(x.q, x.k, x.v)}


def recurrent_simple_gla(x: Inputs) -> Outputs:
    o, S = naive_recurrent_simple_gla(*x.by_token("q", "k", "v", "log_decay"), initial_state=x.S)
    return {"o": swap(o), "S": S}


def chunk_simple_gla(x: Inputs) -> Outputs:
    tensors = x.by_token("q", "k", "v", "log_decay")
    o, S = naive_chunk_simple_gla(*tensors, initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


def parallel_simple_gla(x: Inputs) -> Outputs:
    return {"o": swap(naive_parallel_simple_gla(*x.by_token("q", "k", "v", "log_decay"))[0])}


def recurrent_gla(x: Inputs) -> Outputs:
    o, S = naive_recurrent_gla(*x.by_token("q", "k", "v", "log_decay"), initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


def recurrent_delta_rule(x: Inputs) -> Outputs:
    o, S = delta_rule_recurrence(x.q, x.k, x.v, x.tensors["beta"].squeeze(-1), initial_state=x.S)
    return {"o": o, "S": S}


def chunk_delta_rule(x: Inputs) -> Outputs:
    x = x.padded(32)
    o, S = delta_rule_chunkwise(x.q, x.k, x.v, x.tensors["beta"].squeeze(-1))
    return {"o": o, "S": S}


def parallel_delta_rule(x: Inputs) -> Outputs:
    x = x.padded(128)
    return {"o": delta_rule_parallel(x.q, x.k, x.v, x.tensors["beta"].squeeze(-1))[0]}


def recurrent_gated_delta_rule(x: Inputs) -> Outputs:
    tensors = x.by_token("q", "k", "v", "beta", "log_decay")
    o, S = naive_recurrent_gated_delta_rule(*tensors, initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


def chunk_gated_delta_rule(x: Inputs) -> Outputs:
    tensors = x.by_token("q", "k", "v", "log_decay", "beta")
    o, S = naive_chunk_gated_delta_rule(*tensors, initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


def recurrent_kda(x: Inputs) -> Outputs:
    tensors = x.by_token("q", "k", "v", "log_decay", "beta")
    o, S = naive_recurrent_kda(*tensors, initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


def chunk_kda(x: Inputs) -> Outputs:
    tensors = x.padded(64).by_token("q", "k", "v", "log_decay", "beta")
    o, S = naive_chunk_kda(*tensors, initial_state=x.S, output_final_state=True)
    return {"o": swap(o), "S": S}


@dataclass(frozen=True)
class Operator:
    """One of their functions, and what it takes."""

    theirs: Callable[[Inputs], Outputs]
    decay: str = "none"  # retention (their constants), scalar, features
    delta: bool = False
    state: bool = True  # takes an initial state
    tolerance: float = FP32


OPERATORS = [
    Operator(recurrent_linear_attn),
    Operator(chunk_linear_attn, state=False, tolerance=FP64),
    Operator(retention, "retention", state=False),
    Operator(recurrent_simple_gla, "scalar"),
    Operator(chunk_simple_gla, "scalar"),
    Operator(parallel_simple_gla, "scalar", state=False),
    Operator(recurrent_gla, "features"),
    Operator(recurrent_delta_rule, delta=True),
    Operator(chunk_delta_rule, delta=True, state=False, tolerance=FP64),
    Operator(parallel_delta_rule, delta=True, state=False, tolerance=FP64),
    Operator(recurrent_gated_delta_rule, "scalar", delta=True),
    Operator(chunk_gated_delta_rule, "scalar", delta=True),
    Operator(recurrent_kda, "features", delta=True),
    Operator(chunk_kda, "features", delta=True),
]
CASES = [
    pytest.param(operator, with_state, id=f"{operator.theirs.__name__}{'-state' if with_state else ''}")
    for operator in OPERATORS
    for with_state in (False, True)[: 1 + operator.state]
]


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(backend: Backend, x: Inputs) -> Outputs:
    state = None
    if x.S is not None:
        state = LinearState(x.S, x.S.new_zeros(x.S.shape[:3]) if x.z is None else x.z)
    given = x.q * x.q.shape[-1] ** -0.5, x.k, x.v, NoSpan(), SequenceLayout.full(x.q.shape[2]), x.beta, x.log_decay
    _, read, after = backend.prefill(None, LinearInputs(*given, state=state), keeps_state=True)
    assert read is not None and after is not None
    return {"o": read.num, "normalized": read.num / read.den[..., None], "S": after.S, "z": after.z}


# --- the comparison ---------------------------------------------------------------------------------------------------


def make_inputs(operator: Operator, length: int, *, with_state: bool) -> Inputs:
    """Float64 leaves. B = 2, H = 3, F = 5, D = 4. Keys have norm 1, which keeps the delta rule's state small."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, features, values = 2, 3, 5, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, heads, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(length, features), F.normalize(normal(length, features), dim=-1), normal(length, values)
    x = Inputs(q, k, v)
    normalized = operator.decay == "none" and not operator.delta
    if normalized:  # denominators are far from 0
        x = replace(x, q=q.abs(), k=k.abs())
    if operator.decay in ("scalar", "features"):
        # Some steps forget nearly all, most little.
        width = features if operator.decay == "features" else 1
        x = replace(x, log_decay=F.logsigmoid(2 + 2 * normal(length, width)))
    if operator.delta:
        x = replace(x, beta=normal(length, 1).sigmoid())
    if with_state:
        x = replace(x, S=normal(features, values), z=normal(features).abs() if normalized else None)
    for tensor in x.tensors.values():
        tensor.requires_grad_()
    if operator.decay == "retention":  # no input of theirs, so not a leaf
        log_decay = torch.log1p(-torch.exp2(-5 - torch.arange(heads, dtype=torch.float64)))
        x = replace(x, log_decay=log_decay[None, :, None, None].expand(batch, -1, length, 1))
    return x


@pytest.mark.parametrize("backend", CPU, ids=lambda backend: backend.name)
@pytest.mark.parametrize("length", [1, 63, 64, 100, 200])
@pytest.mark.parametrize("operator, with_state", CASES)
def test_equals_fla(operator: Operator, with_state: bool, length: int, backend: Backend) -> None:
    """Outputs, final states, and gradients of all of them with respect to all inputs."""
    x = make_inputs(operator, length, with_state=with_state)
    expected = operator.theirs(x if operator.tolerance == FP64 else x.to_float32())
    expected = {name: y.double() for name, y in expected.items()}
    expected["o"] = expected["o"][:, :, :length]  # without what an adapter padded
    found = {name: y for name, y in ours(backend, x).items() if name in expected}
    for name, y in found.items():
        assert_near(y, expected[name], operator.tolerance, name)

    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(y.shape, generator=generator, dtype=torch.float64) for name, y in expected.items()}
    leaves = {name: tensor for name, tensor in x.tensors.items() if tensor.requires_grad}
    of_found, of_expected = (
        torch.autograd.grad(sum((y[name] * weights[name]).sum() for name in weights), list(leaves.values()))
        for y in (found, expected)
    )
    for name, y, other in zip(leaves, of_found, of_expected, strict=True):
        assert_near(y, other, operator.tolerance, f"gradient of {name}")
