"""Find the padding and the documents of a call before a model's layers run, and pass them to the layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from linearize.base import UserError
from linearize.hf.architectures import architecture_of
from linearize.hf.cache import first_with_state, holds_keys
from linearize.hf.keywords import LAYOUT, ROTATED
from linearize.hf.unsupported import length_of_angles, refuse_context_parallel, refuse_other_angles
from linearize.ops.layout import SequenceLayout


def layout_hook(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass padding and document boundaries to linearized layers: a forward pre-hook of the module that runs the layers.

    If a call has padding but no position ids, positions are counted from each row's first token, as `generate` does.
    transformers would count padding too, which does not change softmax with RoPE, but does change feature maps.
    """
    refuse_context_parallel()
    given = _arguments(model, args, kwargs)
    tokens = _tokens(given)
    if tokens is None:
        return args, kwargs  # the model raises an error about the missing argument
    mask, cache = given.get("attention_mask"), given.get("past_key_values")
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        mask = _whole_mask(mask, given.get("position_ids"), cache, tokens.shape[1])
        if mask is not None and mask.shape[1] > given["attention_mask"].shape[1]:
            given = given | {"attention_mask": mask}
            args, kwargs = (), given
    layout = read_layout(mask, _positions(model, given), *tokens.shape[:2])
    position_ids = given.get("position_ids")
    if mask is not None and position_ids is None:
        position_ids = _without_padding(mask, tokens.shape[1])
        args, kwargs = (), given | {"position_ids": position_ids}
    rotated = length_of_angles(model.config, cache, position_ids, tokens.shape[1])
    refuse_other_angles(model.config, cache, rotated, tokens.shape[1])
    return args, kwargs | {LAYOUT: layout} | ({} if rotated is None else {ROTATED: rotated})


def _whole_mask(mask: Tensor | None, position_ids: Tensor | None, cache: Any, tokens: int) -> Tensor | None:
    """Return the mask over all slots, including the state's, and check that it has the padding of the state.

    A state knows how many tokens each row has seen, but not in which slots. Without the mask of these slots, new tokens
    would get wrong positions, also in `generate`, and softmax layers would attend to padding.

    Args:
        mask: None, or [B, slots], 1 for tokens; of the new tokens alone if the state has no padding.
        position_ids: None, or [B or 1, T].
        cache: None, or the state of the tokens before.
        tokens: T.

    Raises:
        UserError: the mask is missing, is too short, or marks other padding.
    """
    if torch.compiler.is_compiling():
        return mask
    slots = 0 if cache is None else int(cache.get_seq_length())
    mask = None if mask is None else mask[:, : slots + tokens]  # `same_size_mask` adds slots for tokens to come
    whole = mask is not None and mask.shape[1] == slots + tokens
    layer = None if cache is None else first_with_state(cache)
    if layer is not None and (layer.padded or whole):
        past = mask[:, :slots] if mask is not None and whole else None
        first = None if position_ids is None or holds_keys(cache) else position_ids[:, 0]
        _check_padding(past, first, layer.seen, slots, tokens)
    if mask is None or whole:
        return mask
    if mask.shape[1] != tokens:
        raise UserError(
            f"attention_mask: expected a mask over all {slots + tokens} slots, those in the state too, or over the "
            f"{tokens} new ones; found one over {mask.shape[1]}; give the whole mask"
        )
    return torch.cat([mask.new_ones(len(mask), slots), mask], dim=1)


def _check_padding(mask: Tensor | None, first: Tensor | None, seen: Tensor, slots: int, tokens: int) -> None:
    """Check that a mask marks as many tokens in the slots of a state as the state has seen.

    Args:
        mask: [B, slots], or None: all slots are tokens.
        first: positions of the first new tokens, [B or 1], if no softmax layer reads masks; else None. Without a mask,
            as in steps of `generate` with a static cache, these positions are checked instead.
        seen: [B].
        slots: of the state, padding included.
        tokens: number of new tokens.

    Raises:
        UserError: the numbers differ.
    """
    if mask is None and first is not None and bool((first.to(seen.device) == seen).all()):
        return
    if mask is not None and len(mask) not in (1, len(seen)):
        raise UserError(f"attention_mask: expected one for the {len(seen)} rows of the state, found {len(mask)} rows")
    marked = seen.new_full(seen.shape, slots) if mask is None else mask.bool().sum(1).to(seen.device).expand_as(seen)
    differs = marked != seen
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise UserError(
            f"attention_mask: expected a mask over all {slots + tokens} slots with the padding of the state, whose row "
            f"{row} has seen {int(seen[row])} tokens in {slots} slots; found "
            + ("none over all slots" if mask is None else f"one with {int(marked[row])} tokens there")
            + "; give the masks of the calls before and of the new tokens, side by side"
        )


