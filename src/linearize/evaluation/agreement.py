"""Compare the student's predictions with its teacher's: by token, by position in the document, and in generations.

A student with the teacher's loss can still predict other tokens, and one such token changes a whole generation.

Axes: N rows, L tokens per row, B rows per forward pass, V vocabulary, C predicted tokens at a time, P prompts, T prompt
tokens, K new tokens.
"""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.data.rows import IGNORED, PackedRows, inference, on_device
from linearize.data.splits import ENOUGH, spread
from linearize.distributed import all_reduce_sum, shard_batches
from linearize.evaluation.intervals import Interval, Totals, intervals, require_shape
from linearize.evaluation.perplexity import TokenLosses, require_same_tokens

_CHUNK_ELEMENTS = 2**24  # the most fp32 numbers at a time, besides the models' own logits: 64 MiB
_COPIES = 4  # [C, V] tensors that exist at a time
_BATCH_SIZE = 8  # prompts per call of generate()
_ENDED = -1  # in place of tokens after the end of a text


# --- token by token ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Agreement of student and teacher on the same tokens.

    Attributes:
        top1: share of places where both have the same most likely token.
        kl: KL(teacher || student) in nats per token. reverse_kl: KL(student || teacher).
        top1_beyond, kl_beyond: beyond the window; None: too few documents have tokens there.
    """

    top1: Interval
    kl: Interval
    reverse_kl: Interval
    top1_beyond: Interval | None
    kl_beyond: Interval | None
    tokens: int
    documents: int | None


def logit_agreement(
    teacher: nn.Module,
    student: nn.Module,
    rows: PackedRows,
    *,
    batch_size: int,
    window_size: int,
    samples: int = 1000,
    seed: int = 0,
) -> Agreement:
    """Compare the next-token distributions of two models, on the tokens of `token_losses`.

    Both read `batch_size` rows at a time; logits of one batch of each, in the models' own dtype, are held. Divergences
    are computed in fp32. Several processes divide the batches, and all get the result.

    Raises:
        UserError: the vocabularies differ in size, or too few documents have predicted tokens.
        FloatingPointError: a divergence is not a finite number.
    """
    mask = (rows.labels != IGNORED).cpu()
    mask[:, 0] = False  # nothing stands before the first token
    compared = torch.zeros(3, *mask.shape)
    with inference(teacher), inference(student):
        splits = torch.arange(len(mask)).split(batch_size)
        for number, counts in progress(shard_batches(splits), "agreement"):
            index = splits[number]
            logits = _logits(teacher, rows, index), _logits(student, rows, index)
            if counts:
                compared[:, index] = _compare(*logits, mask[index])
    about = mask, rows.position_ids.cpu(), rows.documents.cpu()
    measured = [TokenLosses(x, *about) for x in all_reduce_sum(compared)]
    if bad := int((~torch.stack([x.loss for x in measured]).isfinite().all(dim=0)).sum()):
        raise FloatingPointError(f"agreement: the divergence of {bad} of {int(mask.sum())} tokens is not finite")
    top1, kl, reverse_kl = intervals([x.totals() for x in measured], samples=samples, seed=seed)
    top1_beyond = kl_beyond = None
    if measured[0].beyond_missing(window_size) is None:
        beyond = [x.beyond(window_size).totals() for x in measured[:2]]
        top1_beyond, kl_beyond = intervals(beyond, samples=samples, seed=seed)
    return Agreement(top1, kl, reverse_kl, top1_beyond, kl_beyond, int(mask.sum()), measured[0].documents)


def _logits(model: nn.Module, rows: PackedRows, index: Int[Tensor, " B"]) -> Float[Tensor, "B L V"]:
    return model(**on_device(rows.rows(index).inputs(), next(model.parameters()).device)).logits


def _compare(
    teacher: Float[Tensor, "B L V"], student: Float[Tensor, "B L W"], mask: Bool[Tensor, "B L"]
) -> Float[Tensor, "3 B L"]:
    """Return equal choice (1 or 0), KL(teacher || student) and KL(student || teacher); 0 where the mask is False.

    Entry t compares the logits at t - 1, which predict token t.
    """
    vocabulary, found = teacher.shape[-1], student.shape[-1]
    if found != vocabulary:
        raise UserError(
            f"student: expected logits for the teacher's {vocabulary} tokens, found {found}; "
            "compare it with the teacher that it was made from"
        )
    result = torch.zeros(3, *mask.shape)
    chunk = max(1, _CHUNK_ELEMENTS // (_COPIES * vocabulary))
    for part in mask.nonzero().split(chunk):
        row, place = part.T
        result[:, row, place] = _divergences(teacher, student, row, place - 1).cpu()
    return result


def _divergences(
    teacher: Float[Tensor, "B L V"], student: Float[Tensor, "B L V"], row: Int[Tensor, " C"], place: Int[Tensor, " C"]
) -> Float[Tensor, "3 C"]:
    choice_p, p = _log_probabilities(teacher, row, place, teacher.device)
    choice_q, q = _log_probabilities(student, row, place, teacher.device)
    # The difference comes first: equal logits give exactly 0. Then in place, to save memory.
    gap = p - q
    kl = p.exp_().mul_(gap).sum(dim=-1)
    reverse_kl = -q.exp_().mul_(gap).sum(dim=-1)
    # A divergence is never negative, but rounding can make it so.
    return torch.stack([(choice_p == choice_q).float(), kl.clamp_min(0), reverse_kl.clamp_min(0)])


def _log_probabilities(
    logits: Float[Tensor, "B L V"], row: Int[Tensor, " C"], place: Int[Tensor, " C"], device: torch.device
) -> tuple[Int[Tensor, " C"], Float[Tensor, "C V"]]:
    """Return the most likely token, and log p of all tokens."""
    chosen = logits[row.to(logits.device), place.to(logits.device)].to(device)
    return chosen.argmax(dim=-1), chosen.log_softmax(dim=-1, dtype=torch.float32)


# --- by position ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionLosses:
    """Mean loss by position in the document. Bin i has the positions from edges[i] to edges[i + 1] - 1.

    A loss is None if too few documents have tokens in the bin, as always in the first: position 0 is not predicted.
    """

    edges: list[int]
    documents: list[int] | None
    losses: dict[str, list[Interval | None]]

    def __post_init__(self) -> None:
        for name, losses in self.losses.items():
            require_shape(name, losses, len(self.edges) - 1)


def loss_by_position(losses: Mapping[str, TokenLosses], *, samples: int = 200, seed: int = 0) -> PositionLosses:
    """Return each candidate's loss in nats per token, by the position of the predicted token (SUPRA, Fig. 3).

    The edges are 0 and the powers of two, up to the largest position; the last edge is that position + 1.

    Raises:
        ValueError: the candidates were not measured on the same tokens.
    """
    require_same_tokens(*losses.values())
    first = next(iter(losses.values()))
    longest = int(first.position.max())
    edges = [0, *(2**i for i in range(longest.bit_length())), longest + 1]
    documents: list[int] = []
    result: dict[str, list[Interval | None]] = {name: [] for name in losses}
    for start, stop in pairwise(edges):
        chosen = (first.position >= start) & (first.position < stop)
        found: list[Interval | None] = [None] * len(losses)
        documents.append(first.where(chosen).documents)
        if documents[-1] >= ENOUGH:
            columns = [x.where(chosen).totals() for x in losses.values()]
            found = [*intervals(columns, samples=samples, seed=seed)]
        for name, interval in zip(losses, found, strict=True):
            result[name].append(interval)
    return PositionLosses(edges, documents, result)


# --- greedy generations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """One prompt, the text after it in its document, and the models' continuations, with special tokens as text."""

    prompt: str
    reference: str
    teacher: str
    student: str


