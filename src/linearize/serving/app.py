"""transformers' server for models that are already loaded.

Requests are answered by the handlers of ``transformers serve``. Its own routes are not offered: they load any model
that a client names, unload models in use, and list the hub's cache instead of the served models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request  # type: ignore[import-not-found]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found]
from fastapi.responses import HTMLResponse, StreamingResponse  # type: ignore[import-not-found]
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException  # type: ignore[import-not-found]
from starlette.middleware.trustedhost import TrustedHostMiddleware  # type: ignore[import-not-found]
from transformers import BatchEncoding, PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from linearize.base import UserError
from linearize.serving.guard import BYTES_PER_TOKEN, OTHER_BYTES, Guard, error_of, refusal
from linearize.serving.jobs import Job, LimitedGeneration
from linearize.serving.page import Page
from linearize.serving.requests import ChatRequest, CompletionRequest, TokenizeRequest, conversation, fault

_MARGIN = 1024  # a prefix of a text may have up to this many tokens more than the whole text
NEW_TOKENS = 1024  # length of an answer if the request sets no limit
NO_TEMPLATE = "this model has no chat template, it continues text: use /v1/completions"


@dataclass(frozen=True)
class Served:
    """A model that requests may name; `most_tokens` limits a prompt and its answer together."""

    model: PreTrainedModel
    tokenizer: Any
    most_tokens: int

    @property
    def chats(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text; of a text that is far too long, only a prefix is tokenized.

        Raises:
            HTTPException: the text is too long.
        """
        characters = 2 * self.most_tokens
        while characters < len(text):
            if len(self.tokenizer(text[:characters]).input_ids) > self.most_tokens + _MARGIN:
                raise HTTPException(
                    400,
                    f"prompt: expected at most {self.most_tokens} tokens for prompt and answer, found a text of "
                    f"{len(text)} characters, which has more",
                )
            characters *= 4
        return self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids


class TokenizedPrompt:
    """A tokenizer that returns the tokens of a request's prompt, tokenized earlier in another thread.

    transformers' handlers tokenize in the server's thread, where a long prompt keeps other requests waiting. All other
    calls go to the tokenizer.
    """

    def __init__(self, tokenizer: Any, tokens: list[int]) -> None:
        self._wrapped, self._tokens = tokenizer, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __call__(self, text: str, **options: Any) -> BatchEncoding:
        """Return the prompt's tensors if tensors are requested (by the completions handler); tokenize other texts."""
        return self._inputs() if "return_tensors" in options else self._wrapped(text, **options)

    def apply_chat_template(self, *_: Any, **__: Any) -> BatchEncoding:
        return self._inputs()

    def _inputs(self) -> BatchEncoding:
        ids = torch.tensor([self._tokens])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


