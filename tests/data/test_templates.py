from __future__ import annotations

import json

import pytest
import torch

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data import templates
from linearize.data.templates import (
    TokenDocument,
    encode_alpaca,
    encode_chat,
    encode_samsum,
    encode_text,
    encoder_for,
)
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
CUTTING = CHATML.replace("m.content", "m.content[:8]")
SHOUTING = "{% for m in messages %}{{ m.content.upper() if messages|length > 2 else m.content }}\n{% endfor %}"
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


def chats(rows, tokenizer) -> list[TokenDocument]:
    return list(encode_chat(rows, tokenizer, DataConfig()))


def fails(pattern: str):
    """A UserError of one line."""
    return pytest.raises(UserError, match=rf"\A(?=.*{pattern})[^\n]*\Z")


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["word " * 30, "w" * 150, "w" * 40 + "\n" + "w" * 9])
def test_a_long_text_is_tokenized_in_pieces(tokenizer, monkeypatch, text):
    """The tokens are the same, and with `max_tokens` at most one piece is tokenized beyond it."""
    monkeypatch.setattr(templates, "PIECE", 16)
    rows = [("data row 1", {"text": "short"}), ("data row 2", {"text": text}), ("data row 3", {"text": "end"})]
    documents = encode_text(rows, tokenizer, DataConfig())
    assert [tokenizer.decode(x.input_ids) for x in documents] == [f"<s>{row['text']}<|im_end|>" for _, row in rows]
    _, cut, _ = encode_text(rows, tokenizer, DataConfig(max_tokens=40))
    found = tokenizer.decode(cut.input_ids)
    assert 40 <= len(found) - len("<s>") < 40 + 16 and f"<s>{text}".startswith(found)


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
    documents = encode_alpaca(
        [(f"data row {number}", row) for number, row in enumerate(rows, 1)], tokenizer, DataConfig()
    )
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
    documents = encode_samsum(
        [(f"data row {number}", row) for number, row in enumerate(rows, 1)], tokenizer, DataConfig()
    )
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
    (document,) = chats([("data row 1", {"messages": CONVERSATION})], tokenizer)
    text, loss = text_and_loss(document, tokenizer)
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION)
    assert loss == "Hello, you — über.<|im_end|> No.<|im_end|>"


def test_chat_replies_of_templates_without_an_end_token():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ 'Q:' if m.role == 'user' else 'A:' }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    tokenizer = byte_tokenizer(template=template, eos=None)
    (document,) = chats([("data row 1", {"messages": CONVERSATION[1:4]})], tokenizer)
    assert text_and_loss(document, tokenizer) == (
        "<s>Q: Hi\nA: Hello, you — über.\nQ: assistant\n",
        "Hello, you — über.\n",  # the line break ends the reply, so it is learned
    )


def test_chat_opening_turn_has_no_prompt_and_no_loss():
    tokenizer = byte_tokenizer(template=CHATML)
    messages = [{"role": "assistant", "content": "Welcome"}, *CONVERSATION[1:3]]
    (document,) = chats([("data row 1", {"messages": messages})], tokenizer)
    assert text_and_loss(document, tokenizer)[1] == "Hello, you — über.<|im_end|>"


def test_chat_template_that_forgets_thoughts_gives_a_document_per_reply():
    """As Qwen 3's, which leaves thoughts out of earlier turns."""
    tokenizer = byte_tokenizer(template=FORGETFUL)
    documents = chats([("data row 1", {"messages": CONVERSATION})], tokenizer)
    replies = "<think></think>Hello, you — über.", "<think></think> No."
    chat = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION[:5])
    assert [text_and_loss(document, tokenizer) for document in documents] == [
        (chat[: chat.index("Hello")] + replies[0] + "<|im_end|>\n", replies[0] + "<|im_end|>"),
        (chat[: chat.index(" No.")] + replies[1] + "<|im_end|>\n", replies[1] + "<|im_end|>"),
    ]
    (document,) = chats([("data row 1", {"messages": CONVERSATION[:3]})], tokenizer)
    assert text_and_loss(document, tokenizer)[1] == replies[0] + "<|im_end|>"


