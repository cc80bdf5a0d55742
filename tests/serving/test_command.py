"""`linearize serve` up to the server itself: which engine, what is refused, and what the page is told."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, DynamicCache

import linearize
from linearize.base import UserError
from linearize.hf.cache import LinearizedCacheLayer
from linearize.hf.checkpoint import load_model, save_student
from linearize.report.load import RunRecord
from linearize.run.folder import Run, student_folder
from linearize.serving import command as serving
from linearize.serving.page import make_page
from linearize.serving.requests import ChatRequest, CompletionRequest, conversation, fault
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.commands import Command, assert_refused

SERVER = ("fastapi", "uvicorn", "openai", "accelerate")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is installed of engines and what they need; to be filled."""
    names: set[str] = set()
    find = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return (object() if name in names else None) if name in (*SERVER, "vllm") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run's folder with its model in it, which nobody has trained."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    made = Run(tiny.recipe(), tiny.teacher_folder(), folder, torch.float32, torch.device("cpu"))
    save_student(linearize.convert(tiny.llama(), made.recipe), byte_tokenizer(), {}, folder / "model")
    (folder / "recipe.yaml").write_text(made.recipe.to_yaml())
    record = RunRecord(model=made.model, dtype="float32", device="cpu", data="0" * 64, versions={})
    (folder / "run.json").write_text(json.dumps(record.to_json()))
    return made


# --- the engine -------------------------------------------------------------------------------------------------------


def test_vllm_where_it_is_installed_else_transformers(installed: set[str]) -> None:
    installed |= set(SERVER)
    assert serving.choose_engine("auto", alone=True) == "transformers"
    installed.add("vllm")
    assert serving.choose_engine("auto", alone=True) == serving.choose_engine("vllm", alone=True) == "vllm"
    assert (
        serving.choose_engine("auto", alone=False)
        == serving.choose_engine("transformers", alone=True)
        == "transformers"
    )
    installed -= set(SERVER)
    assert serving.choose_engine("auto", alone=True) == "vllm"


def test_an_engine_that_is_missing_is_named(installed: set[str], command: Command) -> None:
    served = tiny.teacher_folder()
    installed |= {"fastapi", "openai", "accelerate"}
    assert_refused(
        command("serve", served), "serve: expected the packages of transformers' server, found no uvicorn; pip"
    )
    assert_refused(command("serve", served, "--engine", "vllm"), "--engine: expected vLLM, found it not installed; pip")
    installed.add("vllm")
    assert_refused(
        command("serve", served, "--ui"), "serve: expected the packages of transformers' server, found no uvicorn"
    )
    assert_refused(
        command("serve", served, "--engine", "tgi"), "--engine: expected one of auto, vllm, transformers; found"
    )
    for options in (["--ui"], ["--teacher", served]):
        done = command("serve", served, "--engine", "vllm", *options)
        assert_refused(done, "--engine: expected transformers, whose server runs student and teacher, found vllm")
    assert_refused(
        command("serve", served, "--device", "cpu"), "--device: expected none, for vLLM computes where it was"
    )


