"""The kernels of `triton_backend` compile for GPUs, and fit them, where there is none: by Triton's compiler alone."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from linearize.ops import triton_gradients, triton_kernels, triton_outputs  # noqa: E402
from linearize.ops.triton_autograd import KEYS, QUERIES, queries_at_once, warps_for  # noqa: E402
from linearize.ops.triton_launch import CHUNK, MOST_BYTES, OPTIONS  # noqa: E402

SHARED_MEMORY = 99 * 2**10  # bytes that a program can have on every GPU since Ampere
INTEGERS = ["lo", "ends", "q_position", "q_document", "k_position", "k_document", "position", "at", "held", "leaves"]
POINTERS = dict.fromkeys([*INTEGERS, "before", "after", "seat"], "*i64") | {"fresh": "*i32"}
POINTERS |= dict.fromkeys(["num", "den", "log_scale", "S", "z", "phi_q", "phi_k"], "*fp32")
POINTERS |= dict.fromkeys(["phi", "weight", "bias", "enters", "window_factor"], "*fp32")
POINTERS |= dict.fromkeys(["num_w", "den_w", "num_l", "den_l"], "*fp32")
POINTERS |= dict.fromkeys(["ahead_S", "ahead_z", "next_S", "next_z", "next_ahead_S", "next_ahead_z"], "*fp32")
POINTERS |= {"slot": "*i64", "entering": "*i64", "begins": "*i1", "place": "*i32", "sink_slot": "*i64"}
POINTERS |= dict.fromkeys(["g_num", "g_den", "g_log_scale", "g_phi", "delta", "sink_k", "sink_v"], "*fp32")
POINTERS |= dict.fromkeys(["grad_q", "grad_k", "grad_v", "grad_y"], "*fp32")
TOKENS = ["new_k", "new_v", "next_k", "next_v"]  # in the inputs' dtype
SCALARS = dict.fromkeys(["factor", "softcap", "per_doubling", "least"], "fp32")


def cases() -> list[Any]:
    """Kernel, constants and the type of q, k and v: the widest heads and blocks, and common ones."""
    found = []
    for D in (64, 128):
        wide, side = {"D": D, "BLOCK_D": D}, {"F": D, "BLOCK_F": D, "D": D, "BLOCK_D": 64, "C": CHUNK}
        for dtype, size in (("bf16", 2), ("fp32", 4)):
            queries = queries_at_once(D * size)
            for softcap, sinks, carried in ((False, False, False), (True, False, False), (True, True, True)):
                own = {"SOFTCAP": softcap, "SINKS": sinks, "CARRIED": carried, "N": 32}
                found.append(("window", wide | own | {"PLACE": softcap, "M": CHUNK}, dtype))
                found.append(("window_queries", wide | own | {"M": queries}, dtype))
            backward = {"SOFTCAP": True, "M": queries, "N": KEYS}
            found.append(("window_keys", wide | backward | {"SINKS": True, "CHUNK": queries}, dtype))
            found.append(("cached_pairs", wide | backward, dtype))
            forward = {"SOFTCAP": True, "PLACE": True, "M": MOST_BYTES // D // size, "N": 32}
            found.append(("cached", wide | forward, dtype))
            found.append(("linear_states", side | {"WEIGHTED": True}, dtype))
            found.append(("linear_outputs", side, dtype))
            for name in ("linear_queries", "linear_keys", "linear_values"):
                found.append((name, side | {"M": QUERIES, "N": KEYS, "num_warps": warps_for(D)}, dtype))
            square = {"D": D, "BLOCK_D": 64, "N": D, "BLOCK_N": D, "BIAS": True, "SOFTMAX": True, "HALVES": True}
            found.append(
                ("hedgehog_outputs", {"N": D, "BLOCK_N": D, "M": CHUNK, "SOFTMAX": True, "HALVES": False}, dtype)
            )
            found += [("hedgehog", square | {"M": rows}, dtype) for rows in (16, CHUNK)]
            one = wide | {"F": D, "BLOCK_F": D, "SIDE": 64, "N": 32, "WINDOW": True, "LINEAR": True, "SOFTCAP": True}
            found.append(("quotient", wide | {"WINDOW": True, "LINEAR": True, "M": 32}, dtype))
            for hides, writes, leaves, ahead, rows in (
                (False, True, True, False, 16),
                (True, True, True, True, 64),
                (True, True, False, True, 64),
                (True, False, False, False, 64),
            ):
                part = {"HIDES": hides, "WRITES": writes, "LEAVES": leaves, "AHEAD": ahead, "M": rows}
                found.append(("one_token", one | part, dtype))
    return [pytest.param(*case, id="-".join(map(str, (case[0], *case[1].values(), case[2])))) for case in found]


@pytest.mark.parametrize("name, constants, dtype", cases())
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(name: str, constants: dict[str, Any], dtype: str, capability: int) -> None:
    modules = triton_kernels, triton_gradients, triton_outputs
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    constants = constants | {x: option for x, option in OPTIONS.items() if x in kernel.arg_names or x == "num_stages"}
    options = {key: constants.pop(key) for key in ("num_stages", "num_warps") if key in constants}
    types = POINTERS | SCALARS | dict.fromkeys([*"qkvxy", *TOKENS], f"*{dtype}")
    if name == "linear_states":
        del types["before"]  # there a number
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
    at = {(kernel.arg_names.index(x),): value for x, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=at)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY
