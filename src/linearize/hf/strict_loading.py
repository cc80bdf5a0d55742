"""Load weights completely or not at all: refuse checkpoints with missing or unused weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from linearize.base import UserError

logger = logging.getLogger(__name__)


def load_whole(load: Callable[..., Any], name: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model by `load`, a `from_pretrained`, and transformers' loading info.

    Weights that transformers ignores, such as tied ones, may be missing or left over. So may be:
    - all mixers, if the checkpoint is a softmax model's: that is a conversion;
    - the head or pooler of another model class. A missing head is new and random, but a missing language model head is
      an error.

    Args:
        name: of the checkpoint; None if `kwargs` has the weights. With a `gguf_file`, `kwargs` has the `config`.

    Raises:
        UserError: other weights are missing, left over or of another shape.
    """
    asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with _without_report() as report:
        try:
            model, info = load(name, *args, **(kwargs | asked))
        except RuntimeError:
            if not (key := re.search(r"^(\S+) .*CONVERSION", "".join(report), re.MULTILINE)):
                raise
            raise UserError(f"model {name}: expected weights that fit config.json, found others for {key[1]}") from None
    if name is None:
        stored = {}
    elif "gguf_file" in kwargs:  # reading its config again would take seconds, for the vocabulary
        stored = kwargs["config"].to_dict()
    else:
        stored = PreTrainedConfig.get_config_dict(name, **kwargs)[0]
    missing, left = set(info["missing_keys"]), set(info["unexpected_keys"])
    mixers: set[str] = model.mixer_weights() if hasattr(model, "mixer_weights") else set()
    if mixers <= missing and not str(stored.get("model_type")).startswith("linearized_"):
        missing -= mixers
    architectures = {cls.__name__ for cls in type(model).__mro__} & set(stored.get("architectures") or ())
    new: set[str] = set()
    if not architectures and stored:
        left = {key for key in left if _in_trunk(key, model)}
        if model.get_output_embeddings() is None:
            new = {key for key in missing if not _in_trunk(key, model) and _siblings(key, model) <= missing}
    problems = [f"none for {_some(missing - new)}"] if missing - new else []
    problems += [f"{_some(left)}, which it has not"] if left else []
    if info["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
        key, found, expected = min(info["mismatched_keys"])
        problems.append(f"{key} of shape {list(found)} for {list(expected)}")
    if problems:
        raise UserError(
            f"model {name}: expected all weights of a {type(model).__name__} and no others, found "
            f"{', and '.join(problems)}; use a whole copy of the checkpoint, saved without adapters"
        )
    if new:
        logger.warning("model %s: the checkpoint has no weights of this head: %s are new and random", name, _some(new))
    return model, info


def _in_trunk(key: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to the base, and not to a head or a pooler."""
    child = key.removeprefix(f"{model.base_model_prefix}.").split(".")[0]
    return child in dict(model.base_model.named_children()).keys() - {"pooler"}


def _siblings(key: str, model: PreTrainedModel) -> set[str]:
    """Return the names of all tensors in a checkpoint of the module to which a tensor belongs."""
    around = key.rpartition(".")[0]
    return {f"{around}.{name}" for name in model.get_submodule(around).state_dict()}


def _some(keys: set[str]) -> str:
    first, *others = sorted(keys)
    return f"{first} and {len(others)} more" if others else first


@contextmanager
def _without_report() -> Iterator[list[str]]:
    """Collect transformers' table of weights in the yielded list instead of the log."""
    reports: list[str] = []

    def other(record: logging.LogRecord) -> bool:
        if is_report := "LOAD REPORT" in record.getMessage():
            reports.append(record.getMessage())
        return not is_report

    chosen = logging.getLogger("transformers.modeling_utils")
    chosen.addFilter(other)
    try:
        yield reports
    finally:
        chosen.removeFilter(other)
