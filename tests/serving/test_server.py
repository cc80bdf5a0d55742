"""`linearize serve` over transformers' server, by the `openai` client; `make test-serve` installs both."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.demo.corpus import teacher_path
from tests.byte_tokenizer import CHATML
from tests.serving import load
from tests.serving.malformed import bodies, post
from tests.serving.server import Server, bundled_student, chatting_student, serving

pytestmark = pytest.mark.serve

PROMPT = "def read_config(path):\n"
TURNS: Any = [{"role": "user", "content": "import os, sys, re"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting_student(tmp_path_factory.mktemp("served") / "student")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--max-queued-requests", load.CLIENTS) as running:
        yield running


def client(server: Server, **options: Any) -> Any:
    import openai  # here, because only these tests need it

    return openai.OpenAI(base_url=f"{server.address}/v1", max_retries=0, **({"api_key": "none"} | options))


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Any]:
    with client(server) as made:
        yield made


def asked(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"model": folder.name, "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields


def generated(folder: Path | str, text: str, new: int) -> tuple[str, int]:
    """What the model itself continues a text with, and how many tokens the text has."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=new)[0, length:]
    return tokenizer.decode(tokens, skip_special_tokens=True), length


def test_it_lists_what_it_serves_and_says_that_it_is_well(server: Server, api: Any, folder: Path) -> None:
    assert [model.id for model in api.models.list()] == ["student"]
    with urllib.request.urlopen(f"{server.address}/health") as answer:
        assert json.load(answer) == {"status": "ok"}


def test_a_completion_is_what_generate_makes(api: Any, folder: Path) -> None:
    expected, length = generated(folder, PROMPT, 12)
    answer = api.completions.create(**asked(folder))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    assert answer.model == "student"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        length,
        12,
        length + 12,
    )


def test_a_chat_answers_the_turns_of_the_models_template(api: Any, folder: Path) -> None:
    text = f"<|im_start|>user\n{TURNS[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML.count("<|im_start|>") == 2  # the text is that of this template
    expected, length = generated(folder, text, 12)
    answer = api.chat.completions.create(model="student", messages=TURNS, temperature=0, max_completion_tokens=12)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 12)
    turns = [
        *TURNS,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    again = api.chat.completions.create(model="student", messages=turns, temperature=0, max_tokens=3)
    assert again.usage.prompt_tokens > length + 12


def test_a_stream_brings_the_same_in_pieces_and_usage_at_its_end(api: Any, folder: Path) -> None:
    whole = api.completions.create(**asked(folder))
    *pieces, last = api.completions.create(**asked(folder), stream=True, stream_options={"include_usage": True})
    assert len(pieces) > 6 and "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert last.usage == whole.usage and last.choices[0].finish_reason == "length"

    fields: Any = dict(model="student", messages=TURNS, temperature=0, max_tokens=12)
    whole = api.chat.completions.create(**fields)
    *pieces, last = api.chat.completions.create(**fields, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content and last.usage == whole.usage


@pytest.mark.parametrize("several", [False, True])
def test_it_stops_at_strings(api: Any, folder: Path, several: bool) -> None:
    plain = api.completions.create(**asked(folder, max_tokens=40)).choices[0].text
    stop = plain[9:12]
    answer = api.completions.create(**asked(folder, max_tokens=40), stop=["never seen", stop] if several else stop)
    assert answer.choices[0].finish_reason == "stop"
    # The token that completes the string is part of the answer, as transformers has it.
    end = plain.index(stop) + len(stop)
    assert plain[:end] in answer.choices[0].text and answer.choices[0].text in plain[: end + 12]
    assert answer.usage.completion_tokens < 40


def test_it_samples_unless_temperature_is_0_and_a_seed_repeats_it(api: Any, folder: Path) -> None:
    def text(**fields: Any) -> str:
        fields = {"model": "student", "prompt": PROMPT, "max_tokens": 16} | fields
        return api.completions.create(**fields).choices[0].text

    assert len({text() for _ in range(4)}) > 1, "a request without temperature does not sample"
    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text(temperature=0) == text(temperature=1e-9) == text(top_p=1e-9, seed=3)


def test_what_is_wrong_with_a_request_is_said(api: Any, folder: Path) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="expected 'student', found another name"):
        api.completions.create(**asked(folder, model="gpt-4"))
    for fields, message in (
        ({"n": 3}, "n: Input should be 1"),
        ({"logprobs": 2}, "logprobs: Input should be None"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"prompt": ""}, "prompt: expected some text"),
        ({"stop": ["x" * 300]}, "stop: expected a string of 1 to 256 characters, or up to 4 of them"),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config: this field is not supported"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as found:
            api.completions.create(**asked(folder, **fields))
        assert found.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="tools"):
        api.chat.completions.create(model="student", messages=TURNS, tools=[{"type": "function"}])


