"""Cache layers of linearized layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticCache

from linearize.base import UserError
from linearize.hf.prefill import FULL, PREFILL_COSTS, PREFILLS
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import STATE_DTYPES, State, TokenCounts
from linearize.mixers.recording import Recording
from linearize.ops.layout import SequenceLayout


class SharedCounts:
    """The token counts that layers of one cache share while they have seen equally many slots.

    Tensors that depend on the counts are then computed once for all layers.
    """

    def __init__(self) -> None:
        self._length, self._counts = 0, None

    def shared(self, state: State, length: int) -> State:
        """Return the state with the counts of earlier layers that have seen `length` slots too, else with its own."""
        counts: TokenCounts | None = self._counts
        if counts is None or self._length != length or counts.seen.device != state.counts.seen.device:
            self._length, self._counts = length, (counts := state.counts)
        return state.with_counts(counts)  # all groups of a layer's heads on one

    def forget(self) -> None:
        """Drop the shared counts: layers may have seen different tokens."""
        self._counts = None


class LinearizedCacheLayer(CacheLayerMixin):
    """One mixer's `State` inside an ordinary transformers `Cache`.

    Its size is constant, except for heads that keep all keys.
    """

    is_compileable = True
    is_croppable = False
    # transformers takes the mask sizes of softmax layers from the cache's first sliding layer (== True) and first full
    # layer (== False, or falsy). Linearized layers have other sizes, so this is neither.
    is_sliding = "neither"
    supports_early_init = False

    def __init__(self, dtype: torch.dtype | None = None, *, full_prefill: bool = False) -> None:
        """Make an empty layer.

        Args:
            dtype: of S between steps; None: the dtype of computation, fp32, or fp64 for an fp64 model.
            full_prefill: whether the teacher's softmax attention reads the tokens of the first call.
        """
        super().__init__()
        self.dtype, self.full_prefill = dtype, full_prefill
        self.shared_counts = SharedCounts()  # replaced if the layer is in a cache with others
        self.kept: State | None = None  # in `dtype`
        self.length: int | Tensor = 0  # slots seen, padding included, as transformers counts positions
        # Length of the text that set the keys' rotary angles, if these depend on it. It may exceed `length`: tokens and
        # longer rows of the batch may have been removed since.
        self.rotated: int | None = None
        self.padded = False  # whether there may be padding among the slots; if not, steps skip the check
        self.recording: Recording | None = None

    @property
    def seen(self) -> Tensor:
        """Return how many tokens, padding not counted, each row of the state has seen, [B]."""
        assert self.kept is not None
        return self.kept.counts.seen

    @property
    def state(self) -> State | None:
        """Return the state with S in the dtype of computation, as the mixer reads it."""
        return self.kept if self.kept is None or self.dtype is None else self.kept.matrices_in(None)

    @state.setter
    def state(self, state: State | None) -> None:
        self.kept = None if state is None else self._stored(state)

    def _stored(self, state: State) -> State:
        return state if self.dtype is None else state.matrices_in(self.dtype)

    def step(self, mixer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        """Return the output of `mixer` for more slots, [B, H, T, D], and keep the state after them."""
        if layout is not None:  # `padded` is only written here: reading it would make another graph
            self.padded = True
        if self.recording is None:
            y, state = mixer.step(inputs, self.state, layout)
        else:
            y, state = self.recording.step(mixer, inputs, self.state, layout)
        self.advance(state, inputs.q.shape[2])
        return y

    def reads_in_full(self, tokens: int) -> bool:
        """Return whether softmax attention reads a call of this many tokens, and the state absorbs it afterwards."""
        return self.full_prefill and not self.is_initialized and tokens > 1

    def absorb(self, mixer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> None:
        """Keep the state after the tokens of a first call, without computing their outputs."""
        self.padded = layout is not None
        if self.recording is None:
            state = mixer.absorb(inputs, None, layout)
        else:
            state = self.recording.absorb(mixer, inputs, layout)
        self.advance(state, inputs.q.shape[2])

    def advance(self, state: State, tokens: int) -> None:
        """Keep `state`, the state after `tokens` more slots."""
        assert isinstance(self.length, int)
        self.length, self.is_initialized = self.length + tokens, True
        self.state = self.shared_counts.shared(state, self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the mixer makes the first state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise RuntimeError("a linearized layer keeps a state, not keys and values; its mixer advances it")

    # These return tensors in static layers, as transformers' own do, although the declared types are int.
    def get_seq_length(self) -> int | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.length

    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query_length: int
    ) -> tuple[int | Tensor, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state."""
        return 0 if self.kept is None else self.kept.nbytes

    def offload(self) -> None:
        """Do nothing: a state of constant size stays on its device."""

    def prefetch(self) -> None:
        """Do nothing: a state of constant size stays on its device."""

    @property
    def record_past(self) -> bool:
        """Return whether the last tokens can be taken back; transformers reads it by this name."""
        return self.recording is not None

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        self.recording = Recording() if wanted else None

    def activate_past_recording(self) -> None:
        """Record tokens from now on, so that `crop` can take them back."""
        if self.recording is None:
            self.record_past = True

    def _forget(self) -> None:
        """Drop recorded tokens and shared counts."""
        self.shared_counts.forget()
        if self.recording is not None:
            self.recording = Recording()

    def reset(self) -> None:
        self.state, self.length, self.is_initialized = None, 0, False
        self.rotated, self.padded = None, False
        self._forget()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Restore the exact state before the last -`tokens_to_remove` tokens.

        A positive number is the number of tokens that stay, as in older releases of transformers.

        Raises:
            RuntimeError: fewer tokens are recorded.
        """
        if not self.is_initialized:
            return  # it has seen none
        count = int(tokens_to_remove)
        count = max(int(self.length) - count, 0) if count > 0 else -count
        recorded = 0 if self.recording is None else self.recording.length
        if count > recorded:
            raise RuntimeError(
                f"cannot take {count} tokens back out of a linear attention state that recorded {recorded}; copy the "
                "cache before the tokens you may want to undo (linearize.fork_state) and continue from the copy, or "
                "call cache.activate_past_recording() before them, once the cache has seen a token"
            )
        if self.recording is not None and count:
            self.state, self.length = self.recording.take_back(count), self.length - count
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)
        self._forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.repeat(repeats)
        self._forget()


class StaticLinearizedCacheLayer(LinearizedCacheLayer):
    """One mixer's state inside a static cache: every step overwrites the tensors of the previous state.

    So a compiled step is one graph for all tokens, with fixed addresses that CUDA graphs can replay. As in other layers
    of a static cache, no token can be taken back.
    """

    def __init__(self, dtype: torch.dtype | None, slots: int, *, full_prefill: bool = False) -> None:
        """Make an empty layer with room for `slots` tokens in heads that keep all keys."""
        super().__init__(dtype, full_prefill=full_prefill)
        self.slots = slots
        self.length = torch.tensor(0)  # an int would make another graph for each length
        self.spare: tuple[State, Tensor] | None = None  # after a reset: the state and the length to write to

    def _stored(self, state: State) -> State:
        """Return the state in `dtype` with unshared counts: in-place updates would make cached values stale."""
        stored = super()._stored(state)
        return stored.with_counts(TokenCounts(stored.counts.seen, shared=False))

    def advance(self, state: State, tokens: int) -> None:
        if state.grows:  # `slots` is not read elsewhere: a compiled step would depend on it
            if not torch.compiler.is_compiling() and int(self.length) + tokens > self.slots:
                raise ValueError(
                    f"static cache: expected room for {int(self.length) + tokens} tokens, because some heads keep all "
                    f"keys, found room for {self.slots}; make it with a larger max_cache_len"
                )
            state = state.with_room(self.slots)
        if self.kept is None:
            self._start(state, tokens)
            return
        assert isinstance(self.length, Tensor)
        for kept, new in zip(self.kept.tensors(), state.tensors(), strict=True):
            kept.copy_(new)
        self.length.add_(tokens)

    def _start(self, state: State, tokens: int) -> None:
        """Keep the state after the first call, in the tensors of the previous text if they fit."""
        stored = self._stored(state)
        if self.spare is not None and _can_hold(self.spare[0], stored):
            self.kept, self.length = self.spare
            for kept, new in zip(self.kept.tensors(), stored.tensors(), strict=True):
                kept.copy_(new)
            self.length.fill_(tokens)
        else:
            self.kept = stored = self._stored(state.map(Tensor.clone))
            self.length = torch.tensor(tokens, device=stored.tensors()[0].device)
            if not torch.compiler.is_compiling():
                for x in (*stored.tensors(), self.length):
                    torch._dynamo.mark_static_address(x)
        self.spare, self.is_initialized = None, True

    def reset(self) -> None:
        """Forget all tokens, but keep the tensors: captured CUDA graphs can be replayed for another text."""
        assert isinstance(self.length, Tensor)
        if self.kept is not None:
            self.spare = self.kept, self.length
        self.kept, self.length = None, torch.tensor(0)
        self.is_initialized, self.rotated, self.padded = False, None, False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the size of a small mask, equal at every step. It is called only if no softmax layer reads masks."""
        return query_length, 0

    def activate_past_recording(self) -> None:
        """Do nothing: a static cache records no tokens."""