def test_vllm_is_started_in_place_of_the_command(
    installed: set[str], command: Command, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def execv(path: str, words: list[str]) -> None:
        started.extend([path, words, os.environ.get("VLLM_API_KEY")])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("VLLM_API_KEY", "another")
    installed.add("vllm")
    port = free_port()
    done = command("serve", run.folder, "--port", port, "--api-key", "s3cret", "--dtype", "float32")
    folder = student_folder(str(run.folder))
    name = run.folder.resolve().name
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    assert started == [sys.executable, [sys.executable, *words, "--dtype", "float32"], "s3cret"]
    assert done.status == 0 and f"vLLM serves {name} at http://127.0.0.1:{port}/v1" in done.err
    assert "--engine transformers" in done.err and "s3cret" not in done.err
    started.clear()
    command("serve", run.folder, "--port", free_port(), "--served-model-name", "mine", "--max-model-len", 40)
    assert started[1][5:7] == ["--served-model-name", "mine"] and started[1][-2:] == ["--max-model-len", "40"]


def test_a_model_is_called_by_its_folder_not_by_its_path(run: Run, tmp_path: Path) -> None:
    assert serving.public_name(student_folder(str(run.folder))) == run.folder.resolve().name
    (tmp_path / "model").mkdir()
    assert serving.public_name(str(tmp_path / "model")) == "model"
    assert serving.public_name("someone/a-model") == "someone/a-model"


# --- what is refused --------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_what_cannot_be_served_is_refused_in_one_line(
    installed: set[str], command: Command, run: Run, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed |= {engine, *SERVER}
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("vLLM was started"))
    for module, names in {  # which the environment need not have
        "uvicorn": ("Server",),
        "linearize.serving.app": ("NO_TEMPLATE", "Served", "build_app"),
        "linearize.serving.guard": ("LimitedProtocol",),
        "linearize.serving.jobs": ("MOST_QUEUED", "MOST_SECONDS", "LimitedGeneration"),
    }.items():
        instead = type(sys)(module)
        vars(instead).update(dict.fromkeys(names, object))
        monkeypatch.setitem(sys.modules, module, instead)

    def refused(message: str, *words: Any) -> None:
        assert_refused(command("serve", *words, "--engine", engine), message)

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((run.folder / "model" / "config.json").read_text())
    refused(f"model {empty}: expected weights (*.safetensors), found none", empty)
    refused("model: expected a folder with a config.json, found none", tmp_path)
    refused(
        f"model {tiny.encoder_folder()}: expected a linearized model, found model_type 'bert'", tiny.encoder_folder()
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"--host, --port: expected an address that is free, found 127.0.0.1:{port}: Address already in use"
        refused(message, run.folder, "--port", port)
    refused("--host, --port: expected an address", run.folder, "--host", "203.0.113.7", "--port", free_port())
    if engine == "transformers":
        other = tiny.gpt2_folder()
        refused(f"teacher {other}: model_type: expected the student's llama", run.folder, "--teacher", other)


def test_an_empty_key_is_refused(command: Command, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty --api-key refused every client, and an empty environment variable meant that no key is required."""
    assert_refused(command("serve", run.folder, "--api-key", ""), "--api-key: expected a key, found an empty one")
    monkeypatch.setenv("LINEARIZE_API_KEY", "")
    assert_refused(command("serve", run.folder), "--api-key: expected a key, found an empty one")


def test_the_teacher_beside_a_student_is_its_runs_own(run: Run, tmp_path: Path) -> None:
    folder, said = student_folder(str(run.folder)), []
    given = (run.dtype, run.device, said.append)
    assert serving._teacher(folder, None, *given) == run.model and not said
    assert serving._teacher(folder, tiny.teacher_folder(), *given) == tiny.teacher_folder()
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert serving._teacher(str(alone), None, *given) is None
    assert said == ["without the teacher; pass --teacher to name it: expected a run that names it, found none"]
    with pytest.raises(UserError, match="expected a model folder"):
        serving._teacher(folder, str(tmp_path / "gone"), *given)


# --- requests ---------------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def test_what_transformers_honours_reaches_it() -> None:
    fields = {"stream": True, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a", "b"]}
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "user": "somebody", "stop": None}
    assert CompletionRequest.model_validate({"prompt": "x"} | fields | {"echo": False}).sampling() == fields
    assert CompletionRequest.model_validate({"prompt": "x"} | neutral).sampling() == {}
    chat = ChatRequest.model_validate(CHAT | neutral | {"max_completion_tokens": 7, "max_tokens": 9, "tools": []})
    assert chat.sampling() == {"max_tokens": 7} and conversation(chat.messages) == CHAT["messages"]
    assert CompletionRequest.model_validate({"prompt": "x", "temperature": 1e-9}).sampling() == {"temperature": 0.0}
    assert CompletionRequest.model_validate({"prompt": "x", "stop": []}).sampling() == {}


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("n", 2, "n: Input should be 1"),
        ("frequency_penalty", 0.5, "frequency_penalty: Input should be less than or equal to 0"),
        ("temperature", "hot", "temperature: Input should be a valid number"),
        ("logit_bias", {"5": 1}, "logit_bias: this field is not supported by transformers' server; leave it out"),
        ("messages", [{"role": "user", "content": "a\ud83d"}], "messages.0.content: "),
        ("stop", "\ud83d", "stop: "),
        ("a b", 1, "this field is not supported"),
        ("a\ud800", 1, "Input should be a valid string"),
        (
            "messages",
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "messages.0.tool_calls: Input should be None",
        ),
    ],
)
def test_what_would_be_passed_over_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(CHAT | {field: value})
    message, named = fault(found.value.errors())
    assert message.startswith(said) and (named is None or message.startswith(named))


# --- the page ---------------------------------------------------------------------------------------------------------

# Constant memory, and some heads of a layer, and whole layers, that keep all their keys.
PLANS: dict[str, dict[str, Any]] = {
    "constant": {},
    "a layer stays": {"layers.keep_softmax": [1]},
    "a head stays": {"heads": [{"kv_heads": ["0.1"], "mixer": None}]},
}


def tensors(layer: Any) -> list[torch.Tensor]:
    """What a layer of a cache holds, but for its count of tokens."""
    if not isinstance(layer, LinearizedCacheLayer):
        return [layer.keys, layer.values]
    assert layer.kept is not None
    return [x for name, x in layer.kept.named_tensors().items() if not name.endswith("seen")]


@pytest.mark.parametrize("kind", PLANS)
def test_the_page_is_told_what_caches_hold(kind: str) -> None:
    teacher = tiny.llama()
    student = linearize.convert(teacher, tiny.recipe().override(PLANS[kind]))
    told = make_page(("student", student), "teacher", chats=False).contents
    for model, about in zip((student, teacher), told["models"], strict=True):
        assert about["name"] == about["role"]
        for tokens in (9, 40):
            cache: Any = DynamicCache(config=model.config)
            with torch.no_grad():
                cache = model(torch.arange(tokens)[None], past_key_values=cache, use_cache=True).past_key_values
            found = sum(x.nbytes for layer in cache.layers for x in tensors(layer))
            assert found == about["constant_bytes"] + tokens * about["bytes_per_token"], (about, tokens)
    grows = [about["bytes_per_token"] for about in told["models"]]
    assert (grows[0] == 0) is (kind == "constant") and grows[0] < grows[1]
    start, saved = told["break_even_tokens"], grows[1] - grows[0]
    constant = told["models"][0]["constant_bytes"]
    assert constant + start * grows[0] < start * grows[1] and constant >= (start - 1) * saved


class Parts(HTMLParser):
    """What a page loads, its elements by id, and what labels what."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str | None] = []
        self.inputs: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [f"{tag} {name}" for name in ("src", "href", "action") if name in found]
        self.loads += [f"{tag} {name}" for name in found if name.startswith("on")]
        self.ids += [found["id"] or ""] if "id" in found else []
        self.labels += [found.get("for")] if tag == "label" else []
        self.inputs += [found.get("id")] if tag in ("input", "textarea") else []


def test_the_page_is_one_file_that_only_its_own_script_may_run_in() -> None:
    student = linearize.convert(tiny.llama(), tiny.recipe())
    page = make_page(("student", student), None, chats=True)
    parts = Parts()
    parts.feed(page.html)
    assert parts.loads == [] and len(set(parts.ids)) == len(parts.ids)
    assert set(parts.inputs) == set(parts.labels)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3\.org)", page.html
    )
    assert page.policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in page.policy and page.contents["models"][0]["role"] == "student" and page.contents["chats"]


def test_models_sample_unless_asked_not_to_and_know_how_much_they_read() -> None:
    llama = serving._sampling(load_model(tiny.teacher_folder(), dtype=torch.float32, device=torch.device("cpu")))
    assert (llama.generation_config.do_sample, llama.generation_config.top_k) == (True, 0)
    gpt2 = AutoModelForCausalLM.from_pretrained(tiny.gpt2_folder())
    assert [serving._most_tokens(llama, asked) for asked in (None, 40, 10**6)] == [32_768, 40, 10**6]
    assert [serving._most_tokens(gpt2, asked) for asked in (None, 40)] == [256, 40]
    with pytest.raises(UserError, match="--max-model-len: expected at most the model's 256 positions, found 257"):
        serving._most_tokens(gpt2, 257)
    llama.config.max_position_embeddings = 131_072
    assert serving._most_tokens(llama, None) == 131_072
