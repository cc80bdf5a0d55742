"""Turn pretrained softmax Transformers into linear-attention models, and say what was kept and what was lost.

Importing the package registers the ``linearized_*`` classes with transformers.
"""

from linearize.base import UserError
from linearize.data.packing import build_dataset
from linearize.hf.attention import softmax_attention
from linearize.hf.conversation import fork_state, load_state, save_state
from linearize.hf.convert import to_softmax
from linearize.recipe import Recipe, convert
from linearize.training.attention_transfer import attention_transfer
from linearize.training.finetune import finetune

__all__ = [
    "Recipe",
    "UserError",
    "attention_transfer",
    "build_dataset",
    "convert",
    "finetune",
    "fork_state",
    "load_state",
    "save_state",
    "softmax_attention",
    "to_softmax",
]
