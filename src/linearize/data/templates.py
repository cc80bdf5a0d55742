"""Turn rows into token documents: text, Alpaca instructions, chats, summaries. Labels mark tokens with a loss."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jinja2
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from linearize.base import UserError, check_text
from linearize.configs.data import DataConfig
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

PIECE = 2**20  # characters per tokenizer call, which needs far more memory than the text
MESSAGES = 256  # messages of a conversation; more are used only if needed, since templates render all for each reply
_MARK = "\ue000"  # a private-use character, which texts do not contain
_ROLES = ("system", "user", "assistant")
_NO_TEXT = ("tool_calls", "function_call", "audio")  # fields of a message that are not text
_TOOLS = ("tools", "functions")  # columns
_SHAREGPT = (
    "conversations of the ShareGPT form: rename the column to messages, and from and value in it to role (system, "
    "user, assistant) and content"
)
_OTHER_COLUMNS = {
    ("conversations",): _SHAREGPT,
    ("prompt", "completion"): "rename prompt and completion to instruction and output",
}
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class TokenDocument:
    """One document: its tokens, and labels, which are the tokens again or `IGNORED` without loss.

    Attributes:
        row: the place of a row that may have several documents; None: the document is the whole row.
    """

    input_ids: Int64[Tensor, " T"]
    labels: Int64[Tensor, " T"]
    row: str | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> tuple[TokenDocument, TokenDocument]:
        """Return the first `length` tokens, and the rest."""
        return (
            TokenDocument(self.input_ids[:length], self.labels[:length]),
            TokenDocument(self.input_ids[length:], self.labels[length:]),
        )


Encoder = Callable[[Sequence[LocatedRow], PreTrainedTokenizerBase, DataConfig], Iterator[TokenDocument]]
"""Yield the documents of some rows, lazily."""


def encoder_for(columns: Collection[str], config: DataConfig) -> Encoder:
    """Return the encoder of `config.format`; `auto` decides by the columns of the first row."""
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
) -> Iterator[TokenDocument]:
    """Yield ``BOS text EOS`` with loss on every token; BOS and EOS only if the tokenizer has them. Skip blank texts.

    A text of more than PIECE characters is tokenized piece by piece. Once there are `config.max_tokens` tokens, its
    rest is dropped, and no EOS follows. The other formats do the same.
    """
    hint = "set data.text_column to the column that holds the text"
    texts = [_string(row, config.text_column, where, hint) for where, row in rows]
    bos, eos = _special(tokenizer.bos_token_id), _special(tokenizer.eos_token_id)
    for ids, whole in _tokens_of([text for text in texts if text.strip()], tokenizer, _most(config)):
        input_ids = torch.tensor([*bos, *ids, *(eos if whole else [])], dtype=torch.int64)
        yield TokenDocument(input_ids, input_ids)


def _most(config: DataConfig) -> int | None:
    """Return the number of tokens after which a text may be cut; None: never."""
    return None if config.max_tokens is None else max(config.max_tokens, config.min_document_tokens)


def _tokens_of(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each text, little more than `most` of a long one, and whether these are all of its tokens."""
    short = iter(_tokenise([text for text in texts if len(text) <= PIECE], tokenizer))
    for text in texts:
        yield (next(short), True) if len(text) <= PIECE else _tokenise_long(text, tokenizer, most)


