"""Measure kvpress's presses on given rows; `kvpress.py` runs this with the Python of kvpress's environment.

    .venv-kvpress/bin/python -I benchmarks/presses.py < JOB.json    # -I: or `kvpress` would be kvpress.py beside this

The job on standard input says what to measure (`job` in kvpress.py). Each line on standard output is a result in JSON:
losses of one row, bytes of every cache, seconds of one round, or why a press does not run.

All presses but KVzip compress what one ordinary prefill with full attention leaves, and do not change that prefill. So
each context is read once for all presses and budgets, and KVzip's repetition follows on the same cache. Seconds are
measured apart, each press by itself, as kvpress is used; the losses after it must be the same.

A press that is held reads what follows in pieces, and kvpress's DecodingPress compresses the cache again after each: so
it never has more than its share, as our converted models.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from kvpress import (
    AdaKVPress,
    BasePress,
    CompactorPress,
    DecodingPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVzipPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses.duo_attention_press import PATTERNS_DICT
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

TEACHER = "teacher"
HELD = ", held"  # behind the name of a press: its cache does not grow
PIECE = 16  # tokens that a press which is held reads before it compresses again
Layer = tuple[torch.Tensor, torch.Tensor, Any]
"""Keys and values [1, G, T, D] of one layer's cache, and which of them are masked: (batches, heads, slots), or None."""


def masked_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """Leave out the masked keys, exactly.

    kvpress overwrites them with a key that no query of the call attends to. Such a key does not always exist for as
    many queries as a continuation has; where it does, the result is the same.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        module.masked_key_indices = None  # a prefill, as kvpress has it
    elif (masked := getattr(module, "masked_key_indices", None)) is not None:
        batches, heads, slots = masked
        seen = torch.ones(1, key.shape[1], queries, keys, dtype=torch.bool).tril(keys - queries)
        seen[batches, heads, :, slots] = False
        attention_mask = seen.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


class Whole(BasePress):
    """Compress nothing: the teacher."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys, values


class Several(BasePress):
    """Compress each layer by several presses; the cache itself stays whole."""

    def __init__(self, presses: dict[str, BasePress]) -> None:
        self.presses = presses
        self.kept: dict[str, list[Layer]] = {name: [] for name in presses}

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        for name, press in self.presses.items():
            module.masked_key_indices = None
            kept = press.compress(module, hidden_states, keys, values, attentions, kwargs)
            self.kept[name].append((*kept, module.masked_key_indices))
        module.masked_key_indices = None
        return keys, values


class KVzipBudgets(KVzipPress):
    """KVzip at several budgets, by name: its scores, which do not depend on the budget, are computed once."""

    def __init__(self, budgets: dict[str, float]) -> None:
        super().__init__(compression_ratio=0.5)
        self.budgets = budgets
        self.masked: dict[str, list[Any]] = {}

    def compress_post(self, model: Any) -> None:
        for name, budget in self.budgets.items():
            self.compression_ratio = 1 - budget
            super().compress_post(model)
            self.masked[name] = [layer.self_attn.masked_key_indices for layer in model.model.layers]


