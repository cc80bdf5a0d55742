"""The public functions of `linearize`."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearize.base import UserError
from linearize.configs.mixer import each_mixer
from linearize.data.packing import build_dataset
from linearize.hf.attention import softmax_attention
from linearize.hf.compiled import compile_steps
from linearize.hf.conversation import fork_state, load_state, save_state
from linearize.hf.convert import convert_layers, to_softmax
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.mixers.feature_maps import register_feature_map
from linearize.planning.plan import check_run
from linearize.recipe import KeepByTransferError, Recipe
from linearize.run.allocation import measure
from linearize.training.attention_transfer import attention_transfer
from linearize.training.finetune import finetune

__all__ = [
    "attention_transfer",
    "build_dataset",
    "compile_steps",
    "convert",
    "finetune",
    "fork_state",
    "load_state",
    "register_feature_map",
    "save_state",
    "softmax_attention",
    "to_softmax",
]


def convert(
    teacher: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """Return a student that shares the teacher's storage; the teacher itself does not change.

    Mixers are new and initialised as the recipe says. An optimizer that trains the shared weights in place changes the
    teacher, too; `linearize.finetune` copies the weights that it trains.

    Args:
        tokenizer: the teacher's; needed if the recipe has `memory`, for which attention is measured on the training
            rows of `recipe.data.dataset`. Without a tokenizer, eviction scores of a `mixer.cache` are not fitted
            (minus the logarithm of the key's norm), and learned sinks start at 0.

    Raises:
        UserError: an unsupported architecture or head, a plan that does not fit the teacher, a recipe with `memory`
            without a tokenizer, or layers kept by transfer error, which only `linearize run` supports.
    """
    if isinstance(recipe.layers.keep_softmax, KeepByTransferError):
        raise UserError(
            f"recipe {recipe.name}: expected a plan that needs no training, found layers.keep_softmax.type="
            "transfer_error; `linearize run` trains, and from_pretrained loads what it writes"
        )
    shape = TeacherShape.from_config(teacher.config.to_dict())
    plan = resolve(recipe, shape, dtype=teacher.dtype)
    measured = any(mixer.cache is not None or mixer.learned_sink for mixer in each_mixer(plan))
    if recipe.memory is None and (tokenizer is None or not measured):
        return convert_layers(teacher, plan, seed=recipe.seed)
    if tokenizer is None:
        raise UserError(
            f"recipe {recipe.name}: expected a tokenizer, because attention is measured on text for `memory`; "
            "found none; pass linearize.convert(teacher, recipe, tokenizer)"
        )
    check_run(recipe, shape, plan)
    dataset = build_dataset(recipe.data, tokenizer, seed=recipe.seed)
    return measure(recipe, shape, plan, teacher, dataset, tokenizer, teacher.dtype).convert(teacher, recipe.seed)
