"""Turn pretrained softmax Transformers into linear-attention models, and say what was kept and what was lost.

Importing the package registers the ``linearized_*`` classes with transformers.
"""

from linearize.config import Recipe
from linearize.errors import UserError
from linearize.hf.attention import softmax_attention
from linearize.hf.convert import convert
from linearize.hf.state import fork_state, load_state, save_state
from linearize.training.attention_transfer import attention_transfer
from linearize.training.data import build_dataset
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
]