def _tokenise_long(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> tuple[list[int], bool]:
    ids: list[int] = []
    for _, piece in _pieces(text):
        if most is not None and len(ids) >= most:
            return ids, False
        ids += _tokenise([piece], tokenizer)[0]
    return ids, True


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield the text in pieces of at most PIECE characters that begin at white space, each with its place."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = max((text.rfind(space, start + 1, end) for space in " \n"), default=-1)
            end = start + PIECE if end < 0 else end
        yield start, text[start:end]
        start = end


def encode_alpaca(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[TokenDocument]:
    """Yield ``BOS prompt`` without loss, then ``output EOS`` with loss (LoLCATs; the Stanford Alpaca templates)."""
    hint = "data.format alpaca needs the columns instruction and output"
    prompts, outputs = [], []
    for where, row in rows:
        instruction, output = (_string(row, column, where, hint) for column in ("instruction", "output"))
        context = _string(row, "input", where, hint) if row.get("input") is not None else ""
        template = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        prompts.append(template.format(instruction=instruction, input=context))
        outputs.append(output)
    yield from _completions(prompts, outputs, tokenizer, _most(config))


def encode_samsum(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[TokenDocument]:
    """Yield ``BOS prompt`` without loss, then ``summary EOS`` with loss (Hedgehog's template for SAMSum)."""
    hint = "data.format samsum needs the columns dialogue and summary"
    prompts = [SAMSUM.format(dialogue=_string(row, "dialogue", where, hint)) for where, row in rows]
    summaries = [_string(row, "summary", where, hint) for where, row in rows]
    yield from _completions(prompts, summaries, tokenizer, _most(config))


def _completions(
    prompts: list[str], outputs: list[str], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[TokenDocument]:
    bos, eos = _special(tokenizer.bos_token_id), _special(tokenizer.eos_token_id)
    both = zip(_tokens_of(prompts, tokenizer, most), _tokens_of(outputs, tokenizer, most), strict=True)
    for (prompt, asked), (output, whole) in both:
        reply = [*output, *(eos if whole else [])] if asked else []
        input_ids = torch.tensor([*bos, *prompt, *reply], dtype=torch.int64)
        labels = input_ids.clone()
        labels[: len(bos) + len(prompt)] = IGNORED
        yield TokenDocument(input_ids, labels)


def encode_chat(
    rows: Sequence[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[TokenDocument]:
    """Yield `messages` rendered by the tokenizer's chat template, with loss on the assistant's turns.

    A template with ``{% generation %}`` blocks marks the assistant's tokens; the generation prompt at the beginning of
    a block and text after its end token have no loss. For other templates, a turn is the text that the rendered
    conversation adds to the generation prompt before it, up to the special token that ends it. Then a first turn of the
    assistant has no loss, since there is no conversation before it.

    If a template renders earlier turns differently once later ones follow (it leaves out earlier thoughts, or writes
    the system prompt before the last question), the conversation becomes one document per reply, with loss on that
    reply alone. `TokenDocument.row` is equal for documents of one conversation. Of more than MESSAGES messages, only as
    many are used as `config.max_tokens` needs.

    Raises:
        UserError: no (default) chat template, a slow tokenizer, not a conversation of texts, a role that the template
            does not know, a conversation that it refuses, or a template that changes texts or renders the prompt of a
            reply in another way than the reply.
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
    for where, row in rows:
        messages = _messages(row, where)
        try:
            messages = _needed(_with_known_roles(messages, tokenizer), tokenizer, _most(config))
            for document in encode(messages, tokenizer, _most(config)):
                yield replace(document, row=where)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: the tokenizer's chat template refuses it: {reason}") from error


def _with_known_roles(messages: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Return the messages, with the role assistant in place of other roles that the template renders in the same way.

    Raises:
        UserError: a role that the template does not know, whose replies would have no loss; or an empty reply.
    """
    for role in sorted({message["role"] for message in messages} - set(_ROLES)):
        rendered = _render(messages, tokenizer)
        as_any, as_reply = (
            [message | {"role": other} if message["role"] == role else message for message in messages]
            for other in (_MARK, "assistant")
        )
        if _rendered(as_any, tokenizer).replace(_MARK, role).lower() == rendered.lower():
            number = 1 + [message["role"] for message in messages].index(role)
            raise UserError(
                f"expected the role {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, or one that the tokenizer's chat "
                f"template knows, found {role!r:.60} in message {number}; rename it"
            )
        if _rendered(as_reply, tokenizer) == rendered:
            messages = as_reply
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise UserError(f"message {number}: expected a reply, found an empty one")
    return messages


def _needed(messages: list[Row], tokenizer: PreTrainedTokenizerBase, most: int | None) -> list[Row]:
    """Return the messages up to the reply with which their texts have `most` tokens, but at least MESSAGES."""
    if most is None or len(messages) <= MESSAGES:
        return messages
    tokens = 0
    for number, message in enumerate(messages, 1):
        tokens += len(_tokenise_long(message["content"], tokenizer, most)[0])
        if number >= MESSAGES and tokens >= most and message["role"] == "assistant":
            return messages[:number]
    return messages


def _rendered(messages: list[Row], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False) -> str:
    """Return the conversation as `_render` does; empty if the template refuses it."""
    try:
        return _render(messages, tokenizer, prompt=prompt)
    except jinja2.TemplateError:
        return ""


def _render(messages: list[Row], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False) -> str:
    """Return the conversation as text, followed by the prompt for a reply if `prompt` is set."""
    return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def _marked(messages: list[Row], index: int, *, in_front: bool = False) -> list[Row]:
    """Return the messages with a mark after the text of one of them, or before it."""
    text = messages[index]["content"]
    marked = list(messages)
    marked[index] = messages[index] | {"content": _MARK + text if in_front else text.rstrip() + _MARK}
    return marked


def _encode_by_block(
    messages: list[Row], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[TokenDocument]:
    render: Any = render_jinja_template
    (text,), (blocks,) = render(
        [messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    header, ends = _header(messages, tokenizer), tuple(_special_tokens(tokenizer))
    spans = []
    for begin, end in blocks:
        place = text.find(header, max(0, begin - len(header)), min(end, begin + len(header)))
        start = begin if place < 0 else max(begin, place + len(header))
        reply = text[start:end].rstrip()
        spans.append((start, start + len(reply) if reply.endswith(ends) else end))
    yield _with_loss_within(text, spans, tokenizer, most)


def _header(messages: list[Row], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the template's text between a message and the reply to it; empty if there is no such message."""
    asked = [number for number, message in enumerate(messages, 1) if message["role"] != "assistant"]
    if not asked:
        return ""
    question = messages[: asked[-1]]
    return _rendered(_marked(question, -1), tokenizer, prompt=True).rpartition(_MARK)[2]


def _encode_by_prefix(
    messages: list[Row], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[TokenDocument]:
    ends = _special_tokens(tokenizer)
    conversation = _render(messages, tokenizer)
    replies = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant" and number > 1]
    turns = [_last_turn(messages[:number], tokenizer, ends) for number in replies]
    if all(conversation.startswith(text[:end]) for text, (_, end) in turns):
        yield _with_loss_within(conversation, [span for _, span in turns], tokenizer, most)
        return
    for text, span in turns:
        yield _with_loss_within(text, [span], tokenizer, most)


def _last_turn(
    messages: list[Row], tokenizer: PreTrainedTokenizerBase, ends: Sequence[str]
) -> tuple[str, tuple[int, int]]:
    """Return a rendered conversation that ends with a reply, and the span of the reply with its end token.

    If the conversation does not begin with the reply's prompt, the text is the prompt up to the end of the last
    message, followed by the rest of the conversation. The loss then begins after the whole prompt; if the prompt
    continues differently (with the beginning of a thought), after all text before the reply's own. If the template
    omits a part of the reply, the reply follows the prompt if it begins as the prompt ends.

    Args:
        ends: special tokens.

    Raises:
        UserError: the template changes the text of the reply, or renders the prompt differently from the reply.
    """
    prompt, rendered = _render(messages[:-1], tokenizer, prompt=True), _render(messages, tokenizer)
    text_ends = _render(_marked(messages, -1), tokenizer).rfind(_MARK)
    if text_ends < 0:
        raise UserError(
            f"expected a chat template that renders the text of message {len(messages)} as it is, found one that "
            "changes it; use a template with {% generation %} blocks"
        )
    end = _end_of_turn(rendered, text_ends, ends)
    if rendered.startswith(prompt):
        return rendered, (len(prompt), end)
    in_prompt = _render(_marked(messages[:-1], -1), tokenizer, prompt=True).rfind(_MARK)
    in_rendered = _render(_marked(messages, -2), tokenizer).rfind(_MARK)
    header, reply = prompt[in_prompt:], messages[-1]["content"]
    if rendered.startswith(header, in_rendered):
        start = in_rendered + len(header)
    else:
        start = _render(_marked(messages, -1, in_front=True), tokenizer).rfind(_MARK)
    as_it_is = "".join(rendered[start:text_ends].split()).endswith("".join(reply.split()))
    if min(in_prompt, in_rendered, start) >= 0 and as_it_is:
        moved = in_prompt - in_rendered
        return prompt[:in_prompt] + rendered[in_rendered:], (start + moved, end + moved)
    rest = _rest(header, rendered[in_rendered:], reply)
    if min(in_prompt, in_rendered) < 0 or rest is None:
        raise UserError(
            f"expected a chat template by which message {len(messages)} follows the prompt that asks for it, found one "
            "that renders them in another way; use a template with {% generation %} blocks"
        )
    text = prompt + rest + rendered[text_ends:end]
    return text, (len(prompt), len(text))


def _rest(header: str, rendered: str, reply: str) -> str | None:
    """Return the rest of a reply that begins as its header ends; None for any other reply.

    Args:
        rendered: the reply with its header in the conversation. Text that only `header` has begins the reply.
    """
    reply, header = reply.strip(), header.rstrip()
    differ = (place for place, (one, other) in enumerate(zip(header, rendered, strict=False)) if one != other)
    begins = (header[start:] for start in range(1 + next(differ, -1)))
    return next((reply[len(begin) :].lstrip() for begin in begins if reply.startswith(begin)), None)


def _end_of_turn(rendered: str, text_ends: int, ends: Sequence[str]) -> int:
    """Return the end of the last turn of a rendered conversation: after the first special token that follows its text.

    Some templates write a line break or the header of the next turn after that token. The model stops at the token, so
    this text has no loss. Without such a token the turn ends with the conversation.

    Args:
        text_ends: end of the turn's text in `rendered`.
        ends: special tokens.
    """
    found = [place + len(token) for token in ends if (place := rendered.find(token, text_ends)) >= 0]
    return min(found, default=len(rendered))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return all special tokens, including those without a role (EOS, BOS, ...), as the ends of turns often are."""
    added: Any = tokenizer.added_tokens_decoder
    return sorted({*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)})


def _with_loss_within(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> TokenDocument:
    """Return the tokens of a rendered conversation, with loss in these ascending spans of its characters.

    As for other texts, only as many pieces are tokenized as `most` tokens need.
    """
    ids: list[int] = []
    carries_loss: list[bool] = []
    ends = [end for _, end in spans]
    for offset, piece in _pieces(check_text(text, "messages")):
        if most is not None and len(ids) >= most:
            break
        encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids += encoded["input_ids"]
        for start, end in encoded["offset_mapping"]:
            span = bisect_right(ends, offset + start)
            carries_loss.append(span < len(spans) and spans[span][0] < offset + end)
    input_ids = torch.tensor(ids, dtype=torch.int64)
    return TokenDocument(input_ids, input_ids.masked_fill(~torch.tensor(carries_loss, dtype=torch.bool), IGNORED))


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
    for column in _TOOLS:
        if not _is_empty(row.get(column)):
            raise UserError(f"{where}: expected a conversation without {column}, found {row[column]!r:.60}")
    return [
        {name: value for name, value in message.items() if value is not None and name not in _NO_TEXT}
        | {"content": _content(message, f"{where}, message {number}")}
        for number, message in enumerate(messages, 1)
    ]


def _is_empty(value: Any) -> bool:
    """Return whether a value is empty, or JSON text of an empty value, as tables without list columns write it."""
    try:
        return not (json.loads(value) if isinstance(value, str) and value.strip() else value)
    except (ValueError, RecursionError):
        return False


def _content(message: Row, where: str) -> str:
    """Return the text of a message: a string, or the joined text parts of OpenAI's API.

    Raises:
        UserError: there is no text, it has other parts, or the message has tool calls or audio.
    """
    for name in _NO_TEXT:
        if not _is_empty(message.get(name)):
            raise UserError(f"{where}: expected text alone, found {name}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: expected content that is text, or a list of text parts, found {content!r:.60}")
    return "".join(cast(list[str], texts))


def _string(row: Row, column: str, where: str, hint: str) -> str:
    value = _column(row, column, where, hint)
    if not isinstance(value, str):
        raise UserError(f"{where}: expected text in the column {column}, found {value!r:.60}")
    return value


def _column(row: Row, column: str, where: str, hint: str) -> Any:
    if column not in row:
        found = " ".join(", ".join(map(str, row)).split())[:200] or "no columns"
        known = [advice for columns, advice in _OTHER_COLUMNS.items() if row.keys() >= set(columns)]
        raise UserError(f"{where}: expected a column {column!r}, found {found}; {'; '.join(known) or hint}")
    return row[column]


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    for text in texts:
        check_text(text, "data")
    # verbose=False: no warning about texts longer than the model's context; packing cuts documents.
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return encoded["input_ids"]


def _special(token_id: object) -> list[int]:
    """Return the id as a list, empty if the tokenizer has no such token."""
    return [token_id] if isinstance(token_id, int) else []