def test_no_prompt_holds_the_server(server: Server, api: Any, folder: Path) -> None:
    """One of 30 MB is refused before it is parsed, and one that is too long by a little behind that."""
    import openai

    started = time.perf_counter()
    for prompt, message in (
        ("a b " * 7_500_000, "body: expected at most 589824 bytes, found more"),
        ("def f(x):\n" * 9_000, "expected at most 32768 tokens for prompt and answer, found "),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            api.completions.create(**asked(folder, prompt=prompt))
        turns = [{"role": "user", "content": prompt}]
        with pytest.raises(openai.APIStatusError, match=message):
            api.chat.completions.create(model="student", messages=turns)
        with pytest.raises(urllib.error.HTTPError):
            data = json.dumps({"prompt": prompt}).encode()
            request = urllib.request.Request(f"{server.address}/tokenize", data, {"content-type": "application/json"})
            urllib.request.urlopen(request).close()
    assert time.perf_counter() - started < 20


def test_a_name_and_a_limit_of_its_own(folder: Path) -> None:
    import openai

    with serving(folder, "--served-model-name", "mine", "--max-model-len", "40") as server, client(server) as api:
        assert [model.id for model in api.models.list()] == ["mine"]
        assert api.completions.create(**asked(folder, model="mine")).usage.completion_tokens == 12
        with pytest.raises(openai.BadRequestError, match="expected at most 40 tokens for prompt and answer, found"):
            api.completions.create(**asked(folder, model="mine", max_tokens=40))
        usage = api.completions.create(model="mine", prompt=PROMPT, temperature=0).usage
        assert usage.total_tokens <= 40  # an answer of no stated length ends where the room does
        assert usage.total_tokens == 40 or usage.completion_tokens < 20


def test_malformed_requests_are_the_clients_fault(server: Server) -> None:
    source = random.Random(0)
    for _ in range(500):
        path, body = bodies(source)
        status, answer = post(server.address, path, body)
        assert 400 <= status < 500, (path, body, answer)
        message = json.loads(answer)["error"]["message"]
        assert isinstance(message, str) and message, (path, body)
    assert not any("Traceback" in line for line in server.said)


ODD = ("\n", " ", "\U0001f600", "e\u0301", "\x00", "</s>", "<|endoftext|>", "\u202e", "\ufffd", "'" * 200)


def test_odd_requests_are_answered_or_refused(server: Server) -> None:
    for text in ODD:
        for fields in ({"stop": text}, {"stop": [text, "x"]}, {"prompt": text}, {"prompt": text, "stop": text}):
            for stream in (False, True):
                asking = {"prompt": PROMPT, "max_tokens": 2, "stream": stream} | fields
                if stream:
                    request = urllib.request.Request(
                        f"{server.address}/v1/completions",
                        json.dumps(asking).encode(),
                        {"content-type": "application/json"},
                    )
                    with urllib.request.urlopen(request) as answer:
                        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
                    assert not any("error" in event for event in events), asking
                else:
                    status, answer = post(server.address, "/v1/completions", json.dumps(asking).encode())
                    assert status == 200, (asking, answer)
    assert not any("Traceback" in line for line in server.said)


def test_a_key_is_asked_for_and_other_names_are_not_answered(folder: Path) -> None:
    import openai

    with serving(folder, "--api-key", "s3cret") as server:
        with client(server, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError, match="--api-key"):
            wrong.completions.create(**asked(folder))
        with client(server, api_key="s3cret") as right:
            assert right.completions.create(**asked(folder)).usage.completion_tokens == 12
        with urllib.request.urlopen(f"{server.address}/health") as answer:
            assert answer.status == 200
        # A web page that lets its own name mean this machine is still not this server's.
        request = urllib.request.Request(f"{server.address}/health", headers={"host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        with refused.value as error:
            assert error.code == 400


NESTED = b'{"prompt": ' + b"[" * 30_000_000 + b"]" * 30_000_000 + b"}"


def test_bodies_without_a_key_cost_nothing(folder: Path) -> None:
    """60 MB of nested lists take seconds to parse. They get 401, or 413 with the key, and /health answers meanwhile."""
    with serving(folder, "--api-key", "s3cret") as server:
        before, slowest = load.resident_bytes(server.process.pid), 0.0
        for key, expected in (("none", 401), ("s3cret", 413)):
            ended: list[int] = []
            headers = {"authorization": f"Bearer {key}"}
            sending = threading.Thread(
                target=lambda ended, headers: ended.append(post(server.address, "/v1/completions", NESTED, headers)[0]),
                args=(ended, headers),
            )
            sending.start()
            while sending.is_alive():
                started = time.perf_counter()
                urllib.request.urlopen(f"{server.address}/health").close()
                slowest = max(slowest, time.perf_counter() - started)
            sending.join()
            assert ended == [expected]
        assert slowest < 1
        assert load.resident_bytes(server.process.pid) - before < 200e6


def test_slow_clients_do_not_block_others(server: Server) -> None:
    """Connections beyond the limit are closed at once, and the others after `HEAD_SECONDS` without a whole head."""
    from linearize.serving import guard

    host, port = server.address.removeprefix("http://").split(":")
    slow = []
    for _ in range(guard.MOST_CONNECTIONS + 20):
        slow.append(socket.create_connection((host, int(port))))
        with suppress(OSError):
            slow[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
    started = time.perf_counter()
    while True:
        try:
            with urllib.request.urlopen(f"{server.address}/health") as answer:
                assert answer.status == 200
                break
        except OSError:
            assert time.perf_counter() - started < guard.HEAD_SECONDS + 10
            time.sleep(0.2)
    for connection in slow:
        connection.settimeout(guard.HEAD_SECONDS + 10)
        with suppress(ConnectionError):
            assert connection.recv(100) == b""  # closed
        connection.close()


def test_a_model_of_no_numbers_says_so(folder: Path, tmp_path: Path) -> None:
    import openai

    shutil.copytree(folder, broken := tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with serving(broken) as server, client(server) as api:
        for temperature in (0, 1):
            with pytest.raises(openai.InternalServerError, match="expected logits that are numbers, found NaN"):
                api.completions.create(**asked(broken, temperature=temperature))
        with pytest.raises(openai.APIError, match="expected logits that are numbers, found NaN"):
            list(api.completions.create(**asked(broken), stream=True))
        with urllib.request.urlopen(f"{server.address}/health") as answer:
            assert answer.status == 200
        assert not any("Traceback" in line for line in server.said)


def test_errors_within_a_stream_are_escaped() -> None:
    from linearize.serving.app import _stream

    text = 'data: {"text": "data: {\\"error\\": \\"x\\"}"}\n\n'

    async def chunks() -> AsyncIterator[str]:
        yield text
        yield text + 'data: {"error": "a "quote" and\na line"}\n\n'

    async def read() -> str:
        return "".join([chunk async for chunk in _stream(chunks(), lambda: ended.append(True))])

    ended: list[bool] = []
    first, second, third = [json.loads(event[6:]) for event in asyncio.run(read()).strip().split("\n\n")]
    assert ended == [True]
    assert first == second == json.loads(text[6:])
    assert third["error"]["message"] == 'a "quote" and\na line'


@pytest.mark.parametrize(
    "path, body, headers, message",
    [
        ("/tokenize", b'{"messages": []}', {}, "messages: List should have at least 1 item"),
        ("/tokenize", b"{}", {}, "prompt: expected either a prompt or messages"),
        ("/v1/completions", b'{"prompt": }', {}, "body: expected JSON, found other text from character "),
        (
            "/v1/completions",
            b'{"prompt": "a"}',
            {"content-type": "text/plain"},
            "body: expected a JSON object, sent with",
        ),
        ("/v1/completions", b"[1]", {}, "body: expected a JSON object, sent with"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(
    server: Server, path: str, body: bytes, headers: dict[str, str], message: str
) -> None:
    status, answer = post(server.address, path, body, headers)
    error = json.loads(answer)["error"]
    assert status == 400 and error["message"].startswith(message), error
    assert error["param"] in (None, "messages")


@pytest.mark.parametrize("late", [True, False])
def test_a_body_that_is_late_or_too_large(late: bool) -> None:
    """Without a Content-Length, a size is known only when the body has come."""
    from linearize.serving import guard

    chunks: list[dict[str, Any]] = [{"type": "http.request", "body": b"12345", "more_body": k < 2} for k in range(3)]
    sent: list[dict[str, Any]] = []

    async def application(*_: Any) -> None:
        raise AssertionError("the application received the request")

    async def receive() -> dict[str, Any]:
        if late:
            await asyncio.sleep(60)
        return chunks.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    made = guard.Guard(application, api_key=None, open_paths=(), most_bytes=14, body_seconds=0.05 if late else 30.0)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(made(scope, receive, send))
    assert sent[0]["status"] == (408 if late else 413)
    assert (b"within 0.05 seconds" if late else b"expected at most 14 bytes") in sent[1]["body"]


def test_without_a_template_it_continues_text_and_has_a_teacher_by_name(tmp_path: Path) -> None:
    import openai

    folder, teacher = bundled_student(tmp_path / "student"), str(teacher_path())
    with serving(folder, "--teacher", teacher) as server, client(server) as api:
        assert not any(str(folder) in line for line in server.said)
        assert any("no chat template" in line for line in server.said)
        with pytest.raises(openai.BadRequestError, match="no chat template, it continues text: use /v1/completions"):
            api.chat.completions.create(model="student", messages=TURNS)
        prompt, texts = (
            "".join(f"def read_{x}(path):\n    return {x}\n" for x in "abcdefghij"),
            set(),
        )  # beyond the window
        for name in (str(folder), teacher):
            answer = api.completions.create(**asked(Path(name), prompt=prompt))
            assert answer.choices[0].text == generated(name, prompt, 12)[0]
            texts.add(answer.choices[0].text)
        assert len(texts) == 2  # they are two models


def test_many_clients_at_once_each_get_their_own_answer(server: Server, folder: Path) -> None:
    with client(server, timeout=600) as api:
        expected = load.answers(api, partial(asked, folder))
        assert expected[3] == generated(folder, load.PROMPTS[3], load.TOKENS)[0]
        process = server.process.pid
        load.check_many_clients(api, partial(asked, folder), expected, lambda: load.resident_bytes(process))
        assert not any("Traceback" in line for line in server.said)


def endless(folder: Path, **fields: Any) -> dict[str, Any]:
    """Return a request whose answer takes minutes."""
    return asked(folder, max_tokens=30_000) | fields


def leave(server: Server, body: dict[str, Any], seconds: float = 1) -> None:
    """Send a request, and leave after so many seconds."""
    host, port = server.address.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        time.sleep(seconds)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_ends_the_generation(server: Server, api: Any, folder: Path, stream: bool) -> None:
    for _ in range(3):
        leave(server, endless(folder, stream=stream))
    started = time.perf_counter()
    assert api.completions.create(**asked(folder)).usage.completion_tokens == 12
    assert time.perf_counter() - started < 10
    assert not any("Traceback" in line or "Exception" in line for line in server.said)


def test_who_leaves_while_prompts_are_tokenized(server: Server, api: Any, folder: Path) -> None:
    """One prompt at a time is tokenized; those of clients that have left are dropped before it is their turn."""
    for _ in range(60):
        leave(server, asked(folder, prompt="q~" * 280_000), 0)
    started = time.perf_counter()
    assert api.completions.create(**asked(folder)).usage.completion_tokens == 12
    assert time.perf_counter() - started < 5


def test_texts_that_are_far_too_long_are_tokenized_in_part() -> None:
    from fastapi import HTTPException

    from linearize.serving.app import Served

    tokenizer: Any = AutoTokenizer.from_pretrained(teacher_path())
    seen: list[int] = []

    def counting(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return tokenizer(text, **options)

    served = Served(AutoModelForCausalLM.from_pretrained(teacher_path()), counting, 100)
    for text in ("def f(x):", "x " * 90, "    " * 300):
        assert served.tokens(text) == tokenizer(text).input_ids
    seen.clear()
    with pytest.raises(HTTPException, match="expected at most 100 tokens"):
        served.tokens("q~" * 50_000)
    assert sum(seen) < 10_000


def test_a_client_that_leaves_has_no_place_in_the_queue() -> None:
    """Its stream may never begin, so that nothing else ends the request."""
    from starlette.exceptions import HTTPException

    from linearize.serving.jobs import LimitedGeneration

    generation = LimitedGeneration([], most_queued=1)
    queue, job = generation.get_manager("student"), generation.job()
    queue.admit(job)
    with pytest.raises(HTTPException, match="429"):
        queue.admit(generation.job())
    job.cancel(499, "left")
    queue.admit(generation.job())


def test_a_job_ends_before_the_next_layer() -> None:
    """A long prompt is one pass through the layers, so what ends it is checked there."""
    from linearize.serving.jobs import Ended, LimitedGeneration

    model: Any = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32)
    generation, tokens, passed = LimitedGeneration([model], most_seconds=60.0), torch.tensor([[5, 6, 7]]), []
    model.model.layers[1].register_forward_hook(lambda *_: passed.append(1) or job.cancel(499, "left"))
    model.model.layers[2].register_forward_hook(lambda *_: passed.append(2))
    job = generation.job()
    with pytest.raises(Ended, match="left"), job.running():
        model(tokens)
    assert passed == [1]
    with pytest.raises(Ended, match="left"), job.running():
        passed.append(3)
    assert passed == [1]
    generation.job()
    model(tokens)
    assert passed == [1, 1, 2]


def test_a_full_queue_refuses_and_a_long_answer_ends(folder: Path) -> None:
    import openai

    limits = ("--max-queued-requests", "1", "--max-request-seconds", "3")
    with serving(folder, *limits) as server, client(server) as api:
        stream = api.completions.create(**endless(folder), stream=True)
        next(iter(stream))
        for streaming in (False, True):
            with pytest.raises(openai.RateLimitError, match="expected at most 1 requests of this model at a time"):
                api.completions.create(**asked(folder), stream=streaming)
        with pytest.raises(openai.APIError, match="expected an answer within 3 seconds"):
            list(stream)
        with pytest.raises(openai.BadRequestError, match="expected an answer within 3 seconds"):
            api.completions.create(**endless(folder))
        assert api.completions.create(**asked(folder)).usage.completion_tokens == 12
        assert not any("Traceback" in line for line in server.said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(folder: Path, number: int) -> None:
    with serving(folder) as server, client(server) as api:
        expected = api.completions.create(**asked(folder, max_tokens=30)).choices[0].text
        stream = iter(api.completions.create(**asked(folder, max_tokens=30), stream=True))
        pieces = [next(stream).choices[0].text]
        ended: list[int] = []
        waiting = threading.Thread(target=lambda: ended.append(server.end(number)))
        waiting.start()
        pieces += [piece.choices[0].text for piece in stream]
        waiting.join()
        assert "".join(pieces) == expected and ended == [0]
        assert not any("Traceback" in line for line in server.said)


def test_a_signal_ends_the_server_within_5_seconds(folder: Path) -> None:
    import openai

    with serving(folder) as server, client(server) as api:
        stream = api.completions.create(**endless(folder), stream=True)
        next(iter(stream))
        refused: list[str] = []

        def wait() -> None:
            with pytest.raises(openai.APIStatusError) as error:
                api.completions.create(**endless(folder))
            refused.append(str(error.value))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(1)
        started = time.perf_counter()
        assert server.end() == 0
        assert time.perf_counter() - started < 5
        with pytest.raises(openai.APIError, match="the server shuts down"):
            list(stream)
        waiting.join()
        assert "503" in refused[0] and "the server shuts down" in refused[0]
        assert not any("Traceback" in line for line in server.said)
