"""A request's body while it is read: the pieces as they arrived, counted against what all requests may hold together."""

import asyncio

from fastapi import Request

from server.errors import BodyTimeoutError
from server.held_bytes import HeldBytes

TOO_MUCH_RECEIVED = "too many bytes of requests are being read; retry later"


class RequestBody:
    """One body. `drop` lets go of its bytes; `close` also lets others have their room, and may be called more than once.

    The room outlasts the bytes: what was decoded from them is about as large.

    Attributes:
        num_bytes: its length.
        pieces: its bytes, in order; empty once dropped. Nobody joins a large body: that would hold the interpreter's lock.
    """

    def __init__(self, budget: HeldBytes) -> None:
        self.num_bytes = 0
        self.pieces: list[bytes] = []
        self._budget = budget
        self._num_counted = 0

    def append(self, piece: bytes) -> None:
        """Add what arrived.

        Raises:
            OverloadedError: all bodies together are too large.
        """
        self._budget.take(len(piece))
        self._num_counted += len(piece)
        self.num_bytes += len(piece)
        self.pieces.append(piece)

    def head(self, num_bytes: int) -> bytes:
        """Its first bytes."""
        found = b""
        for piece in self.pieces:
            if len(found) >= num_bytes:
                break
            found += piece[: num_bytes - len(found)]
        return found

    def drop(self) -> None:
        """Let go of the bytes."""
        self.pieces = []

    def close(self) -> None:
        """Let go of everything."""
        self.drop()
        num_counted, self._num_counted = self._num_counted, 0
        self._budget.give_back(num_counted)


async def body_of(request: Request, budget: HeldBytes, timeout_s: float) -> RequestBody:
    """The whole body, which the request does not keep. A client that sends it slowly holds a place, so there is a limit.

    Raises:
        BodyTimeoutError: it was not there in time.
        OverloadedError: all bodies together are too large.
        ClientDisconnect: the client left.
    """
    body = RequestBody(budget)
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body.append(piece)
    except BaseException as error:
        body.close()
        if isinstance(error, TimeoutError):
            raise BodyTimeoutError(f"the body was not there within {timeout_s:g} s") from None
        raise
    return body
