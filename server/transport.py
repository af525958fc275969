"""The channel between front and engine: MessagePack frames over two local ZeroMQ sockets, one per direction.

A frame is a list of messages; both ends decode it strictly into the types of `server.messages`. The sockets live in a
directory that only this user can enter. Neither end ever blocks on the other: queues have no high-water mark, and sending to
a peer that is gone says so at once. This module knows neither requests nor processes.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from server.messages import FromEngine, ToEngine

MAX_MESSAGE_BYTES: Final = 256 << 20
ENGINE_LINGER_S: Final = 2.0

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine_decoder = msgspec.msgpack.Decoder(list[FromEngine])


class PeerGoneError(Exception):
    """Nobody is connected at the other end."""


class MessageTooLargeError(Exception):
    """The encoded frame exceeds `MAX_MESSAGE_BYTES`; the peer would drop the connection."""


def make_address() -> Path:
    """A new directory (mode 0700) for the two sockets; whoever makes it removes it."""
    return Path(tempfile.mkdtemp(prefix="m3-"))


def _encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    frame = _encoder.encode(messages)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(f"a message of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return frame


def _configure(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", linger_s: float) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, int(linger_s * 1000))


def _endpoint(address: Path, name: str) -> str:
    return f"ipc://{address / name}"


class FrontChannel:
    """The front's end. Binds both sockets; receiving needs a running event loop, sending is synchronous."""

    def __init__(self, address: Path) -> None:
        """Bind in the directory `address`."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_engine = zmq.Socket(self._context, zmq.PUSH)
        _configure(self._to_engine, linger_s=0)
        self._to_engine.bind(_endpoint(address, "to_engine"))
        self._from_engine = zmq.asyncio.Socket(self._context, zmq.PULL)
        _configure(self._from_engine, linger_s=0)
        self._from_engine.bind(_endpoint(address, "from_engine"))

    def send(self, message: ToEngine) -> None:
        """Queue one message and return.

        Raises:
            PeerGoneError: the engine is not connected.
            MessageTooLargeError: nothing was sent.
        """
        try:
            self._to_engine.send(_encode([message]), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGoneError("the engine is not connected") from None

    async def receive(self) -> list[FromEngine]:
        """Wait for the next frame."""
        return _from_engine_decoder.decode(await self._from_engine.recv())

    async def receive_within(self, timeout_s: float) -> list[FromEngine]:
        """The next frame, or an empty list when none comes in time."""
        if not await self._from_engine.poll(int(timeout_s * 1000)):
            return []
        return await self.receive()

    def close(self) -> None:
        """Close both sockets; unsent messages are dropped."""
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()


class EngineChannel:
    """The engine's end. Connects both sockets; used by one thread."""

    def __init__(self, address: Path) -> None:
        """Connect in the directory `address`."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = zmq.Socket(self._context, zmq.PULL)
        _configure(self._inbox, linger_s=0)
        self._inbox.connect(_endpoint(address, "to_engine"))
        self._outbox = zmq.Socket(self._context, zmq.PUSH)
        _configure(self._outbox, linger_s=ENGINE_LINGER_S)
        self._outbox.connect(_endpoint(address, "from_engine"))

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All messages that are there, in order; waits up to `timeout_s` for the first one."""
        messages: list[ToEngine] = []
        if not self._inbox.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                messages += _to_engine_decoder.decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Queue one frame and return; an empty one is not sent."""
        if messages:
            self._outbox.send(_encode(messages))

    def close(self) -> None:
        """Flush the outbox for up to `ENGINE_LINGER_S` seconds, then close."""
        self._inbox.close()
        self._outbox.close()
        self._context.term()
