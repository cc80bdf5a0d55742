"""What it costs to keep the state in half precision between steps: a text is fed token by token, in each dtype.

    python benchmarks/state_dtype.py --model M --dataset story.txt --recipe lolcats

The model is a softmax one, which is converted by a recipe and not trained, or a linearized one (without --recipe). The
numbers of docs/generation.md are of stories260K (karpathy/tinyllamas on the hub, in the Hugging Face layout) on the
first stories of TinyStories' validation file (roneneldan/TinyStories). Compared with fp32: KL of the next token's
probabilities in nats, and the share of places whose likeliest token is the same.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from records import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import linearize
from linearize.configs.data import DataConfig
from linearize.data.sources import read_rows
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.recipe import Recipe

DTYPES = ("float32", "float16", "bfloat16")


@torch.inference_mode()
def step_by_step(model: torch.nn.Module, ids: Tensor, state_dtype: str) -> Tensor:
    """[T, V] log probabilities, in fp64, of `ids` [1, T] fed one at a time."""
    model.config.state_dtype = state_dtype
    cache, found = None, []
    for token in track(ids.split(1, dim=1), f"{state_dtype}, {ids.shape[1]} tokens", transient=True):
        out = model(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].double().log_softmax(dim=-1))
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--dataset", required=True, help="its first texts are read: a file, a folder or a hub id")
    parser.add_argument("--recipe", help="by which to convert the model; none: it is linearized already")
    parser.add_argument("--tokens", type=int, default=512, help="so many of them")
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    arguments = parser.parse_args()
    load = os.getloadavg()
    model = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    if arguments.recipe is not None:
        model = linearize.convert(model, Recipe.load(arguments.recipe)).eval()
    config = DataConfig(dataset=arguments.dataset, max_documents=arguments.tokens)
    text = "\n".join(row[config.text_column] for _, row in islice(read_rows(config), 20))
    ids = load_tokenizer(arguments.model)(text, return_tensors="pt").input_ids[:, : arguments.tokens]
    exact, *others = (step_by_step(model, ids, dtype) for dtype in DTYPES)
    found = {
        dtype: {
            "kl": functional.kl_div(other, exact, log_target=True, reduction="batchmean").item(),
            "same_top_token": (other.argmax(-1) == exact.argmax(-1)).double().mean().item(),
        }
        for dtype, other in zip(DTYPES[1:], others, strict=True)
    }
    table = Table("state", "KL, nats a token", "same top token", title=f"{ids.shape[1]} tokens, against float32")
    for dtype, x in found.items():
        table.add_row(dtype, f"{x['kl']:.1e}", f"{x['same_top_token']:.1%}")
    Console().print(table)
    write_results(arguments, load, tokens=ids.shape[1], dtypes=found)


if __name__ == "__main__":
    main()