@dataclass(frozen=True)
class Generations:
    """Greedy continuations of the same prompts by both models, of `new_tokens` tokens or fewer if the text ends.

    Attributes:
        agreement: share of new tokens that are equal at the same place. Tokens after the end of the other text count as
            different; the token that ends a text is one of its tokens.
        common_prefix: tokens before the first difference; `new_tokens` if there is none, even if both texts end.
    """

    agreement: Interval
    common_prefix: Interval
    new_tokens: int
    documents: int | None
    samples: list[Generation]


def generation_agreement(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    tokenizer: Tokenizer,
    rows: PackedRows,
    *,
    prompts: int,
    prompt_length: int,
    new_tokens: int,
    shown: int,
    seed: int,
) -> Generations:
    """Continue the beginnings of held-out documents by both models, always with the most likely token.

    The models' own generation settings (sampling, penalties) do not apply, except that the teacher's end tokens end
    both models' texts.

    Args:
        prompts: number of prompts, drawn with `seed`; at least as many as an interval needs, and of different documents
            if there are enough.
        prompt_length: tokens of each prompt.
        shown: number of prompts that are returned as text.

    Raises:
        UserError: too few documents have `prompt_length` + `new_tokens` tokens in one row.
    """
    texts, document = _beginnings(rows, prompt_length + new_tokens, max(ENOUGH, prompts), seed)
    prompt, reference = texts[:, :prompt_length], texts[:, prompt_length:]
    ends = _ends(teacher)
    by_teacher = _continue(teacher, prompt, new_tokens, ends, "teacher")
    by_student = _continue(student, prompt, new_tokens, ends, "student")

    equal = by_teacher == by_student
    same = equal & (by_teacher != _ENDED)
    longer = ((by_teacher != _ENDED) | (by_student != _ENDED)).sum(dim=1).double()
    prefix = equal.long().cumprod(dim=1).sum(dim=1).double()
    counted = (same.sum(dim=1).double(), longer), (prefix, torch.ones_like(prefix))
    columns = [Totals.of(*x, document) for x in counted]
    agreement, common_prefix = intervals(columns, seed=seed)

    def continuation(index: int, tokens: Int[Tensor, "P K"]) -> str:
        return _continuation(tokenizer, prompt[index], tokens[index])

    samples = [
        Generation(_decode(tokenizer, prompt[i]), *(continuation(i, x) for x in (reference, by_teacher, by_student)))
        for i in range(min(shown, len(prompt)))
    ]
    return Generations(agreement, common_prefix, new_tokens, len(document.unique()), samples)


