"""Limit the work for requests: the length of the queue and the time of an answer; cancel requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException  # type: ignore[import-not-found]
from torch import nn
from transformers import PreTrainedModel
from transformers.cli.serving.utils import GenerateManager, GenerationState

T = TypeVar("T")

MOST_QUEUED = 64  # requests of one model in progress or waiting
MOST_SECONDS = 600.0  # time of one generation


class Ended(HTTPException):
    """A generation was ended early; the message is for its client."""

    def __str__(self) -> str:
        """Return the message alone; transformers puts it into the stream."""
        return str(self.detail)


class Job:
    """The work for one request: tokenize the prompt, wait in the queue, generate the answer.

    The task that handles the request makes the job, and the thread of its model runs it. Both read it from a context
    variable, because transformers' handlers between them do not pass it on.
    """

    def __init__(self, most_seconds: float) -> None:
        self.most_seconds = most_seconds
        self._deadline = float("inf")
        self._reason: tuple[int, str] | None = None  # why it ended: status and message
        self._waiting: set[asyncio.Future[Any]] = set()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self, status: int, message: str) -> None:
        """End the job while it waits, or else before the next layer of its model. Call this in the server's thread."""
        if self._reason is None:
            self._reason = status, message
            for future in self._waiting:
                future.cancel()
            for callback in self._callbacks:
                callback()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the job is cancelled."""
        self._callbacks.append(callback)

    async def result_of(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future, which is cancelled if the job ends first.

        Raises:
            Ended: the job ended.
        """
        self._waiting.add(future)
        try:
            if self._reason is not None:
                future.cancel()
            return await future
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            raise Ended(*self._reason) from None
        finally:
            self._waiting.discard(future)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the current job of the thread, and start its time limit.

        Raises:
            Ended: the job was cancelled before it started.
        """
        self._deadline = time.monotonic() + self.most_seconds
        token = _current.set(self)
        try:
            self.check()
            yield
        finally:
            _current.reset(token)

    def check(self) -> None:
        """Raise `Ended` if the job was cancelled or its time is over."""
        if self._reason is not None:
            raise Ended(*self._reason)
        if time.monotonic() > self._deadline:
            raise Ended(
                400,
                f"max_tokens: expected an answer within {self.most_seconds:g} seconds (--max-request-seconds of the "
                "server), found it unfinished; ask for fewer tokens or send a shorter prompt",
            )


_current: ContextVar[Job | None] = ContextVar("job", default=None)


class ModelQueue(GenerateManager):
    """transformers' queue of one model, whose requests run one after another, with a limit on its length."""

    def __init__(self, most_queued: int) -> None:
        super().__init__()
        self.most_queued = most_queued
        self.jobs: set[Job] = set()

    def admit(self, job: Job) -> None:
        """Count a request, before its prompt is tokenized, until it is removed from `jobs` or cancelled.

        Raises:
            HTTPException: the queue is full (429).
        """
        if len(self.jobs) >= self.most_queued:
            raise HTTPException(
                429,
                f"expected at most {self.most_queued} requests of this model at a time (--max-queued-requests of the "
                "server), found as many in progress or waiting; send it again later",
            )
        self.jobs.add(job)
        job.on_cancel(lambda: self.jobs.discard(job))

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a generation that streams; return its future."""
        return super().submit(_as_job(partial(fn, *args, **kwargs)))

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Queue a generation that does not stream; return an awaitable of its result, which ends when the job does."""
        job = _current.get()
        assert job is not None, "a generation outside a job"
        inner = super().async_submit(_as_job(partial(fn, *args, **kwargs)))
        outer = asyncio.get_running_loop().create_future()

        def pass_on(done: asyncio.Future[Any]) -> None:
            error = done.exception()  # asyncio logs an exception that is never read
            if not outer.done():
                outer.set_result(done.result()) if error is None else outer.set_exception(error)

        inner.add_done_callback(pass_on)
        return job.result_of(outer)


def _as_job(generate: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs a generation as the current job; it drops the inputs if the job is cancelled."""
    job = _current.get()
    assert job is not None, "a generation outside a job"
    work = [generate]
    job.on_cancel(work.clear)

    def run() -> Any:
        todo = work.copy()
        work.clear()
        with job.running():
            return todo.pop()()

    return run


class LimitedGeneration(GenerationState):
    """transformers' generation for several models, with limits."""

    def __init__(
        self, models: Iterable[PreTrainedModel], *, most_queued: int = MOST_QUEUED, most_seconds: float = MOST_SECONDS
    ) -> None:
        """Add hooks that check the current job before each layer of these models, in their `nn.ModuleList`."""
        super().__init__()
        self.most_queued, self.most_seconds = most_queued, most_seconds
        self._queues: dict[str, ModelQueue] = {}
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.ModuleList):
                    for layer in module:
                        layer.register_forward_pre_hook(_check_current)

    def get_manager(self, model_id: str, use_cb: bool = False) -> ModelQueue:
        return self._queues.setdefault(model_id, ModelQueue(self.most_queued))

    def job(self) -> Job:
        """Return a new job, and make it the job of the current task."""
        job = Job(self.most_seconds)
        _current.set(job)
        return job

    def cancel_all(self) -> None:
        """Cancel all jobs, because the server shuts down."""
        for queue in self._queues.values():
            for job in list(queue.jobs):
                job.cancel(503, "the server shuts down")


def _check_current(*_: Any) -> None:
    if job := _current.get():
        job.check()