class Prepared(ModelManager):
    """Replacement of transformers' manager for one request: it holds the model and the prompt, and loads nothing."""

    def __init__(self, served: Served, tokens: list[int]) -> None:
        super().__init__()
        self.served, self.tokens = served, tokens

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name unchanged; transformers would add a revision of the hub."""
        return model_id

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
        return self.served.model, TokenizedPrompt(self.served.tokenizer, self.tokens)


def build_app(
    served: Mapping[str, Served],
    generation: LimitedGeneration,
    *,
    api_key: str | None = None,
    hosts: list[str] | None = None,
    page: Page | None = None,
    started: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application that uvicorn runs.

    Args:
        served: models by name; a request without a name means the first.
        generation: the queues of these models, with limits.
        api_key: the key that requests must send, except for ``/health`` and the page itself.
        hosts: allowed Host headers, which protects against DNS rebinding by web pages; None: any.
        page: the page of ``--ui``, if it is served.
        started: called once the server answers requests.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        started()
        yield
        tokenizing.shutdown(wait=False, cancel_futures=True)

    # transformers warns at every request, and again at those that do not sample.
    for name in ("cli.serving", "generation.configuration_utils"):
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    # Prompts are tokenized one at a time, because several would take the cores that generate. A prompt whose client
    # has left is dropped if it still waits, and is tokenized to its end otherwise.
    tokenizing = ThreadPoolExecutor(1)
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
            names = " or ".join(map(repr, served))
            raise HTTPException(404, f"model: expected {names}, found another name, which is not served here")
        return chosen

    def begin(request: Request, name: str) -> tuple[Job, Callable[[], None]]:
        """Admit a request; return its job, cancelled if the client leaves, and a function to call after the answer."""
        queue, job = generation.get_manager(name), generation.job()
        queue.admit(job)
        watch = asyncio.create_task(_cancel_when_left(request, job))

        def end() -> None:
            watch.cancel()
            queue.jobs.discard(job)

        return job, end

    async def tokens_of(job: Job, tokenize: Callable[..., list[int]], *args: Any) -> list[int]:
        return await job.result_of(asyncio.get_running_loop().run_in_executor(tokenizing, partial(tokenize, *args)))

    async def answer(
        handler: type[ChatCompletionHandler] | type[CompletionHandler],
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompt: dict[str, Any],
        tokenize: Callable[[Served], list[int]],
    ) -> Any:
        """Return the response of a handler of transformers."""
        name = named(body.model)
        found = served[name]
        asked: dict[str, Any] = {"model": name} | prompt | body.sampling()
        job, end = begin(request, name)
        try:
            tokens = await tokens_of(job, tokenize, found)
            asked["max_tokens"] = _new_tokens(found, tokens, asked.get("max_tokens"))
            request_id = request.headers.get("x-request-id") or secrets.token_hex(12)
            response = await handler(Prepared(found, tokens), generation).handle_request(asked, request_id)
        except BaseException:
            end()
            raise
        if isinstance(response, StreamingResponse):
            response.body_iterator = _stream(response.body_iterator, end)
        else:
            end()
        return response

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Any:
        turns = conversation(body.messages)
        return await answer(
            ChatCompletionHandler, request, body, {"messages": turns}, lambda found: _chat_tokens(found, turns)
        )

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Any:
        return await answer(
            CompletionHandler, request, body, {"prompt": body.prompt}, lambda found: found.tokens(body.prompt)
        )

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Any:
        name = named(body.model)
        found = served[name]
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "prompt: expected either a prompt or messages")
        job, end = begin(request, name)
        try:
            if body.messages is not None:
                tokens = await tokens_of(job, _chat_tokens, found, conversation(body.messages))
            else:
                assert body.prompt is not None
                tokens = await tokens_of(job, found.tokens, body.prompt)
        finally:
            end()
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
        async def page_json() -> Any:
            return page.contents

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


# transformers' server ends a stream with this when generation fails; the message is not escaped.
_STREAM_ERROR = re.compile(r'(?:\A|(?<=\n\n))data: \{"error": "(.*)"\}\n\n\Z', re.DOTALL)


async def _stream(chunks: Any, end: Callable[[], None]) -> AsyncGenerator[str, None]:
    """Yield the chunks of a stream; rewrite an error at its end as OpenAI's API has it. Call `end` afterwards."""

    def escaped(error: re.Match[str]) -> str:
        return f"data: {json.dumps(error_of(500, error[1]))}\n\n"

    try:
        async with aclosing(chunks):  # a client that leaves ends the generation
            async for chunk in chunks:
                yield _STREAM_ERROR.sub(escaped, chunk)
    finally:
        end()


async def _cancel_when_left(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel(499, "the client has left")


def _chat_tokens(found: Served, turns: list[dict[str, Any]]) -> list[int]:
    if not found.chats:
        raise HTTPException(400, NO_TEMPLATE)
    texts: Any = ChatCompletionHandler.get_processor_inputs_from_messages(turns, Modality.LLM)
    try:
        prompt: Any = found.tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:  # by which templates refuse an order of roles
        raise HTTPException(400, f"messages: the model's chat template refuses them: {error}") from None
    return found.tokens(prompt, add_special_tokens=False)


def _new_tokens(found: Served, tokens: list[int], max_tokens: int | None) -> int:
    """Return how many tokens to generate: the request's limit, or else `NEW_TOKENS` or fewer if they do not fit.

    Raises:
        HTTPException: the prompt is empty, has tokens outside the model's vocabulary, or is too long.
    """
    if not tokens:
        raise HTTPException(400, "prompt: expected some text, found no token in it")
    vocabulary: int = found.model.config.get_text_config().vocab_size
    if max(tokens) >= vocabulary:
        raise HTTPException(400, f"prompt: expected tokens below the vocab_size of {vocabulary}, found {max(tokens)}")
    room = found.most_tokens - len(tokens)
    new = min(NEW_TOKENS, max(room, 1)) if max_tokens is None else max_tokens
    if new > room:
        raise HTTPException(
            400,
            f"max_tokens: expected at most {found.most_tokens} tokens for prompt and answer, found {len(tokens)} and "
            f"{new} to generate",
        )
    return new
