"""Limits of the generation behind a request: how many wait, how long one takes, and what ends it early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.exceptions import HTTPException  # type: ignore[import-not-found]
from torch import nn
from transformers import PreTrainedModel
from transformers.cli.serving.utils import GenerateManager, GenerationState

MOST_QUEUED = 64  # requests of one model that are in progress or wait
MOST_SECONDS = 600.0  # of the generation of one request


class Ended(HTTPException):
    """The generation was ended early; the message is for its client."""

    def __str__(self) -> str:
        """Return the message alone; transformers puts it into the stream."""
        return str(self.detail)


class Job:
    """The generation of one request.

    It is made by the task that handles the request and runs in the thread of its model. The two know it by a context
    variable, because transformers' handlers between them do not pass it on.
    """

    def __init__(self, most_seconds: float) -> None:
        """Make a job that may take so many seconds from when it starts to run."""
        self.most_seconds = most_seconds
        self.on_cancel: Callable[[], None] = lambda: None
        self._deadline = float("inf")
        self._ended: Ended | None = None

    def cancel(self, status: int, message: str) -> None:
        """End it before the next layer of its model, or before it starts; call this in the thread of the server."""
        if self._ended is None:
            self._ended = Ended(status, message)
            self.on_cancel()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make it the job of this thread, and start its time.

        Raises:
            Ended: it was cancelled before it could start.
        """
        self._deadline = time.monotonic() + self.most_seconds
        token = _current.set(self)
        try:
            self.check()
            yield
        finally:
            _current.reset(token)

    def check(self) -> None:
        """Raise `Ended` if it was cancelled, or if its time is over."""
        if self._ended is not None:
            raise self._ended
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
        """Make an empty queue.

        Args:
            most_queued: most requests in progress or waiting; those whose clients left do not count.
        """
        super().__init__()
        self.most_queued = most_queued
        self.jobs: set[Job] = set()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a generation that streams.

        Raises:
            HTTPException: the queue is full (429).
        """
        return super().submit(self._as_job(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Queue a generation that does not stream.

        Raises:
            HTTPException: the queue is full (429).
        """
        return super().async_submit(self._as_job(fn), *args, **kwargs)

    def _as_job(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        job = _current.get()
        assert job is not None, "a generation outside a job"
        if len(self.jobs) >= self.most_queued:
            raise HTTPException(
                429,
                f"expected at most {self.most_queued} requests of this model at a time (--max-queued-requests of the "
                "server), found as many in progress or waiting; send it again later",
            )
        self.jobs.add(job)
        job.on_cancel = lambda: self.jobs.discard(job)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with job.running():
                    return generate(*args, **kwargs)
            finally:
                self.jobs.discard(job)

        return run


class Generation(GenerationState):
    """transformers' generation for several models, with limits."""

    def __init__(
        self, models: Iterable[PreTrainedModel], *, most_queued: int = MOST_QUEUED, most_seconds: float = MOST_SECONDS
    ) -> None:
        """Let the jobs of these models be ended before each layer.

        Args:
            models: models with their layers in lists of modules.
            most_queued: most requests of one model in progress or waiting.
            most_seconds: longest time of one generation.
        """
        super().__init__()
        self.most_queued, self.most_seconds = most_queued, most_seconds
        self._queues: dict[str, ModelQueue] = {}
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.ModuleList):
                    for layer in module:
                        layer.register_forward_pre_hook(_check_current)

    def get_manager(self, model_id: str, use_cb: bool = False) -> ModelQueue:
        """Return the queue of a model."""
        return self._queues.setdefault(model_id, ModelQueue(self.most_queued))

    def job(self) -> Job:
        """Return a new job, which is that of the current task from now on."""
        job = Job(self.most_seconds)
        _current.set(job)
        return job

    def cancel_all(self) -> None:
        """End all jobs, because the server ends."""
        for queue in self._queues.values():
            for job in list(queue.jobs):
                job.cancel(503, "the server shuts down")


def _check_current(*_: Any) -> None:
    if job := _current.get():
        job.check()
