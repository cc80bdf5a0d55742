"""Converted attention layers: the model's own attention class with another function of q, k and v.

This file, `classes` and `convert` alone use private parts of transformers: they replace ``module.__class__`` and give
each layer a config with its own ``_attn_implementation_internal``.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.base import UserError
from linearize.hf.architectures import architecture_of
from linearize.hf.cache import layer_of
from linearize.hf.keywords import LAYOUT, ROTATED
from linearize.hf.offload import keep_in_memory
from linearize.hf.unsupported import CONTINUOUS_BATCHING
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import Mixer
from linearize.ops.layout import SequenceLayout

IMPLEMENTATION = "linearize"
CALL = "linearize_call"  # keyword that carries a layer's call to the attention function

# Keyword arguments that the attention function receives and ignores.
IGNORED = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "sliding_window", "deterministic"}
    | {"seq_idx"}  # of TRL's packed rows: positions separate documents, as in softmax attention
    | {"output_router_logits"}
    | {"tokenizer", "assistant_tokenizer"}  # generate() passes them to every forward
)


@dataclass(frozen=True)
class Call:
    """Arguments of the attention function besides q, k and v.

    Attributes:
        rotated: length of the text that sets the rotary angles; None: they do not depend on it.
        hidden: [B, T, E], for mixers that read it, else None.
        rope: cosines and sines, [B or 1, T, R] each, if q and k are not rotated yet; None: they are.
    """

    cache: Any
    layout: SequenceLayout | None
    rotated: int | None
    hidden: Tensor | None
    rope: tuple[Tensor, Tensor] | None


Observer = Callable[[nn.Module, AttnInputs, SequenceLayout | None], Tensor]


class LinearizedAttention:
    """Mixin for a model's own attention class; `mixer` is a child module."""

    mixer: Mixer
    softmax_class: Any  # the model's own attention class, the last base
    bidirectional = False  # of encoders: tokens see later tokens too
    softmax_implementation: str
    observer: Observer | None = None
    use_rope: bool | int = True  # SmolLM3's own attribute; false: the layer does not rotate
    unrotated_forward: Callable[..., Any]  # the parent's forward without RoPE
    arguments: tuple[str, ...]  # names of the parent's forward's arguments, in order
    cache_argument: str  # the one of them that is the cache

    def __init_subclass__(cls) -> None:
        cls.softmax_class = cls.__bases__[-1]
        parent_forward: Any = cls.softmax_class.forward
        cls.unrotated_forward = _without_rope(parent_forward)
        cls.arguments = tuple(inspect.signature(parent_forward).parameters)[1:]
        if "cache" in cls.arguments:  # its name since 5.24
            raise UserError(
                f"transformers: expected 5.17 to 5.23, found {transformers.__version__}; install another version, with "
                "`pip install 'transformers>=5.17,<5.24'`"
            )
        cls.cache_argument = "layer_past" if "layer_past" in cls.arguments else "past_key_values"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the parent's forward without the cache: the mixer carries a state instead of keys and values.

        If the mixer reads unrotated q and k, this is the forward without RoPE (`_without_rope`).
        """
        if not isinstance(self, LinearizedAttention):  # accelerate calls a method bound before `softmax_attention`
            return type(self).forward(self, *args, **kwargs)
        children = () if torch.compiler.is_compiling() else self.children()  # type: ignore[attr-defined]
        if any("_hf_hook" in vars(child) for child in children):
            keep_in_memory(self.mixer)
        kwargs |= dict(zip(self.arguments, args, strict=False))
        hidden = kwargs["hidden_states"] if self.mixer.wants_hidden else None
        rope = kwargs.get("position_embeddings") if self.mixer.wants_unrotated and self.use_rope else None
        layout, rotated = kwargs.pop(LAYOUT, None), kwargs.pop(ROTATED, None)
        call = Call(kwargs.get(self.cache_argument), layout, rotated, hidden, rope)
        if self.cache_argument in kwargs:
            kwargs[self.cache_argument] = None
        forward = super().forward if rope is None else self.unrotated_forward  # type: ignore[misc]
        return forward(**kwargs, **{CALL: call})


def _without_rope(forward: Any) -> Callable[..., Any]:
    """Return a copy of an attention's `forward` that does not rotate queries and keys.

    The copy's globals have no `__name__`, by which torch.compile would find the original function in the module.

    Returns:
        the function. If `forward` does not call `apply_rotary_pos_emb` by this name, RoPE would be applied twice; then
        the returned function raises TypeError.
    """
    if "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return _cannot_leave_rope_out
    variables = {name: x for name, x in forward.__globals__.items() if name != "__name__"}
    variables["apply_rotary_pos_emb"] = lambda query, key, *_, **__: (query, key)
    copied = FunctionType(forward.__code__, variables, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _cannot_leave_rope_out(self: Any, **_: Any) -> Any:
    raise TypeError(
        f"{type(self).__name__}: expected an attention whose forward calls apply_rotary_pos_emb, found another; this "
        "version of transformers is not supported with mixers that read queries and keys before RoPE"
    )


def linearized_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a linearized layer's output [B, T, H, D] from q, k and v [B, H, T, D]: the registered attention function.

    `attention_mask` (4D, built for layers that stay softmax) is ignored: the layout has padding and documents.
    Attention dropout is ignored, since there are no attention weights.

    Raises:
        ValueError: a keyword argument that would change the result, and that linear attention does not support.
        UserError: a keyword argument of continuous batching.
    """
    if kwargs.get("cache") is not None:
        raise UserError(CONTINUOUS_BATCHING.format(found=f"cache={type(kwargs['cache']).__name__}"))
    call = kwargs.pop(CALL)
    unknown = [name for name, value in kwargs.items() if name not in IGNORED and value is not None]
    if is_causal is not None and is_causal == module.bidirectional:
        unknown.append(f"is_causal={is_causal}")
    if unknown:
        kind = "bidirectional" if module.bidirectional else "causal"
        raise ValueError(
            f"{type(module).__name__}: expected {kind} attention without {', '.join(unknown)}; "
            "a linearized layer cannot apply it"
        )
    unrotated = None
    if call.rope is not None:
        unrotated = query, key
        query, key = _rotate(module, query, key, call.rope)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    inputs = AttnInputs(query, key, value, scale, softcap, call.hidden, unrotated, call.rope)
    if module.observer is not None:
        y = module.observer(module, inputs, call.layout)
    elif call.cache is None:
        y = module.mixer(inputs, call.layout)
    elif module.bidirectional:
        raise UserError(
            f"past_key_values: expected none, because an encoder reads all of its tokens at once; "
            f"found {type(call.cache).__name__}"
        )
    else:
        layer = layer_of(call.cache, module)
        if layer.reads_in_full(inputs.q.shape[2]):
            y = softmax_output(module, inputs, call.layout)
            layer.absorb(module.mixer, inputs, call.layout)
        else:
            y = layer.step(module.mixer, inputs, call.layout)
        if call.rotated is not None:
            layer.rotated = call.rotated
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, linearized_attention)