# What templates of well-known models do, in short: turns between special tokens of their own, the text trimmed, a
# prompt that is always there (Llama 3's first one), an end of text where no prompt is asked for (Phi 3), a system
# prompt where none is given (Qwen 2.5, SmolLM 2), roles that must alternate (Llama 2, Mistral, Gemma).
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
STYLES = {
    "header always": (
        "{% for m in messages %}<s>{{ m.role }}</s>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{{ '<s>assistant</s>\n\n' }}"
    ),
    "header asked for": (
        "{% for m in messages %}<s>{{ m.role }}</s>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant</s>\n\n{% endif %}"
    ),
    "end of text": (
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% else %}</s>{% endif %}"
    ),
    "default system prompt": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
    ),
    "instructions": ALTERNATING
    + (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    ),
    "model": ALTERNATING
    + (
        "<s>{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
    ),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("reply", ["Yes.", "assistant", "a", " No. \n"])
def test_chat_loss_by_templates_of_many_styles(style, reply):
    """On each reply and the token that ends it, and on nothing else."""
    tokenizer = byte_tokenizer(template=STYLES[style], end="</s>")
    turns = [("user", "Hi"), ("assistant", reply), ("user", "a"), ("assistant", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (document,) = chats([("data row 1", {"messages": messages})], tokenizer)
    text, loss = text_and_loss(document, tokenizer)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    kept = reply.strip() if "trim" in STYLES[style] else reply
    expected = {"instructions": f" {kept} </s> Bye </s>"}.get(style, f"{kept}<|im_end|>Bye<|im_end|>")
    assert loss == expected


# As Mistral's v0.3 and Nemo, which write the system prompt before the last question, and only where it comes last.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set ms = messages[1:] %}"
    "{% else %}{% set ms = messages %}{% endif %}{% for m in ms %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (s + '\n\n' if loop.last and s is defined else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
# As DeepSeek-R1's, whose prompt begins a thought that the conversation leaves out.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
)
TWO_IN_A_ROW = [{"role": "user", "content": "Hi"}, *({"role": "assistant", "content": text} for text in ("One", "Two"))]
THOUGHTFUL = [
    {"role": role, "content": content}
    for role, content in [
        ("user", "Hi"),
        ("assistant", "<think>\nhm\n</think>\n\nOne"),
        ("user", "More"),
        ("assistant", "<think>so</think><Two>"),
    ]
]


@pytest.mark.parametrize(
    "template, messages, expected",
    [
        (
            MISTRAL,
            CONVERSATION,
            [
                ("[INST] Be brief.\n\nHi[/INST]", " Hello, you — über.<|im_end|>"),
                (
                    "[INST] Hi[/INST] Hello, you — über.<|im_end|>[INST] Be brief.\n\nassistant[/INST]",
                    " No.<|im_end|>",
                ),
            ],
        ),
        (MISTRAL, CONVERSATION[:3], [("[INST] Be brief.\n\nHi[/INST]", " Hello, you — über.<|im_end|>")]),
        (
            FORGETFUL,
            TWO_IN_A_ROW,
            [
                ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<think></think>One<|im_end|>"),
                (
                    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>One<|im_end|>\n"
                    "<|im_start|>assistant\n",
                    "<think></think>Two<|im_end|>",
                ),
            ],
        ),
        (R1, CONVERSATION[:3], [("<s>Hi<|im_start|>", "Hello, you — über.<|im_end|>")]),
        (
            R1,
            THOUGHTFUL,
            [
                ("<s>Hi<|im_start|><think>\n", "hm\n</think>\n\nOne<|im_end|>"),
                ("<s>Hi<|im_start|>\n\nOne<|im_end|><s>More<|im_start|><think>\n", "so</think><Two><|im_end|>"),
            ],
        ),
    ],
)
def test_chat_prompts_that_the_conversation_does_not_hold(template, messages, expected):
    """The model answers a prompt, so that is what it learns to answer."""
    documents = chats([("data row 1", {"messages": messages})], tokenizer := byte_tokenizer(template=template))
    assert [text_and_loss(document, tokenizer)[1] for document in documents] == [reply for _, reply in expected]
    for document, (prompt, reply) in zip(documents, expected, strict=True):
        assert text_and_loss(document, tokenizer)[0].removesuffix("\n") == prompt + reply


def test_chat_prompts_that_begin_a_thought_which_no_reply_has():
    tokenizer = byte_tokenizer(template=R1)
    messages = [*CONVERSATION[1:4], *TWO_IN_A_ROW[1:]]
    (document,) = chats([("data row 1", {"messages": messages})], tokenizer)
    assert text_and_loss(document, tokenizer) == (
        "<s>Hi<|im_start|>Hello, you — über.<|im_end|><s>assistant<|im_start|>One<|im_end|><|im_start|>Two<|im_end|>",
        "Hello, you — über.<|im_end|>One<|im_end|>Two<|im_end|>",
    )


@pytest.mark.parametrize("begin", ["", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n"])
@pytest.mark.parametrize("trained", ["", "<think>", "assistant\n"])
@pytest.mark.parametrize("reply", ["Yes.", " assistant\n"])
def test_chat_blocks_that_hold_more_than_the_reply(begin, trained, reply):
    """As SmolLM 3's, which hold the header, an empty thought and a line break."""
    header = begin or "<|im_start|>assistant\n"
    asked, begins, written = (f"{{{{ {json.dumps(text)} }}}}" for text in (header, begin, trained))
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{'' if begin else asked}{{% generation %}}{begins}{written}"
        "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{asked}{{% endif %}}"
    )
    messages = [
        *CONVERSATION[:2],
        {"role": "assistant", "content": reply},
        *CONVERSATION[3:5],
        {"role": "assistant", "content": reply},
    ]
    tokenizer = byte_tokenizer(template=template)
    (document,) = chats([("data row 1", {"messages": messages})], tokenizer)
    text, loss = text_and_loss(document, tokenizer)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False) and text.count(header) == 3
    assert loss == f"{trained}{reply}<|im_end|>{trained} No.<|im_end|>{trained}{reply}<|im_end|>"


def test_chat_content_in_parts():
    """As OpenAI's API has it; the template sees one text, as the model does when it is asked."""
    tokenizer = byte_tokenizer(template=CHATML)
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you — über."}]
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": parts}, *CONVERSATION[3:]]
    both = [chats([("data row 1", {"messages": m})], tokenizer)[0] for m in (messages, CONVERSATION)]
    assert text_and_loss(both[0], tokenizer) == text_and_loss(both[1], tokenizer)


EMPTY = [None, [], "[]", "null", "", {}]


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize("tools", [[{"type": "function"}], '[{"type": "function"}]', "search"])
def test_chat_with_tools(column, tools):
    row, tokenizer = {"messages": CONVERSATION}, byte_tokenizer(template=CHATML)
    with fails(f"data row 7: expected a conversation without {column}, found "):
        chats([("data row 7", row | {column: tools})], tokenizer)
    for empty in EMPTY:
        assert len(chats([("data row 7", row | {column: empty})], tokenizer)) == 1


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "audio"])
@pytest.mark.parametrize("value", [[{"function": {}}], {"name": "f"}, '[{"function": {}}]'])
def test_chat_messages_that_are_more_than_text(name, value):
    tokenizer = byte_tokenizer(template="{% if messages[-1]." + name + " is defined %}called{% endif %}" + CHATML)

    def read(found) -> list[TokenDocument]:
        messages = [*CONVERSATION[:4], {"role": "assistant", "content": "Sure.", name: found}]
        return chats([("data row 7", {"messages": messages})], tokenizer)

    with fails(f"data row 7, message 5: expected text alone, found {name}"):
        read(value)
    for empty in EMPTY:
        assert "called" not in text_and_loss(read(empty)[0], tokenizer)[0]


