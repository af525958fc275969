"""One line of log for every request: who, what, how it ended, what it cost. What clients and the model say is not in it.

The line is written when the last byte was sent, so a stream that broke off shows its error's status rather than its 200.
"""

import dataclasses
import logging
import time
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.auth import OPEN_PATHS
from server.api.middleware import WatchedSend, request_id
from server.logs import FIELDS

logger = logging.getLogger(__name__)

# Probes and scrapes would drown the rest.
QUIET_PATHS: Final = OPEN_PATHS | {"/metrics"}


@dataclasses.dataclass
class Note:
    """What an endpoint adds to its request's line; None for nothing.

    Attributes:
        status: how it really ended.
        stream: whether the answer was events.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: what it cost.
        first_token_s: arrival to first token.
        body: what the client sent, when the operator wants to see it.
    """

    status: int | None = None
    stream: bool | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    first_token_s: float | None = None
    body: str | None = None


def note_of(scope: MutableMapping[str, Any]) -> Note:
    """The note of a request."""
    note: Note = scope["state"].setdefault("note", Note())
    return note


class AccessLogMiddleware:
    """Writes the lines."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self.app(scope, receive, send)
            return
        start_s = time.monotonic()
        watched = WatchedSend(send)
        try:
            await self.app(scope, receive, watched)
        finally:
            noted = {name: value for name, value in dataclasses.asdict(note_of(scope)).items() if value is not None}
            fields = {
                "request_id": request_id(scope),
                "method": scope["method"],
                "path": scope["path"],
                "status": watched.status,
                "duration_s": round(time.monotonic() - start_s, 4),
                **noted,
            }
            logger.info("request", extra={FIELDS: fields})
