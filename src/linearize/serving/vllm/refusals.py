"""Refuse settings of vLLM that converted models do not support, before any weight is read."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.models.config import MambaModelConfig, VerifyAndUpdateConfig

from linearize.hf.classes import read_plan
from linearize.serving.vllm import BASES
from linearize.serving.vllm.pages import page_bytes

# Tests for unsupported settings, and the error message of each.
REFUSED: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda c: c.lora_config is not None,
        "enable_lora: expected false, because adapters of a converted model are merged into it when it is saved; "
        "merge yours (PEFT's merge_and_unload) and serve the merged folder",
    ),
    (
        lambda c: c.speculative_config is not None,
        "speculative_config: expected none, because a state cannot take back tokens that were not accepted; "
        "leave it out",
    ),
    (
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "pipeline_parallel_size: expected 1, because nobody has tried states whose layers lie in several processes; "
        "take tensor_parallel_size",
    ),
    (
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "decode_context_parallel_size and prefill_context_parallel_size: expected 1, because a state goes from the "
        "first token to the last; leave them out",
    ),
    (
        lambda c: c.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
        "kv_cache_dtype: expected auto, because a state is kept in the dtypes that its mixer computes in; leave it "
        "out (S alone can be kept in bfloat16: state_dtype in the model's config.json)",
    ),
    (
        lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size,
        "kv_transfer_config and kv_offloading_size: expected none, because nobody has tried to move states between "
        "machines; leave them out",
    ),
    (
        lambda c: c.model_config.runner_type != "generate",
        "runner: expected generate, because only language models are served; take transformers for other heads",
    ),
)


class ServingConfig(VerifyAndUpdateConfig):
    """Checks that vLLM calls with its settings before it makes the model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check that we serve the architecture, and mark the model as one with states.

        Raises:
            ValueError: another architecture, or a config without a plan.
        """
        name = str(model_config.architecture)
        if name.removeprefix("Linearized") not in BASES:
            raise ValueError(
                f"architectures: expected one of {', '.join(f'Linearized{base}' for base in BASES)} to serve it with "
                f"vLLM; found {name}. `linearize serve` without vLLM, and transformers, run it"
            )
        if not any(layer is not None for layer in read_plan(model_config.hf_config)):
            raise ValueError(
                "config.linearize.layers: expected a layer that is converted, found none; serve its teacher"
            )
        # If all layers in this list have full attention, vLLM treats the model as one without states.
        kinds = getattr(model_config.hf_config, "layer_types", None)
        if kinds is not None and set(kinds) == {"full_attention"}:
            model_config.hf_config.layer_types = ["full_attention or a state"] * len(kinds)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check that all settings are supported.

        Raises:
            ValueError: one is not.
        """
        for asked, reason in REFUSED:
            if asked(vllm_config):
                raise ValueError(reason)
        page_bytes(vllm_config)  # raises if the heads cannot be divided over the processes
        MambaModelConfig.verify_and_update_config(vllm_config)