def _can_hold(spare: State, state: State) -> bool:
    """Return whether every tensor of `state` can be written to its counterpart in `spare`, in place."""
    mine, theirs = spare.named_tensors(), state.named_tensors()
    if mine.keys() != theirs.keys():
        return False
    return all(
        x.shape == theirs[name].shape
        and x.dtype == theirs[name].dtype
        and x.device == theirs[name].device
        and (torch.is_inference_mode_enabled() or not x.is_inference())
        for name, x in mine.items()
    )


def layer_of(cache: Cache, module: Any) -> LinearizedCacheLayer:
    """Return a linearized attention module's layer of `cache`; if an empty layer of another kind is there, replace it.

    A new layer keeps S between steps in the config's `state_dtype`, and reads a first call by its `prefill`.

    Raises:
        ValueError: the layer already holds keys and values of a softmax model.
        UserError: an unknown `state_dtype` or `prefill`.
    """
    index, config = module.layer_idx, module.model_config
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    layer: Any = cache.layers[index]
    if isinstance(layer, LinearizedCacheLayer):
        return layer
    if layer.is_initialized and layer.get_seq_length():
        raise ValueError(
            f"cache layer {index}: expected an empty or a linearized layer, found {type(layer).__name__} with "
            f"{layer.get_seq_length()} tokens; a softmax model's cache cannot be continued, start from an empty one"
        )
    if config.state_dtype not in STATE_DTYPES:
        raise UserError(
            f"config.state_dtype: expected one of {', '.join(map(str, STATE_DTYPES))}; found {config.state_dtype!r}"
        )
    if config.prefill not in PREFILLS:
        raise UserError(f"config.prefill: expected {' or '.join(PREFILL_COSTS)}, found {config.prefill!r}")
    dtype, full = STATE_DTYPES[config.state_dtype], config.prefill == FULL
    if type(cache) is StaticCache:
        made = StaticLinearizedCacheLayer(dtype, layer.max_cache_len, full_prefill=full)
    else:
        made = LinearizedCacheLayer(dtype, full_prefill=full)
    ours = (layer for layer in cache.layers if isinstance(layer, LinearizedCacheLayer))
    made.shared_counts = next((layer.shared_counts for layer in ours), made.shared_counts)
    cache.layers[index] = made
    return made


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the tensors that a layer keeps of the tokens seen, by name; empty before the first token.

    Raises:
        UserError: a layer of a static, quantized or other special cache.
    """
    if isinstance(layer, LinearizedCacheLayer):
        return {} if layer.kept is None else layer.kept.named_tensors()
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UserError(
            f"state: expected the cache that generate() uses by default, found one with a {type(layer).__name__}; "
            "generate without cache_implementation"
        )
    return {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}


def first_with_state(cache: Cache) -> LinearizedCacheLayer | None:
    """Return the first linearized layer of a cache that has a state, or None."""
    layers = (layer for layer in cache.layers if isinstance(layer, LinearizedCacheLayer))
    return next((layer for layer in layers if layer.kept is not None), None)


def holds_keys(cache: Any) -> bool:
    """Return whether softmax layers have seen tokens; they need the mask of these tokens."""
    return any(not isinstance(layer, LinearizedCacheLayer) and layer.get_seq_length() for layer in cache.layers)


def fill_layer(layer: Any, tensors: dict[str, Tensor], length: int, rotated: int | None) -> None:
    """Put `layer_tensors` of a layer that saw `length` slots into an empty layer; `rotated` as in the layer."""
    if isinstance(layer, LinearizedCacheLayer):
        layer.rotated = rotated
        state = State.from_named_tensors(tensors)
        # The tensors may come from a layer with another dtype of S.
        layer.advance(state.matrices_in(None) if layer.dtype is None else state, length)
        layer.padded = bool((state.counts.seen != length).any())
        return
    layer.update(tensors["keys"], tensors["values"])
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length


def same_size_mask(mask: Tensor | None, cache: Cache | None) -> Tensor | None:
    """Pad the 2D mask [B, past + 1] of one more token by zeros to the size of a static cache: one graph for all steps.

    Returns None if no layer of the static cache reads masks. Masks of other caches, and with padding in the last slot,
    are returned unchanged.
    """
    if mask is None or type(cache) is not StaticCache or not bool(mask[:, -1].all()):
        return mask
    slots = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
    return torch.nn.functional.pad(mask, (0, max(slots - mask.shape[1], 0))) if slots else None
