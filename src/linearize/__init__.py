"""Turn pretrained softmax Transformers into linear-attention models, and say what was kept and what was lost.

Importing the package registers the ``linearized_*`` classes with transformers.
"""

from linearize.base import UserError  # before all that takes long to import: its import is when waiting began

# isort: split
from transformers import PreTrainedModel

from linearize.data.packing import build_dataset
from linearize.hf.attention import softmax_attention
from linearize.hf.compiled import compile_steps
from linearize.hf.conversation import fork_state, load_state, save_state
from linearize.hf.convert import convert_layers, to_softmax
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import register_feature_map
from linearize.recipe import KeepByTransferError, Recipe, resolve
from linearize.training.attention_transfer import attention_transfer
from linearize.training.finetune import finetune

__all__ = [
    "Recipe",
    "UserError",
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


def convert(teacher: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """A student that shares the teacher's storage; the teacher itself is left as it is.

    Mixers are new and initialised as the recipe says. An optimizer that trains the shared weights in place changes the
    teacher, too; `linearize.finetune` copies what it changes.

    Raises:
        UserError: an architecture or head that is not supported, a plan that does not fit the teacher, or one that only
            measurements can settle (`memory`, layers kept by transfer error), which `linearize run` makes.
    """
    unsettled = {
        "memory": recipe.memory is not None,
        "layers.keep_softmax.type=transfer_error": isinstance(recipe.layers.keep_softmax, KeepByTransferError),
    }
    for field, given in unsettled.items():
        if given:
            raise UserError(
                f"recipe {recipe.name}: expected a plan that needs no measuring, found {field}; `linearize run` "
                "measures, and what it writes is loaded by from_pretrained"
            )
    plan = resolve(recipe, TeacherShape.from_config(teacher.config.to_dict()))
    return convert_layers(teacher, plan, seed=recipe.seed)