NAMES = (
    "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' if m.role in ['assistant', 'model'] else 'T: ' }}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS, MISTRAL, R1, FORGETFUL, STYLES["model"], NAMES])
@pytest.mark.parametrize("role", ["Assistant", "model", "gpt", "tool"])
def test_chat_roles_that_the_template_does_not_know(template, role):
    tokenizer = byte_tokenizer(template=template)
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "Ho"}]
    if template == NAMES and role == "model":
        (document,) = chats([("data row 7", {"messages": messages})], tokenizer)
        assert text_and_loss(document, tokenizer) == ("Q: Hi<|im_end|>A: Ho<|im_end|>", "Ho<|im_end|>")
        return
    with fails(f"data row 7: expected the role system, user or assistant, .* found '{role}' in message 2; rename it"):
        chats([("data row 7", {"messages": messages})], tokenizer)


def test_chat_roles_that_only_the_template_knows():
    """They are rendered as it says, without a loss."""
    template = CHATML.replace("{{ m.role }}", "{{ 'user: tool' if m.role == 'tool' else m.role }}")
    tokenizer = byte_tokenizer(template=template)
    messages = [*CONVERSATION[1:3], {"role": "tool", "content": "3"}, *CONVERSATION[4:5]]
    (document,) = chats([("data row 7", {"messages": messages})], tokenizer)
    text, loss = text_and_loss(document, tokenizer)
    assert "user: tool\n3<|im_end|>" in text and loss == "Hello, you — über.<|im_end|> No.<|im_end|>"