def _without_padding(mask: Tensor, tokens: int) -> Tensor | None:
    """Return positions [B, T] of these tokens, counted from each row's first one; None: the model's own are equal.

    Args:
        mask: [B, past + T], 1 for tokens.
    """
    compiling = torch.compiler.is_compiling()  # a compiled step of one token must not read the mask
    if mask.shape[1] == 1 or (not (compiling and tokens == 1) and bool(mask.all())):
        return None
    return (mask.to(torch.int64).cumsum(1) - 1).clamp_min(0)[:, -tokens:]


def _arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward by name."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def _tokens(given: dict[str, Any]) -> Tensor | None:
    """Return the tokens of a call [B, T], or their embeddings [B, T, E]."""
    return given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")


def _positions(model: Any, given: dict[str, Any]) -> Tensor | None:
    """Return position ids that may separate documents; None if a cache is used, as in transformers."""
    use_cache = model.config.use_cache if given.get("use_cache") is None else given["use_cache"]
    return None if use_cache or given.get("past_key_values") is not None else given.get("position_ids")


def keep_documents_apart(model: PreTrainedModel) -> list[RemovableHandle]:
    """Make a base whose masks ignore position ids (OPT) attend within each document of a row, as other bases do.

    Otherwise such a softmax model would attend across packed documents, unlike its student.

    Returns:
        handles to undo this; empty for other bases.
    """
    architecture = architecture_of(model)
    if architecture is None or architecture.parts is None or not architecture.forgets_positions:
        return []
    stack = model.base_model.get_submodule(architecture.parts.stack)
    return [stack.register_forward_pre_hook(_documents_hook, with_kwargs=True)]


@contextmanager
def documents_apart(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Keep attention within each packed document, for every base, in the `with` block; see `keep_documents_apart`."""
    handles = keep_documents_apart(model)
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def _documents_hook(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = _arguments(model, args, kwargs)
    tokens, position_ids = _tokens(given), _positions(model, given)
    if tokens is None or position_ids is None or given.get("attention_mask") is not None:
        return args, kwargs
    like = torch.empty(*tokens.shape[:2], 0, dtype=model.dtype, device=tokens.device)
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=like,
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
    )
    return (), given | {"attention_mask": mask}


def encoder_layout_hook(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass padding to the linearized layers of an encoder: a forward pre-hook. Every row is one document.

    Rows of images have no padding, unless a mask says so.
    """
    refuse_context_parallel()
    given = _arguments(model, args, kwargs)
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if mask is None:
        # Implementations of softmax attention differ in whether they separate such documents.
        if position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any()):
            raise UserError(
                "position_ids: expected positions that go up by 1 from token to token, because there is no "
                "attention_mask, found others; give each document a row of its own, with padding and an attention_mask"
            )
        return args, kwargs
    layout = read_layout(mask, None, *(mask.shape if isinstance(mask, Tensor) and mask.ndim == 2 else (0, 0)))
    return args, kwargs if layout is None else kwargs | {LAYOUT: layout}


def forget_layouts(model: nn.Module) -> None:
    """Remove the hooks for linearized layers from a model that has no such layers any more."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in (layout_hook, encoder_layout_hook):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def read_layout(mask: Any, position_ids: Tensor | None, batch: int, length: int) -> SequenceLayout | None:
    """Return the layout of padding and documents; None: every row is one full document.

    Args:
        mask: None, or the 2D attention mask [B, past + T], 1 for tokens.
        position_ids: [B or 1, T]; without a mask, a step other than 1 starts a new document, as in transformers.

    Raises:
        ValueError: a mask of another kind, which linear attention cannot honour.
    """
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            found = f"{mask.ndim}D" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask: expected a 2D mask [batch, tokens], found {found}; a linearized layer "
                "cannot apply an arbitrary mask"
            )
        valid = mask[:, -length:].bool()
        # A compiled step appends one token to every row; reading the mask would break its graph.
        if (length == 1 and torch.compiler.is_compiling()) or bool(valid.all()):
            return None
        return SequenceLayout.from_valid(valid)
    if position_ids is None or length == 1:
        return None
    starts = (position_ids.diff(dim=-1) != 1).expand(batch, -1)
    if not bool(starts.any()):
        return None
    starts = torch.cat([torch.zeros_like(starts[:, :1]), starts], dim=1)
    slot = torch.arange(length, device=starts.device)
    return SequenceLayout(slot - torch.where(starts, slot, 0).cummax(1).values, starts.cumsum(1), length)
