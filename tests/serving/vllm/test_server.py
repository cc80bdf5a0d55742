"""`vllm serve FOLDER` as people run it: a process of its own, the plugin found by itself, the openai client."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.byte_tokenizer import byte_tokenizer
from tests.serving import load
from tests.serving.malformed import bodies, post
from tests.serving.vllm.served import plans, saved, scratch, student

pytestmark = pytest.mark.vllm
NAME = "student"


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str

    def read(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def gauges(self, *names: str) -> list[float]:
        """What the server says of itself now; a name that it does not know fails."""
        lines = [line.split() for line in self.read("/metrics").splitlines() if line.startswith("vllm:")]
        found = {line[0].split("{")[0].removeprefix("vllm:"): float(line[-1]) for line in lines}
        return [found[name] for name in names]


def serve(*options: str) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = saved(student(plans()["lolcats"]), "lolcats")
    # What `vllm serve` starts; the command itself asks for a package of the name `vllm`, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", *options]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (scratch() / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}")
    for _ in range(400):
        assert process.poll() is None, (scratch() / "server.log").read_text()[-4000:]
        try:
            server.read("/health")
        except OSError:
            time.sleep(1)
        else:
            return server
    process.kill()
    raise AssertionError((scratch() / "server.log").read_text()[-4000:])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = serve("--shutdown-timeout", "60")
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai", reason="openai is not installed; vLLM brings it")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def by_transformers(text: str, new_tokens: int) -> str:
    tokenizer = byte_tokenizer()
    inputs = torch.tensor([tokenizer(text)["input_ids"]])
    model: Any = student(plans()["lolcats"])
    made = model.generate(inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(made[0, inputs.shape[1] :])


def test_completions(client: Any):
    made = client.completions.create(
        model=NAME, prompt="a red boat", max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert made.choices[0].text == by_transformers("a red boat", 8)
    assert made.usage.completion_tokens == 8
    assert len(made.choices[0].logprobs.token_logprobs) == 8


def test_streams_and_stops(client: Any):
    options = dict(model=NAME, prompt="a red boat", max_tokens=12, temperature=0, extra_body={"ignore_eos": True})
    whole = client.completions.create(**options).choices[0].text
    pieces = [event.choices[0].text for event in client.completions.create(stream=True, **options)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    stop = next(letter for letter in whole[3:] if letter.isprintable())
    made = client.completions.create(stop=[stop], **options).choices[0]
    assert made.text == whole[: whole.index(stop)]
    assert made.finish_reason == "stop"


def test_chat(client: Any):
    said = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(
        model=NAME, messages=said, max_tokens=6, temperature=0, logprobs=True, extra_body={"ignore_eos": True}
    )
    assert made.usage.completion_tokens == 6
    assert len(made.choices[0].logprobs.content) == 6
    choices = client.chat.completions.create(model=NAME, messages=said, max_tokens=6, n=4, seed=1).choices
    assert len(choices) == 4


def test_a_wrong_request_gets_a_message(client: Any):
    openai = pytest.importorskip("openai", reason="openai is not installed; vLLM brings it")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="a", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a", max_tokens=1)


def test_a_hundred_clients_at_once_each_get_their_own_answer(server: Server, client: Any):
    def asked(**fields: Any) -> dict[str, Any]:
        return dict(model=NAME, temperature=0, extra_body={"ignore_eos": True}) | fields

    expected = load.answers(client, asked)
    # Bytes that are no whole letter yet, vLLM keeps back.
    assert expected[3].rstrip("\ufffd") == by_transformers(load.PROMPTS[3], load.TOKENS).rstrip("\ufffd")
    process = server.process.pid
    assert load.started(process)  # the engine, whose memory counts
    load.check_many_clients(client, asked, expected, lambda: load.resident_bytes(process))
    for _ in range(100):
        if not any(server.gauges("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(server.read("/metrics"))


def test_malformed_requests_do_not_harm_it(server: Server, client: Any):
    """Some of what `linearize serve` refuses vLLM allows: it has more fields, and takes "1" for 1."""
    source = random.Random(0)
    statuses: list[int] = []
    for _ in range(500):
        path, body = bodies(source)
        status, answer = post(server.url, path, body)
        assert status < 500, (path, body, answer)
        assert status == 200 or json.loads(answer).keys() <= {"error", "detail"}, (path, body, answer)
        statuses.append(status)
    assert sum(400 <= status < 500 for status in statuses) > 300
    test_completions(client)


def test_health_metrics_and_an_end_that_waits(server: Server, client: Any):
    """SIGTERM: what runs is finished, and then the process ends. The last test: the server is gone after it."""
    server.read("/health")
    assert "vllm:num_requests_running" in server.read("/metrics")
    answers: list[Any] = []
    options = dict(model=NAME, prompt="a red boat", max_tokens=200, temperature=0, extra_body={"ignore_eos": True})
    asking = threading.Thread(target=lambda: answers.append(client.completions.create(**options)))
    asking.start()
    for _ in range(600):
        if any(server.gauges("num_requests_running")):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the request was never seen to run")
    server.process.send_signal(signal.SIGTERM)
    asking.join(timeout=120)
    assert answers and answers[0].usage.completion_tokens == 200
    server.process.wait(timeout=120)
