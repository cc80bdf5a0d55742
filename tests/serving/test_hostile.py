"""A thousand hostile requests in a row; `make test-faults` runs them."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from random import Random

import pytest

from tests.serving import load
from tests.serving.malformed import bodies, post
from tests.serving.server import Server, bundled_student, serving

pytestmark = pytest.mark.serve

REQUESTS, CLIENTS, KEY = 1000, 8, "s3cret"
COMPLETIONS = "/v1/completions"

# Prints the seconds that the slowest of its requests took, once its standard input ends.
PROBE = """
import sys, threading, time, urllib.request
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
times = []
while not ended.wait(0.02):
    started = time.perf_counter()
    urllib.request.urlopen(sys.argv[1] + "/health", timeout=60).close()
    times.append(time.perf_counter() - started)
print(len(times), max(times))
"""


@contextmanager
def probing(address: str) -> Iterator[Callable[[], tuple[int, float]]]:
    """Ask for /health all the time, in a process of its own; the function ends it and returns count and slowest."""
    command = [sys.executable, "-c", PROBE, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def end() -> tuple[int, float]:
            count, slowest = process.communicate(timeout=60)[0].split()
            return int(count), float(slowest)

        yield end
        process.kill()


def raw(server: Server, data: bytes, seconds: float = 0) -> None:
    """Send bytes, and leave after some time."""
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection, suppress(ConnectionError):
        connection.sendall(data)
        time.sleep(seconds)


def head(length: int, key: str, path: str = COMPLETIONS) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


KINDS = [
    *("malformed", "keyless", "wrong key", "nested", "errors", "large", "long"),
    *("leaves", "leaves full", "half", "bytes", "host"),
]
NESTED = b'{"prompt": ' + b"[" * 250_000 + b"]" * 250_000 + b"}"  # as large as a body may be
ERRORS = [  # each of as many errors as a body can hold
    json.dumps({"messages": [{}] * 125_000}).encode(),
    json.dumps({"messages": [1] * 180_000}).encode(),
    json.dumps({"messages": [{"role": "user", "content": [1] * 180_000}]}).encode(),
    json.dumps({f"{number:x}": 1 for number in range(50_000)}).encode(),
]
LARGE = b'{"prompt": "' + b"a b " * 1_000_000 + b'"}'
LONG = json.dumps({"prompt": "def f(x):\n" * 40_000, "max_tokens": 1}).encode()  # more tokens than fit
FULL = json.dumps({"prompt": "def f(x):\n" * 3_000, "max_tokens": 20_000}).encode()
ENDLESS = {"prompt": "def f(x):\n", "max_tokens": 30_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = bundled_student(tmp_path_factory.mktemp("served") / "student")
    with serving(folder, "--api-key", KEY) as running:
        yield running


def ask(server: Server, number: int) -> tuple[int, str]:
    """Return the status and the answer to a user's own prompt."""
    body = {"prompt": load.PROMPTS[number], "max_tokens": load.TOKENS, "temperature": 0}
    status, answer = post(server.address, COMPLETIONS, json.dumps(body).encode(), {"authorization": f"Bearer {KEY}"})
    return status, json.loads(answer)["choices"][0]["text"] if status == 200 else ""


def hostile(server: Server, source: Random) -> str:
    """Send a hostile request and see that its answer is the one it should have; return its kind."""
    kind = source.choice(KINDS)
    path, body = bodies(source)
    keyed = {"authorization": f"Bearer {KEY}"}
    if kind == "malformed":
        assert 400 <= post(server.address, path, body, keyed)[0] < 500
    elif kind == "keyless":
        assert post(server.address, path, source.choice([body, NESTED, LONG]))[0] == 401
    elif kind == "wrong key":
        assert post(server.address, path, body, {"authorization": source.choice(["", "Bearer ", "Basic x"])})[0] == 401
    elif kind == "nested":
        assert post(server.address, path, NESTED, keyed)[0] == 400
    elif kind == "errors":
        body, path = source.choice(ERRORS), source.choice([path, "/v1/chat/completions"])
        assert post(server.address, path, body, keyed)[0] == 400
    elif kind == "large":
        with suppress(OSError):  # the connection may be closed before all of it is sent
            assert post(server.address, path, LARGE, keyed)[0] == 413
    elif kind == "long":
        assert post(server.address, COMPLETIONS, LONG, keyed)[0] == 400
    elif kind == "leaves":
        data = json.dumps(ENDLESS | {"stream": source.random() < 0.5}).encode()
        raw(server, head(len(data), KEY) + data, source.choice([0, 0.1]))
    elif kind == "leaves full":
        data = source.choice([FULL, LONG])
        raw(server, head(len(data), KEY) + data, source.choice([0, 0.1]))
    elif kind == "half":
        raw(server, head(500, KEY) + b'{"prompt": "', source.choice([0, 0.1]))
    elif kind == "bytes":
        raw(server, source.randbytes(200) + b"\r\n\r\n")
    else:
        headers = keyed | {"host": "elsewhere.example"}
        assert post(server.address, COMPLETIONS, body, headers)[0] == 400
    return kind


def test_a_thousand_hostile_requests(server: Server) -> None:
    expected = []
    for number in range(CLIENTS):
        status, answer = ask(server, number)
        assert status == 200
        expected.append(answer)
    assert len(set(expected)) > CLIENTS // 2
    before = load.resident_bytes(server.process.pid)

    def client(number: int) -> Counter[str]:
        source, kinds = random.Random(number), Counter[str]()
        for turn in range(REQUESTS // CLIENTS):
            kinds[hostile(server, source)] += 1
            if turn % 10 == 0:
                status, answer = ask(server, number)
                assert status == 429 or (status, answer) == (200, expected[number])
                kinds[f"status {status}"] += 1
        return kinds

    with probing(server.address) as end:
        with ThreadPoolExecutor(CLIENTS) as clients:
            kinds = sum(clients.map(client, range(CLIENTS)), Counter[str]())
        count, slowest = end()
    assert kinds["status 200"] > 10 * kinds["status 429"]
    assert set(KINDS) < set(kinds) and count > 100
    assert [ask(server, number) for number in range(CLIENTS)] == [(200, answer) for answer in expected]
    assert not any("Traceback" in line or "Exception" in line for line in server.said), server.said
    grown = load.resident_bytes(server.process.pid) - before
    assert grown < 200e6, kinds
    assert slowest < 0.1, (count, kinds)
