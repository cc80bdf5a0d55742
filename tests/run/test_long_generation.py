"""A trained student generates 131,072 tokens: numbers finite, memory flat, its state that of a fresh prefill.

The bundled teacher, trained quickly; what it writes beyond its 1,024 positions makes no sense, and need not. With
JAXTYPING_DISABLE=1 a step is not checked for types and shapes, and takes a third of the time.
"""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import linearize
from linearize.data.packing import dataset_from_documents
from linearize.demo.corpus import standard_library_texts, teacher_path
from linearize.evaluation.speed import cache_bytes
from linearize.hf.cache import layer_tensors
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.recipe import Recipe

TOKENS, SETTLED, CHUNK = 131_072, 4_096, 1_024
TRAINED = {
    f"{stage}.{field}": value
    for stage in ("transfer", "finetune")
    for field, value in {"batch_size": 2, "max_tokens": 24 * 2 * 1024, "eval_every": 12}.items()
}


def trained(recipe: Recipe, folder: Path) -> tuple[Any, Any]:
    """A student of the bundled teacher, and the tokenizer."""
    teacher = load_model(str(teacher_path()), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(str(teacher_path()))
    some, held_out = (texts[:60] for texts in standard_library_texts())
    data = dataset_from_documents(some, held_out, tokenizer, recipe.data, recipe.seed)
    student = linearize.convert(teacher, recipe)
    assert recipe.transfer is not None and recipe.finetune is not None
    transferred = linearize.attention_transfer(
        student, data.train, data.validation, recipe.transfer, output_dir=folder / "transfer"
    )
    assert sum(transferred.best_loss.values()) < sum(transferred.initial_loss.values())
    linearize.finetune(student, data.train, data.validation, recipe.finetune, output_dir=folder / "finetune")
    return student.eval(), tokenizer


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def relative_difference(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["lolcats", "hedgehog"])
@torch.no_grad()
def test_very_many_tokens(recipe: str, tmp_path: Path) -> None:
    chosen = Recipe.load(recipe, TRAINED | {"data.validation_rows": 24})
    with torch.enable_grad():
        student, tokenizer = trained(chosen, tmp_path)
    cache, seen = DynamicCache(config=student.config), []
    step = partial(student, past_key_values=cache, use_cache=True, logits_to_keep=1)
    ids = tokenizer("def read_config(path):\n", return_tensors="pt")["input_ids"]
    generator, held = torch.Generator().manual_seed(0), {}
    written, length = ids, 0
    while length < TOKENS:
        logits = step(written).logits[:, -1]
        assert torch.isfinite(logits).all(), f"after {length} tokens"
        if length in (SETTLED, TOKENS - 1):
            held[length] = cache_bytes(cache), peak_bytes()
        seen.append(written)
        length += written.shape[1]
        written = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    (bytes_early, peak_early), (bytes_late, peak_late) = held.values()
    assert bytes_early == bytes_late
    assert peak_late - peak_early < 64 * 2**20  # of these a list of tokens

    everything, fresh = torch.cat(seen, dim=1), DynamicCache(config=student.config)
    assert everything.unique().numel() > 100, "it does not write one thing over and over"
    for part in everything.split(CHUNK, dim=1):
        student(part, past_key_values=fresh, use_cache=True, logits_to_keep=1)
    for index, (one, other) in enumerate(zip(cache.layers, fresh.layers, strict=True)):
        found, expected = layer_tensors(one), layer_tensors(other)
        assert found.keys() == expected.keys() and found
        for name, tensor in found.items():
            assert torch.isfinite(tensor).all()
            if tensor.is_floating_point():
                assert relative_difference(tensor, expected[name]) < 1e-3, f"layer {index}: {name}"
            else:
                assert torch.equal(tensor, expected[name]), name