@pytest.mark.parametrize(
    "row, format, advice",
    [
        ({"conversations": []}, "auto", "conversations of the ShareGPT form: rename the column to messages, and from"),
        ({"conversations": []}, "chat", "conversations of the ShareGPT form: rename the column to messages, and from"),
        ({"prompt": "a", "completion": "b"}, "auto", "rename prompt and completion to instruction and output"),
        ({"prompt": "a", "completion": "b"}, "alpaca", "rename prompt and completion to instruction and output"),
        ({"prompt": "a"}, "auto", "set data.text_column to the column that holds the text"),
        ({"a\n" * 999: "a"}, "auto", "set data.text_column to the column that holds the text"),
    ],
)
def test_columns_of_other_forms(row, format, advice):
    config = DataConfig(format=format)
    names = " ".join(", ".join(row).split())[:200]
    with fails(f"data row 1: expected a column .*, found {names}; {advice}"):
        list(encoder_for(row.keys(), config)([("data row 1", row)], byte_tokenizer(template=CHATML), config))


def test_half_of_a_character_in_a_chat():
    messages = [{"role": "user", "content": "\ud83d"}, *CONVERSATION[2:3]]
    with fails("data row 7: messages: expected text, found an incomplete character"):
        chats([("data row 7", {"messages": messages})], byte_tokenizer(template=CHATML))


@pytest.mark.parametrize(
    "template, messages, pattern",
    [
        (None, CONVERSATION, "data.format chat: .*chat template, found none.*data.format=text"),
        ({"tool_use": CHATML}, CONVERSATION, "chat template, found none"),
        (CUTTING, CONVERSATION, "data row 7: expected a chat template that renders the text of message 3 as it is"),
        (SHOUTING, CONVERSATION, "data row 7: expected a chat template by which message 3 follows the prompt"),
        (
            SHOUTING.replace("\n", "t"),
            [*CONVERSATION[:2], {"role": "assistant", "content": "two"}],
            "message 3 follows",
        ),
        (R1, [*THOUGHTFUL[:1], {"role": "assistant", "content": "hm</think>One"}], "message 2 follows the prompt"),
        (REFUSING, CONVERSATION, "data row 7: the tokenizer's chat template refuses it: starts with a user"),
        (CHATML, [], "data row 7: expected messages to be a list of objects with role and content"),
        (CHATML, ["Hi"], r"data row 7: .*role and content, found \['Hi'\]"),
        (CHATML, [{"from": "gpt", "value": "Hi"}], "data row 7: .*role and content, found"),
        (CHATML, "Hi", "data row 7: .*role and content, found 'Hi'"),
        (
            CHATML,
            [*CONVERSATION, {"role": "assistant"}],
            "data row 7, message 7: expected content that is text, .*None",
        ),
        (CHATML, [{"role": "user", "content": [{"type": "image"}]}], "row 7, message 1: .*text parts, found .*image"),
        (CHATML, [{"role": "user", "content": ["yo"]}], "row 7, message 1: .*text parts, found"),
        (CHATML, [*CONVERSATION, {"role": "assistant", "content": " "}], "message 7: expected a reply, found an empty"),
        (
            CHATML,
            [*CONVERSATION, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
            "data row 7, message 7: expected text alone, found tool_calls",
        ),
    ],
)
def test_chat_errors(template, messages, pattern):
    with fails(pattern):
        chats([("data row 7", {"messages": messages})], byte_tokenizer(template=template))


def test_chat_needs_offsets(monkeypatch):
    tokenizer = byte_tokenizer(template=CHATML)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with fails("data.format chat: expected a fast tokenizer"):
        chats([("data row 1", {"messages": CONVERSATION})], tokenizer)