def _teacher_module(module: Any) -> Any:
    """Return the Python module of the attention class that `module` had before it was linearized."""
    return sys.modules[module.softmax_class.__module__]


def _rotate(module: Any, query: Tensor, key: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return query and key after RoPE by the function of the layer's own attention; dimensions without angles stay.

    For most architectures this function skips these dimensions itself; for Phi, the attention does.
    """
    rotate, turned = _teacher_module(module).apply_rotary_pos_emb, rope[0].shape[-1]
    if turned == query.shape[-1]:
        return rotate(query, key, *rope)
    rotated = rotate(query[..., :turned], key[..., :turned], *rope)
    both = zip(rotated, (query, key), strict=True)
    query, key = (torch.cat([x, whole[..., turned:]], dim=-1) for x, whole in both)
    return query, key


def attach(module: Any, mixer: nn.Module, linearized_class: Any, config: Any) -> None:
    """Turn one attention module into its linearized class, in place."""
    module.mixer, module.model_config = mixer, config
    module.softmax_implementation = config._attn_implementation
    module.config = copy.copy(config)
    module.config._attn_implementation_internal = IMPLEMENTATION
    module.__class__ = linearized_class
    if "_old_forward" in vars(module):  # accelerate calls it; it is bound to the previous class
        module._old_forward = MethodType(linearized_class.forward, module)


def detach(module: Any) -> None:
    """Turn a linearized attention module back into its base's class, in place, without its mixer."""
    module.__class__ = module.softmax_class
    del module.mixer, module.model_config, module.softmax_implementation
    vars(module).pop("observer", None)


def linearized_layers(model: nn.Module) -> dict[str, Any]:
    """Return the converted attention modules of `model`, by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearizedAttention)}


def mixer_weights(model: nn.Module) -> set[str]:
    """Return the names of all mixer tensors in a checkpoint of `model`."""
    return {
        f"{name}.mixer.{key}" for name, layer in linearized_layers(model).items() for key in layer.mixer.state_dict()
    }


@contextmanager
def softmax_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let `model` compute softmax attention exactly as before conversion, in the `with` block."""
    layers = list(linearized_layers(model).values())
    saved = [(layer.__class__, layer.config) for layer in layers]
    implementation = model.config._attn_implementation_internal
    try:
        if layers:
            model.config._attn_implementation_internal = layers[0].softmax_implementation
        for layer in layers:
            layer.__class__, layer.config = layer.softmax_class, model.config
        yield model
    finally:
        model.config._attn_implementation_internal = implementation
        for layer, (cls, config) in zip(layers, saved, strict=True):
            layer.__class__, layer.config = cls, config


@contextmanager
def observed(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Replace every converted layer's output by `observer(layer, inputs, layout)` in the `with` block."""
    layers = list(linearized_layers(model).values())
    try:
        for layer in layers:
            layer.observer = observer
        yield
    finally:
        for layer in layers:
            layer.observer = None


@contextmanager
def replaced_mixers(model: nn.Module, make: Callable[[Any], nn.Module]) -> Iterator[None]:
    """Replace every converted layer's mixer by `make(mixer)` in the `with` block. Controls share all other weights."""
    layers = list(linearized_layers(model).values())
    saved = [layer.mixer for layer in layers]
    try:
        for layer in layers:
            layer.mixer = make(layer.mixer)
        yield
    finally:
        for layer, mixer in zip(layers, saved, strict=True):
            layer.mixer = mixer


def softmax_output(module: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
    """Return the output of the layer's original attention for `inputs`, [B, H, T, D], 0 for padding.

    Documents are computed one at a time, without a T x T mask.
    """
    if layout is None:
        return _softmax(module, inputs)
    y = torch.zeros_like(inputs.q)
    position, document = layout.key_position, layout.key_document
    for row in range(len(y)):
        valid = (position[row] >= 0).nonzero().squeeze(1)
        _, lengths = document[row, valid].unique_consecutive(return_counts=True)
        for slots in valid.split(lengths.tolist()):
            q, k, v = (x[row : row + 1].index_select(2, slots) for x in (inputs.q, inputs.k, inputs.v))
            part = AttnInputs(q, k, v, inputs.scaling, inputs.softcap)
            y[row : row + 1, :, slots] = _softmax(module, part)
    return y


def sliding_window(module: Any) -> int | None:
    """Return the window of the layer's original attention in tokens, the query's own included; None: no limit.

    A decoder's window has earlier tokens only, an encoder's both sides.
    """
    architecture = architecture_of(module)
    if architecture is None or not architecture.slides:
        return None
    return getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))


def _softmax(module: Any, inputs: AttnInputs) -> Tensor:
    """Return softmax outputs of rows that are one document each, without padding."""
    implementation, length = module.softmax_implementation, inputs.q.shape[2]
    eager = _teacher_module(module).eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    # The window of the layer's own sliding attention, if it has one; eager and sdpa know it only from masks.
    window = sliding_window(module)
    reach = length if window is None else min(window, length)
    slides = reach < length and (function is eager or implementation == "sdpa")
    mask = None
    if slides or (function is eager and not module.bidirectional):
        slot = torch.arange(length, device=inputs.q.device)
        lag = slot[:, None] - slot
        hidden = lag.abs() >= reach if module.bidirectional else (lag < 0) | (lag >= reach)
        mask = inputs.q.new_zeros(length, length).masked_fill(hidden, torch.finfo(inputs.q.dtype).min)[None, None]
    options = {"sliding_window": window} | ({} if inputs.softcap is None else {"softcap": inputs.softcap})
    y = function(module, inputs.q, inputs.k, inputs.v, mask, scaling=inputs.scaling, dropout=0.0, **options)[0]
    return y.transpose(1, 2)
