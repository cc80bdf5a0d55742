"""Rows as token documents: text, Alpaca instructions, chats, summaries. Labels mark the tokens that carry the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from linearize.base import UserError, check_text
from linearize.data.config import DataConfig
from linearize.data.rows import IGNORED
from linearize.data.sources import LocatedRow, Row

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
SAMSUM = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n"

PIECE = 2**20  # characters of a text that are tokenized at once: a tokenizer needs far more memory than the text
_MARK = "\ue000"  # stands in no text: for private use
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class TokenDocument:
    """One document: its tokens, and for each the token again, or `IGNORED` where it carries no loss."""

    input_ids: Int64[Tensor, " T"]
    labels: Int64[Tensor, " T"]

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> tuple[TokenDocument, TokenDocument]:
        """The first `length` tokens, and the rest."""
        return (
            TokenDocument(self.input_ids[:length], self.labels[:length]),
            TokenDocument(self.input_ids[length:], self.labels[length:]),
        )


Encoder = Callable[[Sequence[LocatedRow], PreTrainedTokenizerBase, DataConfig], list[TokenDocument]]


def encoder_for(columns: Collection[str], config: DataConfig) -> Encoder:
    """The encoder of `config.format`; `auto` goes by the columns of the first row."""
    if config.format != "auto":
        return _ENCODERS[config.format]
    if "messages" in columns:
        return _ENCODERS["chat"]
    if "instruction" in columns and "output" in columns:
        return _ENCODERS["alpaca"]
    if "dialogue" in columns and "summary" in columns:
        return _ENCODERS["samsum"]
    return _ENCODERS["text"]


def encode_text(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[TokenDocument]:
    """``BOS text EOS``, each only where the tokenizer has it, with loss on every token. Blank texts are left out.

    A text of more than PIECE characters is tokenized piece by piece. Once `config.max_tokens` are reached, the rest of
    it is dropped, and no EOS follows.
    """
    hint = "set data.text_column to the column that holds the text"
    texts = [_string(row, config.text_column, where, hint) for where, row in rows]
    bos, eos = _special(tokenizer.bos_token_id), _special(tokenizer.eos_token_id)
    texts = [text for text in texts if text.strip()]
    short = iter(_tokenise([text for text in texts if len(text) <= PIECE], tokenizer))
    documents = []
    for text in texts:
        if len(text) <= PIECE:
            tokens = [*bos, *next(short), *eos]
        else:
            ids, whole = _tokenise_long(text, tokenizer, config.max_tokens)
            tokens = [*bos, *ids, *(eos if whole else [])]
        input_ids = torch.tensor(tokens, dtype=torch.int64)
        documents.append(TokenDocument(input_ids, input_ids))
    return documents


def _tokenise_long(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> tuple[list[int], bool]:
    """Return the tokens of a long text, at least `most`, and whether the text is whole. Pieces begin at white space."""
    ids: list[int] = []
    start = 0
    while start < len(text) and (most is None or len(ids) < most):
        end = start + PIECE
        if end < len(text):
            end = max((text.rfind(space, start + 1, end) for space in " \n"), default=-1)
            end = start + PIECE if end < 0 else end
        ids += _tokenise([text[start:end]], tokenizer)[0]
        start = end
    return ids, start >= len(text)


def encode_alpaca(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[TokenDocument]:
    """``BOS prompt`` without loss, then ``output EOS`` with it (LoLCATs; the Stanford Alpaca templates)."""
    hint = "data.format alpaca needs the columns instruction and output"
    prompts, outputs = [], []
    for where, row in rows:
        instruction, output = (_string(row, column, where, hint) for column in ("instruction", "output"))
        context = _string(row, "input", where, hint) if row.get("input") is not None else ""
        template = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        prompts.append(template.format(instruction=instruction, input=context))
        outputs.append(output)
    return _completions(prompts, outputs, tokenizer)


def encode_samsum(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[TokenDocument]:
    """``BOS prompt`` without loss, then ``summary EOS`` with it (Hedgehog's template for SAMSum)."""
    hint = "data.format samsum needs the columns dialogue and summary"
    prompts = [SAMSUM.format(dialogue=_string(row, "dialogue", where, hint)) for where, row in rows]
    return _completions(prompts, [_string(row, "summary", where, hint) for where, row in rows], tokenizer)


def _completions(prompts: list[str], outputs: list[str], tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
    bos, eos = _special(tokenizer.bos_token_id), _special(tokenizer.eos_token_id)
    documents = []
    for prompt, output in zip(_tokenise(prompts, tokenizer), _tokenise(outputs, tokenizer), strict=True):
        input_ids = torch.tensor([*bos, *prompt, *output, *eos], dtype=torch.int64)
        labels = input_ids.clone()
        labels[: len(bos) + len(prompt)] = IGNORED
        documents.append(TokenDocument(input_ids, labels))
    return documents


def encode_chat(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[TokenDocument]:
    """`messages` through the tokenizer's chat template, with loss on the assistant's turns.

    A template with ``{% generation %}`` blocks says itself which tokens are the assistant's. For any other, a turn is
    what rendering the conversation up to it adds to the generation prompt of the conversation before it, up to the
    special token that ends it. An opening assistant turn then carries no loss: there is no conversation before it to
    render. A conversation whose earlier turns are rendered differently once later ones follow, as by templates that
    leave out earlier thoughts, becomes one document per reply, with loss on that reply alone.

    Raises:
        UserError: no (default) chat template, a slow tokenizer, not a conversation of texts, one that the template
            refuses, or a template that changes texts or renders the prompt of a reply in another way than the reply.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "data.format chat: expected a tokenizer with a chat template, found none; use an instruction-tuned "
            "teacher, or data.format=text"
        ) from None
    if not tokenizer.is_fast:
        raise UserError("data.format chat: expected a fast tokenizer (tokenizer.json), found a slow one")
    by_block = _GENERATION_BLOCK.search(template) is not None
    encode = _encode_by_block if by_block else _encode_by_prefix
    documents = []
    for where, row in rows:
        messages = _messages(row, where)
        try:
            documents += encode(messages, tokenizer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: the tokenizer's chat template refuses it: {reason}") from error
    return documents


def _encode_by_block(messages: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
    encoded = cast(
        BatchEncoding,
        tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        ),
    )
    return [_with_loss(encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]])]


def _encode_by_prefix(messages: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
    def render(count: int, last: str = "", *, prompt: bool = False) -> str:
        """Render so many messages, with something behind the text of the last one."""
        given = messages[:count]
        if last:
            given = [*given[:-1], given[-1] | {"content": given[-1]["content"].rstrip() + last}]
        return cast(str, tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=prompt))

    conversation = render(len(messages))
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    rendered = {index: (render(index, prompt=True), render(index + 1)) for index in replies}
    for index, (before, after) in rendered.items():
        if not after.startswith(before):
            raise UserError(
                f"expected a chat template by which message {index + 1} follows the prompt that asks for it, found one "
                "that renders them in another way; use a template with {% generation %} blocks"
            )
    ends, turns = _special_tokens(tokenizer), dict[int, tuple[int, int]]()
    for index, (before, after) in rendered.items():
        text_ends = render(index + 1, _MARK).find(_MARK, len(before))
        if text_ends < 0:
            raise UserError(
                f"expected a chat template that renders the text of message {index + 1} as it is, found one that "
                "changes it; use a template with {% generation %} blocks"
            )
        turns[index] = len(before), _end_of_turn(after, text_ends, ends)
    if all(conversation.startswith(after[: turns[index][1]]) for index, (_, after) in rendered.items()):
        return [_with_loss_within(conversation, list(turns.values()), tokenizer)]
    return [_with_loss_within(after, [turns[index]], tokenizer) for index, (_, after) in rendered.items()]


def _end_of_turn(rendered: str, text_ends: int, ends: Sequence[str]) -> int:
    """Return where the last turn of a rendered conversation ends: after the first special token behind its text.

    Some templates write a line break or the header of the next turn after that token. The model stops at the token, so
    what follows it carries no loss. Without such a token the turn ends with the conversation.

    Args:
        text_ends: where the text of the turn ends in `rendered`.
        ends: special tokens.
    """
    found = [place + len(token) for token in ends if (place := rendered.find(token, text_ends)) >= 0]
    return min(found, default=len(rendered))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return all special tokens, including those without a role (EOS, BOS, ...), as the ends of turns often are."""
    added: Any = tokenizer.added_tokens_decoder
    return sorted({*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)})


def _with_loss_within(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> TokenDocument:
    """Return the tokens of a rendered conversation, with loss within these spans of its characters."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = encoded["offset_mapping"]
    return _with_loss(encoded["input_ids"], [any(start < b and end > a for a, b in spans) for start, end in places])


def _with_loss(input_ids: list[int], carries_loss: list[bool]) -> TokenDocument:
    ids = torch.tensor(input_ids, dtype=torch.int64)
    return TokenDocument(ids, ids.masked_fill(~torch.tensor(carries_loss, dtype=torch.bool), IGNORED))


_ENCODERS: dict[str, Encoder] = {
    "text": encode_text,
    "alpaca": encode_alpaca,
    "chat": encode_chat,
    "samsum": encode_samsum,
}


def _messages(row: Row, where: str) -> list[Row]:
    messages = _column(row, "messages", where, "data.format chat needs it")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise UserError(
            f"{where}: expected messages to be a list of objects with role and content, found {messages!r:.60}"
        )
    if row.get("tools"):
        raise UserError(f"{where}: expected a conversation without tools, found {row['tools']!r:.60}")
    return [message | {"content": _content(message, f"{where}, message {k}")} for k, message in enumerate(messages, 1)]


def _content(message: Row, where: str) -> str:
    """The text of a message: a string, or text parts as OpenAI's API has them, which are joined.

    Raises:
        UserError: there is none, it has other parts, or is a reply of nothing, or one that calls tools.
    """
    if message.get("tool_calls"):
        raise UserError(f"{where}: expected text alone, found tool_calls")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: expected content that is text, or a list of text parts, found {content!r:.60}")
    text = "".join(cast(list[str], texts))
    if message["role"] == "assistant" and not text.strip():
        raise UserError(f"{where}: expected a reply, found an empty one")
    return text


def _string(row: Row, column: str, where: str, hint: str) -> str:
    value = _column(row, column, where, hint)
    if not isinstance(value, str):
        raise UserError(f"{where}: expected text in the column {column}, found {value!r:.60}")
    return value


def _column(row: Row, column: str, where: str, hint: str) -> Any:
    if column not in row:
        found = ", ".join(str(name) for name in row) or "no columns"
        raise UserError(f"{where}: expected a column {column!r}, found {found}; {hint}")
    return row[column]


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    for text in texts:
        check_text(text, "data")
    # verbose=False: documents longer than the model's context are cut when they are packed, no need to warn.
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return encoded["input_ids"]


def _special(token_id: object) -> list[int]:
    """The id as a list, empty where the tokenizer has no such token."""
    return [token_id] if isinstance(token_id, int) else []
