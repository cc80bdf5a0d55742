"""transformers' server over models that are loaded already.

Requests are answered by the handlers of ``transformers serve``. Its own routes are not offered, since they load any
model that a client names, unload those in use, and list what lies in the hub's cache instead of what is served.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import FastAPI, HTTPException, Request  # type: ignore[import-not-found]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found]
from fastapi.responses import HTMLResponse, StreamingResponse  # type: ignore[import-not-found]
from jinja2 import TemplateError
from starlette.concurrency import run_in_threadpool  # type: ignore[import-not-found]
from starlette.exceptions import HTTPException as StarletteHTTPException  # type: ignore[import-not-found]
from starlette.middleware.trustedhost import TrustedHostMiddleware  # type: ignore[import-not-found]
from transformers import PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from linearize.base import UserError
from linearize.serving.guard import BYTES_PER_TOKEN, OTHER_BYTES, Guard, error_of, refusal
from linearize.serving.page import Page
from linearize.serving.requests import ChatRequest, CompletionRequest, TokenizeRequest, fault

NO_TEMPLATE = "this model has no chat template, it continues text: use /v1/completions"


@dataclass(frozen=True)
class Served:
    """A model that requests may name; `most_tokens`: of a prompt and its answer."""

    model: PreTrainedModel
    tokenizer: Any
    most_tokens: int

    @property
    def chats(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def most_characters(self) -> int:
        """Characters of a text that `most_tokens` can hold, if each is the longest of the vocabulary."""
        return self.most_tokens * max(map(len, self.tokenizer.get_vocab()))

    def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text; one that is too long in any case is refused before it takes time."""
        if len(text) > self.most_characters:
            raise HTTPException(
                400,
                f"prompt: expected at most {self.most_tokens} tokens for prompt and answer, found a text of "
                f"{len(text)} characters, which has more",
            )
        return self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids


class LoadedModels(ModelManager):
    """In the place of transformers' manager: the models of the command by name; no request loads another."""

    def __init__(self, served: Mapping[str, Served]) -> None:
        super().__init__()
        self.served = dict(served)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is; transformers would add a revision of the hub."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> Any:
        found = self.served[model_id_and_revision]
        return found.model, found.tokenizer


def build_app(
    served: Mapping[str, Served],
    *,
    api_key: str | None = None,
    hosts: list[str] | None = None,
    page: Page | None = None,
    started: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application that uvicorn runs.

    Args:
        served: the models by their names; a request that names none means the first.
        api_key: what requests must bear, but for those of ``/health`` and the page itself.
        hosts: the names by which it may be called, so that no web page can by a name of its own; None: any.
        started: is called once requests are answered.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        started()
        yield

    # transformers warns of every request that comes, and of those that do not sample.
    for name in ("cli.serving", "generation.configuration_utils"):
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    state, models = GenerationState(), LoadedModels(served)
    chat, completion = ChatCompletionHandler(models, state), CompletionHandler(models, state)
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    most_tokens = max(found.most_tokens for found in served.values())
    app.add_middleware(
        Guard,
        api_key=api_key,
        open_paths=("/health",) if page is None else ("/health", "/"),
        most_bytes=BYTES_PER_TOKEN * most_tokens + OTHER_BYTES,
    )
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    since = int(time.time())

    def named(name: str | None) -> str:
        chosen = next(iter(served)) if name is None else name
        if chosen not in served:
            raise HTTPException(404, f"model: expected {' or '.join(served)}; it is not served here")
        return chosen

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Any:
        name = named(body.model)
        tokens = await run_in_threadpool(_chat_tokens, served[name], body.turns())
        _check_room(served[name], tokens, body.sampling().get("max_tokens"))
        asked = {"model": name, "messages": body.turns()} | body.sampling()
        return _with_escaped_errors(await chat.handle_request(asked, _request_id(request)))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Any:
        name = named(body.model)
        tokens = await run_in_threadpool(served[name].tokens, body.prompt)
        _check_room(served[name], tokens, body.max_tokens)
        asked = {"model": name, "prompt": body.prompt} | body.sampling()
        return _with_escaped_errors(await completion.handle_request(asked, _request_id(request)))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Any:
        found = served[named(body.model)]
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "prompt: expected either a prompt or messages")
        if body.messages is not None:
            turns = [message.model_dump(include={"role", "content"}) for message in body.messages]
            tokens = await run_in_threadpool(_chat_tokens, found, turns)
        else:
            assert body.prompt is not None
            tokens = await run_in_threadpool(found.tokens, body.prompt)
        return {"count": len(tokens), "max_model_len": found.most_tokens, "tokens": tokens}

    @app.get("/v1/models")
    async def list_models() -> Any:
        data = [{"id": name, "object": "model", "created": since, "owned_by": "linearize"} for name in served]
        return {"object": "list", "data": data}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    if page is not None:

        @app.get("/")
        async def index() -> Any:
            return HTMLResponse(page.html, headers={"Content-Security-Policy": page.policy})

        @app.get("/page.json")
        async def about() -> Any:
            return page.about

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Any:
        return refusal(400, *fault(error.errors()))

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> Any:
        return refusal(error.status_code, str(error.detail))

    @app.exception_handler(UserError)
    async def unusable(_: Request, error: UserError) -> Any:
        return refusal(500, str(error))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Any:
        return refusal(500, "the server failed at this request; its own output says where")

    return app


# What transformers' server ends a stream with when generation fails; the message is not escaped.
_STREAM_ERROR = re.compile(r'(?:\A|(?<=\n\n))data: \{"error": "(.*)"\}\n\n\Z', re.DOTALL)


def _with_escaped_errors(response: Any) -> Any:
    """Make the error that can end a stream one of OpenAI's API, whatever its message holds."""
    if not isinstance(response, StreamingResponse):
        return response

    def escaped(found: re.Match[str]) -> str:
        return f"data: {json.dumps(error_of(500, found[1]))}\n\n"

    async def pieces(chunks: Any) -> AsyncGenerator[str, None]:
        async with aclosing(chunks):  # a client that leaves ends the generation
            async for chunk in chunks:
                yield _STREAM_ERROR.sub(escaped, chunk)

    response.body_iterator = pieces(response.body_iterator)
    return response


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or secrets.token_hex(12)


def _chat_tokens(found: Served, turns: list[dict[str, Any]]) -> list[int]:
    if not found.chats:
        raise HTTPException(400, NO_TEMPLATE)
    texts: Any = ChatCompletionHandler.get_processor_inputs_from_messages(
        turns, LoadedModels.get_model_modality(found.model, processor=found.tokenizer)
    )
    try:
        prompt: Any = found.tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:  # by which templates refuse an order of roles
        raise HTTPException(400, f"messages: the model's chat template refuses them: {error}") from None
    return found.tokens(prompt, add_special_tokens=False)


def _check_room(found: Served, tokens: list[int], max_tokens: int | None) -> None:
    """See that a prompt holds something, of this model's vocabulary, and leaves room for an answer."""
    if not tokens:
        raise HTTPException(400, "prompt: expected some text, found no token in it")
    vocabulary: int = found.model.config.get_text_config().vocab_size
    if max(tokens) >= vocabulary:
        raise HTTPException(400, f"prompt: expected tokens below the vocab_size of {vocabulary}, found {max(tokens)}")
    new = 1024 if max_tokens is None else max_tokens  # as many as transformers' server generates at most
    if len(tokens) + new > found.most_tokens:
        raise HTTPException(
            400,
            f"max_tokens: expected at most {found.most_tokens} tokens for prompt and answer, found {len(tokens)} and "
            f"{new} to generate",
        )
