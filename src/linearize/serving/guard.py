"""What stands before the application: who may ask, how much may be sent, and how long that may take.

All of it is decided before a request is parsed, so that clients without the key cost nothing but a connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse  # type: ignore[import-not-found]
from starlette.exceptions import HTTPException  # type: ignore[import-not-found]
from uvicorn.protocols.http.h11_impl import H11Protocol  # type: ignore[import-not-found]

HEAD_SECONDS = 10  # in which the head of a request must have come
BODY_SECONDS = 30  # in which its body must have
DISCARD_SECONDS = 2  # for which the body of a request that is refused is read
MOST_CONNECTIONS = 128  # at a time
BYTES_PER_TOKEN = 16  # of a body: as many as four characters of ASCII, or two written as \\uXXXX, have, and more
OTHER_BYTES = 65_536  # of a body, beside the prompt

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Guard:
    """ASGI middleware that checks the key and reads the body of a request before the application sees it."""

    def __init__(
        self,
        app: Any,
        *,
        api_key: str | None,
        open_paths: Collection[str],
        most_bytes: int,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """Wrap `app`.

        Args:
            api_key: what requests must bear; None: nothing.
            open_paths: those that need no key.
            most_bytes: of a body.
            body_seconds: in which it must have come.
        """
        self.app, self.api_key, self.open_paths = app, api_key, open_paths
        self.most_bytes, self.body_seconds = most_bytes, body_seconds

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_head(scope)
            body = await asyncio.wait_for(self._body(receive), self.body_seconds)
        except (HTTPException, asyncio.TimeoutError) as error:
            late = f"body: expected it within {self.body_seconds:g} seconds, found a part of it"
            status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (408, late)
            # Many clients read no answer before they have sent all, and from others no more is read.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(receive), DISCARD_SECONDS)
            await refusal(status, message, headers={"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict[str, Any]:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    def _check_head(self, scope: dict[str, Any]) -> None:
        """See that a request has the key, and does not announce a body that is too large."""
        headers = dict(scope["headers"])
        wanted, given = f"Bearer {self.api_key}".encode(), headers.get(b"authorization", b"")
        guarded = self.api_key is not None and scope["path"] not in self.open_paths
        if guarded and not secrets.compare_digest(given, wanted):
            raise HTTPException(401, "Authorization: expected `Bearer KEY` with the server's --api-key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.most_bytes:
            raise self._too_large()

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the whole body; None: the client left before its end."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.most_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    async def _discard(self, receive: Receive) -> None:
        """Read the rest of a body, and keep nothing of it."""
        more = True
        while more:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"body: expected at most {self.most_bytes} bytes, found more; --max-model-len of the server says how many "
            "tokens a prompt may have",
        )


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, for `MOST_CONNECTIONS` at a time, whose requests' heads come within `HEAD_SECONDS`."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """As uvicorn; one connection too many is closed at once."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """As uvicorn; the time of a head counts from its first byte, not from its last."""
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn."""
        if self._head_due is not None:
            self._head_due.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        """Begin or end to wait for the rest of a head."""
        if self.cycle is None or self.cycle.response_complete:
            if self._head_due is None:
                self._head_due = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


def refusal(status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the answer to a request that is refused, or that failed."""
    return JSONResponse(error_of(status, message, field), status, headers)


def error_of(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's API has it."""
    message = message.encode("utf-8", "replace").decode()
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}
