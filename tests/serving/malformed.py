"""Requests with something wrong in each of them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from random import Random
from typing import Any

_MESSAGES = [{"role": "user", "content": "hello"}]
_VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 2},
    "/tokenize": {"prompt": "hello"},
}
_NO_NUMBERS: list[Any] = ["1", True, [], {}, [1], {"a": 1}, "\ud800", float("nan"), float("inf")]
_BAD: dict[str, list[Any]] = {
    "model": [1, True, [], {}, "no-such-model", "../../etc", "\ud800", ""],
    "prompt": [1, None, True, {}, "", ["a", "b"], [1, 2], "\ud800"],
    "messages": [1, None, "hello", {}, [], [1], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [None]]
    + [[{"role": role, "content": "x"}] for role in (1, None, [], "", {})]
    + [[{"role": "user", "content": content}] for content in (1, None, {}, [1], [{}], [{"type": "text"}], "\ud800")]
    + [[{"role": "user", "content": [{"type": kind, "text": "x"}]}] for kind in ("image_url", "input_audio", 1, None)]
    + [[{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]],
    "max_tokens": [0, -1, 2.5, 10**30, *_NO_NUMBERS],
    "max_completion_tokens": [0, -1, 2.5, 10**30, *_NO_NUMBERS],
    "temperature": [-1, 2.1, 1e308, *_NO_NUMBERS],
    "top_p": [0, -1, 1.1, 1e308, *_NO_NUMBERS],
    "seed": [1.5, 2**64, -(2**64), *_NO_NUMBERS],
    "stop": [1, True, {}, "", [""], [1], [None], ["a"] * 5, "x" * 300, "\ud800"],
    "stream": [1, "yes", [], {}, "\ud800"],
    "stream_options": [1, "yes", [], {"include_usage": 3}, {"other": True}],
    "n": [0, 2, -1, 2.5, "1", [], {}],
    "frequency_penalty": [0.5, -2, *_NO_NUMBERS],
    "presence_penalty": [0.5, -2, *_NO_NUMBERS],
    "logprobs": [1, 5, True, "x", [], {}, 0.5],
    "logit_bias": [{"5": 100}, {"a": 1}, {"99999999": 1}, 1],
    "generation_config": ['{"max_new_tokens": 1}', "{", 1, {}],
    "chat_template_kwargs": [{"a": 1}, 1],
    "tools": [[{}], [1], 1, "x"],
    "\ud800": [1],
    "__class__": [1],
}
_NOT_JSON = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": }',
    b"[" * 5000,
    b"{}" * 3,
    b"{'a': 1}",
)


def bodies(source: Random) -> tuple[str, bytes]:
    """The path and the body of one that no server should answer."""
    path = source.choice(list(_VALID))
    if source.random() < 0.1:
        return path, source.choice(_NOT_JSON)
    body = dict(_VALID[path])
    if source.random() < 0.1 and path != "/tokenize":
        del body["prompt" if path == "/v1/completions" else "messages"]
    else:
        # A prompt is no field of a chat, nor the other way round: that is wrong too.
        fields = list(_BAD) if path != "/tokenize" else ["model", "messages", "temperature", "__class__"]
        for name in source.sample(fields, source.randint(1, min(3, len(fields)))):
            body[name] = source.choice(_BAD[name])
        if path == "/tokenize" and body.get("messages", 0) is None:
            body["messages"] = _MESSAGES  # both of what there may be one of
    return path, json.dumps(body).encode()


def post(address: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    headers = {"content-type": "application/json"} | (headers or {})
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, body, headers), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