def _beginnings(rows: PackedRows, length: int, count: int, seed: int) -> tuple[Int[Tensor, "P M"], Int[Tensor, " P"]]:
    """Return the first `length` tokens of `count` documents that have as many, in the order of rows, and the documents.

    If there are fewer documents, the beginnings of rows that continue a document are used too.
    """
    width = rows.input_ids.shape[1]
    start = (rows.position_ids.cpu() == 0).flatten().nonzero()[:, 0]
    end_of_row = (start // width + 1) * width
    following = torch.cat([start[1:], torch.tensor([rows.input_ids.numel()])])
    size = torch.minimum(following, end_of_row) - start
    enough = start[size >= length]
    document = rows.documents.cpu().flatten()[enough]
    if len(document.unique()) < ENOUGH:
        longest = int(size.max()) if len(size) else 0
        raise UserError(
            f"generations: expected at least {ENOUGH} held-out documents of {length} tokens (prompt and continuation) "
            f"in one row, found {len(document.unique())}, the longest document has {longest}; use longer documents and "
            "a longer data.sequence_length, or shorter prompts and continuations"
        )
    chosen = spread(document.tolist(), count, f"prompts {seed}")
    return rows.input_ids.cpu().flatten()[enough[chosen][:, None] + torch.arange(length)], document[chosen]


def _ends(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end the model's texts."""
    ends: Any = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _continue(
    model: PreTrainedModel, prompts: Int[Tensor, "P T"], new_tokens: int, ends: list[int], title: str
) -> Int[Tensor, "P K"]:
    """Return greedy continuations on the CPU, with `_ENDED` after the first of `ends`."""
    tokens = torch.zeros(len(prompts), new_tokens, dtype=torch.int64)
    splits = torch.arange(len(prompts)).split(_BATCH_SIZE)
    generate: Any = model.generate
    with inference(model) as device, greedy(model, new_tokens, ends):
        for number, counts in progress(shard_batches(splits), f"generating: {title}"):
            ids = prompts[splits[number]].to(device)
            # The mask says that there is no padding: a prompt may contain the padding token.
            made = generate(ids, attention_mask=torch.ones_like(ids))
            made = made[:, prompts.shape[1] :].cpu()
            if counts:
                tokens[splits[number]] = F.pad(made, (0, new_tokens - made.shape[1]), value=_ENDED)
    tokens = all_reduce_sum(tokens)
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype)).long()
    return tokens.masked_fill(is_end.cumsum(dim=1) - is_end > 0, _ENDED)


@contextmanager
def greedy(model: PreTrainedModel, new_tokens: int, ends: list[int]) -> Generator[None, None, None]:
    """Make `model.generate()` decode greedily in the `with` block, by replacing the model's own settings."""
    own: Any = model.generation_config
    # Texts that end are padded to the length of others in the batch; the padding token does not matter.
    special = {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
    compiling = ("cache_implementation", "compile_config", "disable_compile")
    kept = {name: getattr(own, name) for name in compiling}
    model.generation_config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, **special, **kept)
    try:
        yield
    finally:
        model.generation_config = own


def _decode(tokenizer: Tokenizer, tokens: Int[Tensor, " T"]) -> str:
    return tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)  # type: ignore[return-value]


def _continuation(tokenizer: Tokenizer, prompt: Int[Tensor, " T"], tokens: Int[Tensor, " K"]) -> str:
    """Return the text that tokens add to the prompt's; decoded separately, they would lose the space before them."""
    tokens = tokens[tokens != _ENDED]
    before, whole = _decode(tokenizer, prompt), _decode(tokenizer, torch.cat([prompt, tokens]))
    return whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, tokens)
