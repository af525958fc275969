"""Server-sent events: how deltas become a response body, and the response that never leaves its generation open."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.api.disconnect import ClientGoneError, unless_client_gone

DONE: Final = b"data: [DONE]\n\n"
# A comment: clients skip it, proxies see that the connection is alive.
HEARTBEAT: Final = b": waiting\n\n"

_encoder = msgspec.json.Encoder()


def event(data: object) -> bytes:
    """One event with `data` as JSON."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """One event with a name, for clients that tell events apart by it."""
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream(StreamingResponse):
    """A stream of events. `on_close` is called however it ends, also when the client left before the first byte.

    The call cannot be left to the generator's own `finally`: one that was never started does not run it.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], send_timeout_s: float) -> None:
        """Args: send_timeout_s: a client that takes longer to make room for the next event counts as gone."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. The client's leaving is noticed the same way under every server, also in silence."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError from None

        try:
            await unless_client_gone(receive, self.stream_response(send_in_time))
        except (ClientGoneError, OSError):
            return  # nobody is there any more
        finally:
            self._on_close()
