from __future__ import annotations

import pytest
import torch

from linearize.base import UserError
from linearize.data.config import DataConfig
from linearize.data.templates import TokenDocument, encode_alpaca, encode_chat, encode_samsum
from tests.byte_tokenizer import CHATML, byte_tokenizer

CHATML_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # replies lose their thoughts as soon as the conversation goes on
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{% if messages[0].role != 'user' %}{{ raise_exception('starts with\n a user') }}{% endif %}" + CHATML
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, you — über."},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": " No."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def fails(pattern: str):
    """A UserError of one line."""
    return pytest.raises(UserError, match=rf"\A(?=.*{pattern})[^\n]*\Z")


# --- alpaca -----------------------------------------------------------------------------------------------------------


def text_and_loss(document: TokenDocument, tokenizer) -> tuple[str, str]:
    """The whole document as text, and the part of it that carries the loss."""
    assert torch.equal(document.labels[document.labels != -100], document.input_ids[document.labels != -100])
    return tokenizer.decode(document.input_ids), tokenizer.decode(document.labels[document.labels != -100])


def test_alpaca_prompts_carry_no_loss(tokenizer):
    rows = [
        {"instruction": "Add {input}.", "input": "1 and 1", "output": "2"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "output": "ho ho"},
        {"instruction": "Say hu.", "input": None, "output": "hu"},
    ]
    documents = encode_alpaca(list(enumerate(rows, 1)), tokenizer, DataConfig())
    start = "Below is an instruction that describes a task"
    request = "rite a response that appropriately completes the request.\n\n### Instruction:\n"
    prompts = [
        f"{start}, paired with an input that provides further context. W{request}Add {{input}}.\n\n"
        "### Input:\n1 and 1\n\n### Response:\n",
        *(f"{start}. W{request}Say {word}.\n\n### Response:\n" for word in ("hi", "ho", "hu")),
    ]
    for row, prompt, document in zip(rows, prompts, documents, strict=True):
        reply = row["output"] + "<|im_end|>"
        assert text_and_loss(document, tokenizer) == ("<s>" + prompt + reply, reply)


# --- samsum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", ["<s>", None])
@pytest.mark.parametrize("eos", ["<|im_end|>", None])
def test_samsum_dialogues_carry_no_loss(bos, eos):
    tokenizer = byte_tokenizer(bos=bos, eos=eos)
    rows = [
        {"id": "1", "dialogue": "Amy: Hi {dialogue}\r\nBob: über", "summary": "Amy greets Bob."},
        {"id": "2", "dialogue": "Bob: Bye", "summary": " Bob leaves {summary}.\n"},
    ]
    documents = encode_samsum(list(enumerate(rows, 1)), tokenizer, DataConfig())
    prompts = [
        "Summarize this dialog:\nAmy: Hi {dialogue}\r\nBob: über\n---\nSummary:\n",
        "Summarize this dialog:\nBob: Bye\n---\nSummary:\n",
    ]
    for row, prompt, document in zip(rows, prompts, documents, strict=True):
        completion = row["summary"] + (eos or "")
        assert text_and_loss(document, tokenizer) == ((bos or "") + prompt + completion, completion)


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS])
def test_chat_loss_on_the_assistant_only(template):
    tokenizer = byte_tokenizer(template=template)
    (document,) = encode_chat([(1, {"messages": CONVERSATION})], tokenizer, DataConfig())
    text, loss = text_and_loss(document, tokenizer)
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION)
    assert loss == "Hello, you — über.<|im_end|> No.<|im_end|>"


def test_chat_replies_of_templates_without_an_end_token():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ 'Q:' if m.role == 'user' else 'A:' }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    tokenizer = byte_tokenizer(template=template, eos=None)
    (document,) = encode_chat([(1, {"messages": CONVERSATION[1:4]})], tokenizer, DataConfig())
    assert text_and_loss(document, tokenizer) == (
        "<s>Q: Hi\nA: Hello, you — über.\nQ: assistant\n",
        "Hello, you — über.\n",  # the line break ends the reply, so it is learned
    )


def test_chat_opening_turn_has_no_prompt_and_no_loss():
    tokenizer = byte_tokenizer(template=CHATML)
    messages = [{"role": "assistant", "content": "Welcome"}, *CONVERSATION[1:3]]
    (document,) = encode_chat([(1, {"messages": messages})], tokenizer, DataConfig())
    assert text_and_loss(document, tokenizer)[1] == "Hello, you — über.<|im_end|>"


def test_chat_forgetful_template_is_fine_for_one_reply():
    tokenizer = byte_tokenizer(template=FORGETFUL)
    (document,) = encode_chat([(1, {"messages": CONVERSATION[:3]})], tokenizer, DataConfig())
    assert text_and_loss(document, tokenizer)[1] == "<think></think>Hello, you — über.<|im_end|>"


@pytest.mark.parametrize(
    "template, messages, pattern",
    [
        (None, CONVERSATION, "data.format chat: .*chat template, found none.*data.format=text"),
        ({"tool_use": CHATML}, CONVERSATION, "chat template, found none"),
        (FORGETFUL, CONVERSATION, "data row 7: .*only appends.*message 3"),
        (REFUSING, CONVERSATION, "data row 7: the tokenizer's chat template refuses it: starts with a user"),
        (CHATML, [], "data row 7: expected messages to be a list of objects with role and content"),
        (CHATML, ["Hi"], r"data row 7: .*role and content, found \['Hi'\]"),
        (CHATML, [{"from": "gpt", "value": "Hi"}], "data row 7: .*role and content, found"),
        (CHATML, "Hi", "data row 7: .*role and content, found 'Hi'"),
    ],
)
def test_chat_errors(template, messages, pattern):
    with fails(pattern):
        encode_chat([(7, {"messages": messages})], byte_tokenizer(template=template), DataConfig())


def test_chat_needs_offsets(monkeypatch):
    tokenizer = byte_tokenizer(template=CHATML)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with fails("data.format chat: expected a fast tokenizer"):
        encode_chat([(1, {"messages": CONVERSATION})], tokenizer, DataConfig())
