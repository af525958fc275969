"""What the front and a prepare worker say to each other over their socket, and how.

A frame is a little-endian uint64 length and that much JSON; raw bytes may follow whose lengths the frame tells: a body, or what
is as large as one, token ids and files. Raw bytes are read into memory of their own while the interpreter's lock is free. JSON
rather than MessagePack, because a client's schema may hold integers of any size. Both ends block.
"""

import array
import socket
import struct
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from server import errors
from server.api.content import MediaLimits
from server.api.prepare import Prompts
from server.api.sampling import Limits
from server.errors import M3Error

HEADER: Final = struct.Struct("<Q")
ID_TYPE: Final = "I"
# Making integers holds the interpreter's lock, about 25 ns for each; other threads may go on between slices.
SLICE_LEN: Final = 1 << 15
TOO_MUCH_MEMORY: Final = "reading the body takes more memory than one request may use"
TOO_MUCH_TIME: Final = "reading the body takes more processor time than one request may use"
ERRORS: Final = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, M3Error)}

S = TypeVar("S", bound=msgspec.Struct)


class PeerEndedError(Exception):
    """The other end is closed."""


class Setup(msgspec.Struct, frozen=True):
    """The first message to a worker.

    Attributes:
        model_dir: the checkpoint's directory.
        limits, media_limits: what requests are checked against.
        niceness: what the worker's is when it is ready.
    """

    model_dir: str
    limits: Limits
    media_limits: MediaLimits
    niceness: int


class Task(msgspec.Struct, frozen=True):
    """The name of a job; so many bytes of the body follow."""

    job: str
    num_bytes: int


class Refusal(msgspec.Struct, frozen=True):
    """A client's error."""

    kind: str
    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: M3Error) -> "Refusal":
        """What is sent of an error."""
        return cls(type(error).__name__, error.message, error.param, error.code)

    def error(self) -> M3Error:
        """The error."""
        return ERRORS[self.kind](self.message, param=self.param, code=self.code)


class LogLine(msgspec.Struct, frozen=True):
    """Something that the worker logged."""

    logger: str
    level: int
    message: str


class Answer(msgspec.Struct, frozen=True):
    """A worker's answer to its setup, when it is ready, and to every task; what follows it is told by `num_bytes`.

    Attributes:
        result: of the task, without what follows; null when there is none.
        refusal: the client's error instead of a result.
        fault: the type of an exception that is a bug, instead of a result.
        log: what was logged on the way.
        num_bytes: lengths of the prompts' ids as uint32 and of the sources' files, in order.
    """

    result: msgspec.Raw = msgspec.Raw(b"null")
    refusal: Refusal | None = None
    fault: str | None = None
    log: tuple[LogLine, ...] = ()
    num_bytes: tuple[int, ...] = ()


class Idle(msgspec.Struct, frozen=True):
    """What a worker says behind an answer to a task, and what follows it, once it has let go of the task.

    Attributes:
        grown_bytes: resident memory that it kept since it was set up.
    """

    grown_bytes: int


def send(connection: socket.socket, message: msgspec.Struct, following: Sequence[bytes] = ()) -> None:
    """Send a frame and the raw bytes that follow it.

    Raises:
        PeerEndedError: nobody reads it.
    """
    encoded = msgspec.json.encode(message)
    try:
        connection.sendall(HEADER.pack(len(encoded)) + encoded)
        for piece in following:
            connection.sendall(piece)
    except ConnectionError as error:
        raise PeerEndedError from error


def receive(connection: socket.socket, kind: type[S]) -> S:
    """The next frame.

    Raises:
        PeerEndedError: there is none.
    """
    (length,) = HEADER.unpack(receive_exactly(connection, HEADER.size))
    return msgspec.json.decode(receive_exactly(connection, length), type=kind)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Raw bytes that follow a frame.

    Raises:
        PeerEndedError: they do not.
    """
    pieces = []
    while num_bytes > 0:
        try:
            piece = connection.recv(num_bytes, socket.MSG_WAITALL)  # all of it, unless a signal came or the other end left
        except ConnectionError as error:
            raise PeerEndedError from error
        if not piece:
            raise PeerEndedError
        pieces.append(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def packed(result: msgspec.Struct) -> tuple[msgspec.Struct, list[bytes]]:
    """A result without what is as large as its body, and that as raw bytes."""
    if not isinstance(result, Prompts):
        return result, []
    prompts = [result.prompt.token_ids, *result.more_prompts]
    light = msgspec.structs.replace(
        result,
        prompt=msgspec.structs.replace(result.prompt, token_ids=[]),
        sources=tuple(source.with_data(b"") for source in result.sources),
        more_prompts=tuple([] for _ in result.more_prompts),
    )
    return light, [*(array.array(ID_TYPE, ids).tobytes() for ids in prompts), *(source.data for source in result.sources)]


def unpacked(light: S, following: Sequence[bytes]) -> S:
    """The result that `packed` was given."""
    if not isinstance(light, Prompts):
        return light
    num_prompts = 1 + len(light.more_prompts)
    prompts = [_ids_of(data) for data in following[:num_prompts]]
    files = following[num_prompts:]
    return msgspec.structs.replace(
        light,
        prompt=msgspec.structs.replace(light.prompt, token_ids=prompts[0]),
        sources=tuple(source.with_data(data) for source, data in zip(light.sources, files, strict=True)),
        more_prompts=tuple(prompts[1:]),
    )


def _ids_of(data: bytes) -> list[int]:
    packed_ids = memoryview(data).cast(ID_TYPE)
    token_ids: list[int] = []
    for start in range(0, len(packed_ids), SLICE_LEN):
        token_ids += packed_ids[start : start + SLICE_LEN].tolist()
    return token_ids