def snapkv(removed: float, length: int) -> SnapKVPress:
    """Return SnapKV with a window that fits: all of its window stays, and kvpress's 64 tokens can be too many."""
    kept = int(length * (1 - removed))
    return SnapKVPress(removed, window_size=64 if kept > 64 else kept // 2)


def duo_attention(model: Any, removed: float, length: int) -> DuoAttentionPress:
    """Return DuoAttention with as many streaming heads as it takes.

    Raises:
        LookupError: it has no pattern of the model's heads, or these cannot keep so little.
    """
    if model.config.name_or_path not in PATTERNS_DICT:
        raise LookupError("kvpress has no attention pattern of this model's heads")
    sinks, recent, _ = DuoAttentionPress.load_attention_pattern(model)
    least = (sinks + recent) / length
    if least > 1 - removed:
        raise LookupError(f"a streaming head keeps {sinks + recent} tokens, {least:.0%} of the context")
    press = DuoAttentionPress(head_compression_ratio=removed / (1 - least))
    press.post_init_from_model(model)
    return press


# By name, functions of a model, the share of the cache that is removed, and the context's length in tokens.
PRESSES: dict[str, Callable[[Any, float, int], BasePress]] = {
    "StreamingLLM": lambda model, removed, length: StreamingLLMPress(removed),
    "SnapKV": lambda model, removed, length: snapkv(removed, length),
    "TOVA": lambda model, removed, length: TOVAPress(removed),
    "AdaKV (SnapKV)": lambda model, removed, length: AdaKVPress(snapkv(removed, length)),
    "ExpectedAttention": lambda model, removed, length: ExpectedAttentionPress(removed),
    "AdaKV (ExpectedAttention)": lambda model, removed, length: AdaKVPress(ExpectedAttentionPress(removed)),
    "KeyDiff": lambda model, removed, length: KeyDiffPress(removed),
    "Compactor": lambda model, removed, length: CompactorPress(removed),
    "KVzip": lambda model, removed, length: KVzipPress(removed),
    "DuoAttention": duo_attention,
}


# Presses that can be held, by name. SnapKV scores by the queries of a piece, and needs one more than its window.
HOLDING: dict[str, Callable[[], ScorerPress]] = {
    "SnapKV": lambda: SnapKVPress(window_size=PIECE - 1),
    "TOVA": TOVAPress,
    "KeyDiff": KeyDiffPress,
}


def make_press(model: Any, name: str, budget: float, length: int) -> tuple[BasePress, DecodingPress | None]:
    """Return a press that leaves a share of a context of `length` tokens, and the one that holds it there, if any.

    Raises:
        LookupError: it does not run on this model, or cannot keep so little.
    """
    method = name.removesuffix(HELD)
    if method == name:
        return PRESSES[name](model, 1 - budget, length), None
    kept = int(length * budget) - PIECE
    if kept < 1:
        raise LookupError(f"a piece has {PIECE} tokens, more than it may keep")
    removed = 1 - (kept + 0.5) / length  # half a token more: kvpress rounds down
    holding = DecodingPress(HOLDING[method](), compression_interval=1, target_size=kept)
    return PRESSES[method](model, removed, length), holding


def set_opening(press: BasePress, tokens: int) -> None:
    """Set KVzip's prefix length, within its context, to the tokens that open a text; it assumes those of a chat."""
    if isinstance(press, KVzipPress):
        press.prefix_length = tokens


def prefill(model: Any, row: Any) -> tuple[torch.Tensor, DynamicCache]:
    """Read the context; return the logits of its last token, [V], and the cache."""
    cache = DynamicCache()
    output = model(torch.tensor([row["context"]]), past_key_values=cache, logits_to_keep=1)
    return output.logits[0, -1], cache


def read_continuation(
    model: Any, row: Any, first: torch.Tensor, cache: DynamicCache, holding: DecodingPress | None = None
) -> tuple[float, bool]:
    """Read the continuation; return the scored tokens' mean loss, and whether each is the most likely one.

    Positions go on behind the whole context, whatever the cache keeps of it, as in kvpress's pipeline.

    Args:
        holding: compresses the cache after each piece of PIECE tokens; None: the continuation is read in one call.
    """
    ids = torch.tensor([row["continuation"]])
    positions = len(row["context"]) + torch.arange(ids.shape[1])[None]
    step, read = (PIECE if holding else ids.shape[1]), [first[None]]
    for start in range(0, ids.shape[1], step):
        piece, more = slice(start, start + step), start + step < ids.shape[1]
        with holding(model) if holding and more else nullcontext():
            read.append(model(ids[:, piece], past_key_values=cache, position_ids=positions[:, piece]).logits[0])
        if holding and more and any(layer.keys.shape[2] != holding.target_size for layer in cache.layers):
            raise RuntimeError(f"expected {holding.target_size} pairs in every layer, found another number")
    logits = torch.cat(read)[:-1][-row["scored"] :].float()
    target = ids[0, -row["scored"] :]
    return F.cross_entropy(logits, target).item(), bool((logits.argmax(-1) == target).all())


def compressed(model: Any, row: Any, presses: dict[str, BasePress], kvzip: dict[str, float], opening: int) -> Any:
    """Read the context once; return the last token's logits, and by name the layers that each press keeps.

    Args:
        kvzip: KVzip's budgets by name.
        opening: how many tokens of the context are no text (BOS).
    """
    torch.manual_seed(0)  # Compactor draws a sketch
    several, repeating = Several(presses), KVzipBudgets(kvzip)
    with repeating(model) if kvzip else nullcontext():
        set_opening(repeating, opening)
        with several(model):
            first, cache = prefill(model, row)
    whole = [(layer.keys, layer.values) for layer in cache.layers]
    for name, masks in repeating.masked.items():
        several.kept[name] = [(*pair, masked) for pair, masked in zip(whole, masks, strict=True)]
    return first, several.kept


def load_cache(model: Any, layers: list[Layer]) -> DynamicCache:
    """Return a cache of these keys and values; the model masks what is to be masked of them."""
    cache = DynamicCache()
    for index, (module, (keys, values, masked)) in enumerate(zip(model.model.layers, layers, strict=True)):
        cache.update(keys, values, index)
        module.self_attn.masked_key_indices = masked
    return cache


def cache_sizes(layers: list[Layer], later: int) -> tuple[int, int]:
    """Return the bytes of a sequence's cache after the context, and after `later` more tokens, each of which is kept.

    Masked keys and values do not count, though kvpress leaves them where they are.
    """
    sizes = [0, 0]
    for keys, values, masked in layers:
        heads, slots = keys.shape[1:3]
        pair = (keys[0, 0, 0].numel() + values[0, 0, 0].numel()) * keys.element_size()
        pairs = heads * slots - (0 if masked is None else len(masked[0]))
        sizes[0] += pair * pairs
        sizes[1] += pair * (pairs + heads * later)
    return sizes[0], sizes[1]


def results(job: Any) -> Iterator[dict[str, Any]]:
    """Measure what the job asks for."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = masked_attention
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    rows, opening = job["rows"], job["opening"]
    length = len(rows[0]["context"])
    presses: dict[str, BasePress] = {TEACHER: Whole()}
    kvzip: dict[str, float] = {}
    holding: dict[str, DecodingPress | None] = {}
    for name, press, budget in job["cases"]:
        try:
            presses[name], holding[name] = make_press(model, press, budget, length)
        except LookupError as error:
            yield {"refused": {name: str(error)}}
            continue
        if isinstance(presses[name], KVzipPress):
            kvzip[name] = budget
    shared = {name: press for name, press in presses.items() if name not in kvzip}
    if len(presses) == 1:
        return
    yield {"versions": {name: version(name) for name in ("kvpress", "torch", "transformers")}}

    for number in job["missing"]:
        row, read = rows[number], {}
        first, kept = compressed(model, row, shared, kvzip, opening)
        for name, layers in kept.items():
            read[name] = [read_continuation(model, row, first, load_cache(model, layers), holding.get(name))]
        if number == 0:
            sizes = {name: cache_sizes(x, len(row["continuation"])) for name, x in kept.items()}
            held = {name: cache_sizes(kept[name], PIECE)[1:] * 2 for name, press in holding.items() if press}
            yield {"bytes": sizes | held}
        yield {"first": number, "read": read}

    timed = [TEACHER, *(name for name in job["timed"] if name in presses)]
    if len(timed) == 1:
        return
    row = rows[-1]  # of which the check below costs least
    first, kept = compressed(model, row, shared, kvzip, opening)
    expected = {}
    for name in timed:
        expected[name], _ = read_continuation(model, row, first, load_cache(model, kept[name]), holding.get(name))
    for number in range(job["repeats"]):
        seconds = {}
        for name in timed[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            with presses[name](model):
                set_opening(presses[name], opening)
                first, cache = prefill(model, row)
            seconds[name] = time.perf_counter() - start
            loss, _ = read_continuation(model, row, first, cache, holding.get(name))
            if abs(loss - expected[name]) > 1e-3 and not isinstance(presses[name], CompactorPress):
                raise RuntimeError(f"{name}: by itself {loss:.4f} nats, beside the other presses {expected[name]:.4f}")
        yield {"seconds": seconds}


def main() -> None:
    job = json.load(sys.stdin)
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip warns for every context that it takes long
    transformers_logging.disable_progress_bar()  # of loading weights, many lines where there is no terminal
    torch.set_num_threads(job["threads"])
    torch.set_flush_denormal(True)
    with torch.no_grad():
        for result in results(job):
            print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
