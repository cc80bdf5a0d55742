"""Limits of the server that apply before a request is parsed: key, size, duration and number of connections."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse  # type: ignore[import-not-found]
from starlette.exceptions import HTTPException  # type: ignore[import-not-found]
from uvicorn.protocols.http.h11_impl import H11Protocol  # type: ignore[import-not-found]

HEAD_SECONDS = 10  # to receive the head of a request
BODY_SECONDS = 30  # to receive its body
DISCARD_SECONDS = 2  # to receive the body of a request that is refused because of its head
MOST_CONNECTIONS = 128  # open at a time
BYTES_PER_TOKEN = 16  # allowed in a body; a token of English text has about 4, a character escaped in JSON has 6
OTHER_BYTES = 65_536  # allowed in a body in addition to the prompt
_CLOSE = {"Connection": "close"}  # header of a response whose request's body was not read to its end
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Guard:
    """ASGI middleware that checks the key and reads the body of a request before the application sees it.

    Attributes:
        api_key: the key that requests must send, except to `open_paths`; None: no key.
        most_bytes: largest size of a body.
        body_seconds: longest time to receive it.
    """

    def __init__(
        self,
        app: Any,
        *,
        api_key: str | None,
        open_paths: Collection[str],
        most_bytes: int,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.app, self.api_key, self.open_paths = app, api_key, open_paths
        self.most_bytes, self.body_seconds = most_bytes, body_seconds

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if error := self._error_in_head(scope):
                # Many clients read the answer only after they have sent the whole body.
                with suppress(asyncio.TimeoutError, HTTPException):
                    await asyncio.wait_for(self._read(receive, 0), DISCARD_SECONDS)
                raise error
            body = await asyncio.wait_for(self._read(receive, self.most_bytes), self.body_seconds)
        except HTTPException as error:
            await refusal(error.status_code, error.detail, headers=_CLOSE)(scope, receive, send)
            return
        except asyncio.TimeoutError:
            late = f"body: expected it within {self.body_seconds:g} seconds, found a part of it"
            await refusal(408, late, headers=_CLOSE)(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict[str, Any]:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    def _error_in_head(self, scope: dict[str, Any]) -> HTTPException | None:
        """Return the error of a request without the key, or with a Content-Length that is too large."""
        headers = dict(scope["headers"])
        wanted, given = f"Bearer {self.api_key}".encode(), headers.get(b"authorization", b"")
        guarded = self.api_key is not None and scope["path"] not in self.open_paths
        if guarded and not secrets.compare_digest(given, wanted):
            return HTTPException(401, "Authorization: expected `Bearer KEY` with the server's --api-key")
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length[:20]) > self.most_bytes else None

    async def _read(self, receive: Receive, most_bytes: int) -> bytes | None:
        """Read a body to its end, and return it; None: the client left before.

        Raises:
            HTTPException: it has more than `most_bytes` bytes, of which the others are not stored (413).
        """
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            body += chunk[: max(0, most_bytes - len(body))]
        if size > most_bytes:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"body: expected at most {self.most_bytes} bytes, found more; --max-model-len of the server says how many "
            "tokens a prompt may have",
        )


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with at most `MOST_CONNECTIONS`, each closed if a head takes longer than `HEAD_SECONDS`."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        """Start the timer of a head, or stop it once the head is complete."""
        if self.cycle is None or self.cycle.response_complete:
            if self._head_due is None:
                self._head_due = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


def refusal(status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the response to a request that was refused or that failed."""
    return JSONResponse(error_of(status, message, field), status, headers)


def error_of(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API."""
    message = message.encode("utf-8", "replace").decode()
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}
