"""A custom operator, opaque to compilers: a layer's mixers on the tokens of one step.

Without postponed annotations, because torch reads the operator's schema from the annotations.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op


def _mix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor | None,
    positions: torch.Tensor | None,
    unrotated_query: torch.Tensor | None,
    unrotated_key: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Fill `output`; do nothing without metadata, as in vLLM's memory profiling."""
    context = get_forward_context()
    if context.attn_metadata is not None:
        layer, metadata = context.no_compile_layers[layer_name], context.attn_metadata[layer_name]
        layer.mix(query, key, value, (hidden, positions, unrotated_query, unrotated_key), output, metadata)


def _mix_fake(*_: torch.Tensor | str | None) -> None:
    """Do nothing, because fake tensors have no data."""


direct_register_custom_op("linearize_mixer", _mix, mutates_args=["output"], fake_impl=_mix_fake)
linearize_mixer = torch.ops.vllm.linearize_mixer
