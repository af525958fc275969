"""Pure ASGI middleware: a request id on every answer, and a limit on the bytes of a body.

Starlette's `BaseHTTPMiddleware` hides a client's disconnect from the route, so neither of these uses it.
"""

import re
import secrets
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import PayloadTooLargeError

REQUEST_ID_HEADER: Final = "x-request-id"
# What may be echoed into headers and logs; anything else is replaced by an id of ours.
CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def request_id(scope: MutableMapping[str, Any]) -> str:
    """The id that `RequestIdMiddleware` gave to this request."""
    value: str = scope["state"]["request_id"]
    return value


class WatchedSend:
    """Passes an answer's messages on.

    Attributes:
        status: of the answer; None before it has begun.
    """

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Pass one message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class RequestIdMiddleware:
    """Takes the client's `x-request-id`, or makes one, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        identity = given if CLIENT_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = identity

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = identity
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Raises `PayloadTooLargeError` into the route that reads a body longer than `max_bytes`.

    A declared length is checked before the first byte is read; a chunked body is counted while it arrives.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        num_declared = int(declared) if declared.isdecimal() else 0
        num_received = 0

        async def counted_receive() -> Message:
            nonlocal num_received
            if num_declared > self.max_bytes:
                raise self._too_large()
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, counted_receive, send)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body exceeds {self.max_bytes} bytes")
