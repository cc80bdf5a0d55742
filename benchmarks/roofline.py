"""Estimate, without a GPU, what prompts and steps take on an H100: a softmax model beside its conversions.

    PYTHONPATH=.venv/kernels python benchmarks/roofline.py --model llama-1b     # where `make test-kernels` has triton

Models are made on the meta device, in bfloat16. Every operation that a forward pass launches is counted: torch's own by
their tensors, our Triton kernels by what they are given. An operation takes the longest of three: its products at
`TFLOPS`, its tensors at `TERABYTES` a second, each once, and `MICROSECONDS` for being an operation at all. These are an
H100 SXM's data-sheet numbers times `SHARE`, which is what large products and copies get of them. What is estimated is
the GPU's time: of captured steps all of it; eager steps also wait for Python, in proportion to "operations". A step is
one in which every KV cache with eviction chooses anew, as captured steps do; of eager ones it is every eighth.

"Times faster" is the teacher's estimate over the student's. An estimate leaves out what occupancy, masked scores and
cache misses cost, so that it says which targets are in reach, not that they are met.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import TEACHER, student_of
from records import write_results
from teachers import SHAPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from linearize.ops import dispatch, full, triton_launch

SHARE = 0.6
TFLOPS = {torch.bfloat16: 989 * SHARE, torch.float32: 495 / 3 * SHARE}  # float32 by three products of TF32
TERABYTES = 3.35 * SHARE
L2_TERABYTES = 5.5 * SHARE  # of what a kernel gathers again and again
MICROSECONDS = 2.0
TARGETS = {
    "prefill": {
        "recommended:full": (0.95, 0.95, 0.95, 0.95),
        "recommended": (0.8, 1.0, 1.3, 3.0),
        "lolcats": (0.8, 1.0, 1.3, 3.0),
    },
    "decode": {"recommended": (1.0, 1.2, 1.4, 2.0), "lolcats": (1.0, 1.2, 1.4, 2.0)},
}
NO_KERNELS = {"_unsafe_view", "new_empty", "empty", "empty_like", "new_empty_strided"}
LENGTHS = 512, 2048, 8192, 32768


@dataclass
class Cost:
    """Kernels that one forward pass launches, and their estimated seconds."""

    operations: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, flops: float, size: float, dtype: torch.dtype, gathered: float = 0) -> None:
        """One operation with so many multiplications and additions, and bytes of tensors."""
        rate = TFLOPS.get(dtype, TFLOPS[torch.float32]) * 1e12
        memory = size / (TERABYTES * 1e12) + gathered / (L2_TERABYTES * 1e12)
        self.operations[name] += 1
        self.seconds[name] += max(flops / rate, memory, MICROSECONDS * 1e-6)

    @property
    def total(self) -> float:
        """Seconds of all operations, one after the other."""
        return sum(self.seconds.values())


def nbytes(*tensors: Any) -> int:
    """Bytes of all tensors among these, each object once."""
    found = {id(x): x for x in tree_leaves(tensors) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in found.values())


class Operations(TorchDispatchMode):
    """Counts torch's operations that launch a kernel."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not (function.is_view or function.overloadpacket.__name__ in NO_KERNELS):
            count = flop_registry.get(function.overloadpacket)
            flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            dtype = tensors[0].dtype if tensors else torch.float32
            read = nbytes(tensors, out)
            if function.overloadpacket is torch.ops.aten.embedding:  # reads the rows that it returns
                read = 2 * nbytes(out)
            self.cost.add(str(function.overloadpacket).removeprefix("aten."), flops, read, dtype)
        return out


