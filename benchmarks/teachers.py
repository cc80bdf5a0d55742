"""Models of the benchmarks of whole models: softmax teachers, stored or of a shape alone, and their students."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from linearize.hf.checkpoint import load_model
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.training.allocation import allocate


def llama_config(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, tied: bool = True
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=2**18,
        tie_word_embeddings=tied,
    )


NEEDS = Path(__file__).parent / "results" / "attention-needs-smollm2-135m.json"
SHAPES = {
    "llama-135m": llama_config(576, 30, 9, 3, 1536, 49152),  # SmolLM-135M
    "llama-1b": llama_config(2048, 16, 32, 8, 8192, 128256),  # Llama-3.2-1B
    "llama-8b": llama_config(4096, 32, 32, 8, 14336, 128256, tied=False),  # Llama-3.1-8B
}


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which teacher, which students of it, and in which numbers."""
    parser.add_argument("--model", required=True, help=f"a softmax model: a folder, a hub id, or {', '.join(SHAPES)}")
    recipes = ["lolcats", "recommended", "absolute-scale"]
    parser.add_argument("--recipes", nargs="+", default=recipes, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")


def make_teacher(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """One of `SHAPES` with random weights, or the model of a folder or hub id; frozen, its attention that of SDPA.

    On a GPU without cuDNN's, which torch prefers: it plans anew for every length of a cache, and a step of the 1B shape
    took 47 ms with it, 12 without (README).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if name in SHAPES:
        with device:
            teacher: PreTrainedModel = LlamaForCausalLM._from_config(
                SHAPES[name], dtype=dtype, attn_implementation="sdpa"
            )
    else:
        teacher = load_model(name, dtype=dtype, device=device)
    return teacher.eval().requires_grad_(False)


def measured_needs(layers: int, heads: int) -> dict[int, list[list[float]]]:
    """Return what recall needs of the KV heads of a model of this shape, taken from SmolLM2-135M-Instruct's.

    Layers are those at the same relative depth, and heads are repeated, so that about as large a share of heads has a
    cache for recall in any shape, and no time depends on what is chance in random weights.
    """
    needs = json.loads(NEEDS.read_text())["needs"]
    depth = [round(layer * (len(needs) - 1) / max(1, layers - 1)) for layer in range(layers)]
    return {layer: [needs[at][head % len(needs[at])] for head in range(heads)] for layer, at in enumerate(depth)}


def make_student(teacher: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Return an untrained student over the teacher's storage; its heads need for recall what SmolLM2-135M's do."""
    shape = TeacherShape.from_config(teacher.config.to_dict())
    plan, memory = resolve(recipe, shape), recipe.memory
    if memory is not None:
        every = measured_needs(shape.num_layers, shape.num_kv_heads)
        needs = {layer: every[layer] for layer in range(len(plan)) if plan[layer] is not None}
        plan = allocate(memory, needs, shape, teacher.dtype).plan(shape.num_layers)
    return convert_layers(teacher, plan, seed=recipe.seed).requires_grad_(False)
