"""Turn pretrained softmax Transformers into linear-attention models, and say what was kept and what was lost.

Importing the package registers the ``linearized_*`` classes with transformers.
"""

from linearize.config import Recipe
from linearize.errors import UserError
from linearize.hf.attention import softmax_attention
from linearize.hf.convert import convert

__all__ = ["Recipe", "UserError", "convert", "softmax_attention"]