def softmax_of(cost: Cost) -> Callable[..., Tensor]:
    """Return FlashAttention in the place of torch's attention, which has none on the meta device."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        causal = q.shape[2] > 1 and q.shape[2] == k.shape[2]
        flops = 4 * prod(q.shape) * k.shape[2] / (2 if causal else 1)
        y = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="meta")
        cost.add("flash_attention", flops, nbytes(q, k, v, y), q.dtype)
        return y

    return attention


def kernel_of(cost: Cost) -> Callable[..., None]:
    """Return what counts a launch of one of our kernels, by its name, its grid, tensors and constants."""

    def launch(kernel: Any, grid: tuple[int, ...], *inputs: Any, **options: Any) -> None:
        name, tensors = kernel.fn.__name__, [x for x in inputs if isinstance(x, Tensor)]
        size, programs, D, dtype, gathered = nbytes(tensors), prod(grid), options["D"], torch.float32, 0.0
        if name in ("window", "cached", "one_token"):
            dtype = tensors[0].dtype
        if name == "hedgehog":
            flops = 2 * programs * options["M"] * D * options["N"]
        elif name == "window":
            by_name = dict(zip(kernel.arg_names, inputs, strict=False))
            flops = 4 * programs * options["M"] * (by_name["lag"] + options["M"]) * D
        elif name == "cached":
            by_name = dict(zip(kernel.arg_names, inputs, strict=False))
            flops = 4 * programs * options["M"] * by_name["size"] * D
            gathered = 2.0 * programs * by_name["size"] * D * tensors[1].element_size()
        elif name in ("linear_states", "linear_outputs"):
            flops = (
                2 * programs * options["C"] * options["F"] * options["BLOCK_D"] * (1 if name == "linear_states" else 3)
            )
        else:
            flops = 0
        cost.add(name, flops, size, dtype, gathered)

    return launch


@contextmanager
def counted() -> Iterator[Cost]:
    """Within, forward passes of models on the meta device are counted, as a GPU with our kernels would launch them."""
    cost = Cost()
    with (
        mock.patch.object(dispatch, "choose", return_value="triton"),
        mock.patch.object(triton_launch, "launch", kernel_of(cost)),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", softmax_of(cost)),
        mock.patch.object(full, "scaled_dot_product_attention", softmax_of(cost)),
        torch.no_grad(),
        Operations(cost),
    ):
        yield cost


def cost_of(model: PreTrainedModel, what: str, length: int) -> Cost:
    """Count the kernels of a prompt of so many tokens, or of one more token behind it."""
    cache = DynamicCache(config=model.config)

    def forward(tokens: int) -> None:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    with counted() as cost:
        forward(length)
    if what == "prefill":
        return cost
    with counted():
        forward(1)  # from here on layers share what follows from their position
    with counted() as cost:
        forward(1)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-1b", help="default: %(default)s")
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: both"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T", help="tokens of the context")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    with torch.device("meta"):
        teacher = LlamaForCausalLM._from_config(
            SHAPES[arguments.model], dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    teacher.eval().requires_grad_(False)
    rows: list[dict[str, Any]] = []
    print(f"| pass | recipe | {' | '.join(f'{length:,}' for length in arguments.lengths)} | operations |")  # noqa: T201
    print(f"|{' --- |' * (len(arguments.lengths) + 3)}")  # noqa: T201
    for what in arguments.passes:
        theirs = {length: cost_of(teacher, what, length) for length in arguments.lengths}
        models = {TEACHER: teacher} | {name: student_of(teacher, name) for name in TARGETS[what]}
        for name, model in models.items():
            ours = theirs if model is teacher else {n: cost_of(model, what, n) for n in arguments.lengths}
            cells = []
            for length in arguments.lengths:
                cost, faster = ours[length], theirs[length].total / ours[length].total
                target = dict(zip(LENGTHS, TARGETS[what].get(name, ()), strict=False)).get(length)
                rows.append(
                    {"pass": what, "recipe": name, "length": length, "milliseconds": 1e3 * cost.total}
                    | {"times_faster": faster, "target": target, "operations": cost.operations.total()}
                    | {"by_operation": {key: 1e3 * x for key, x in cost.seconds.most_common(8)}}
                )
                against = "" if target is None else f" of {target:g}"
                cells.append(f"{1e3 * cost.total:.2f} ms" + ("" if name == TEACHER else f", {faster:.2f}{against}"))
            print(f"| {what} | {name} | {' | '.join(cells)} | {ours[arguments.lengths[-1]].operations.total():,} |")  # noqa: T201
    write_results(arguments, [os.getloadavg()[0]], results=rows)


if __name__ == "__main__":
    main()
