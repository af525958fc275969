"""One worker process, seen from the front: start it, give it a task, kill it. The event loop never blocks on it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import server
from server.media.protocol import HEADER, Answer, FromWorker, Hello, Setup, Task, ToWorker

COMMAND = (sys.executable, "-m", "server.media.worker")

_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL")
_DECODER_ENV = {
    # Big buffers come back from the heap instead of from fresh, zeroed pages: a 12-megapixel decode takes 44 ms, not 107.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_MAX_MESSAGE_BYTES = 1 << 16
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello | Answer)


class WorkerDiedError(Exception):
    """The worker's end of the socket is closed."""


def worker_environment() -> dict[str, str]:
    """The environment of a worker: what it takes to find Python and this package, and nothing else of ours."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    root = str(Path(server.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env | _DECODER_ENV


class WorkerProcess:
    """A running worker; made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self._socket = connection
        self.num_tasks = 0
        self.resident_bytes = 0

    @classmethod
    async def start(cls, setup: Setup, *, timeout_s: float, command: Sequence[str] = COMMAND) -> "WorkerProcess":
        """Start a worker and wait until it is ready.

        Raises:
            OSError: no process could be made.
            WorkerDiedError, TimeoutError: it ended, or was not ready in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                # From the event loop's own thread: the kernel ties a child's death signal to the thread that made it.
                process = subprocess.Popen(  # noqa: ASYNC220
                    [*command, str(os.getpid())], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=worker_environment()
                )
            except BaseException:
                ours.close()
                raise
        worker = cls(process, ours)
        try:
            async with asyncio.timeout(timeout_s):
                await worker._send(setup, b"")
                if not isinstance(await worker._receive(), Hello):
                    raise WorkerDiedError("the worker's first message is not its greeting")
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as the kernel has told."""
        return self._process.poll() is None

    async def call(self, task: Task, body: bytes) -> Answer:
        """Run one task; there must be no other in progress. After a cancellation the worker must be killed.

        Raises:
            WorkerDiedError: it ended before it answered.
        """
        self.num_tasks += 1
        await self._send(task, body)
        answer = await self._receive()
        if not isinstance(answer, Answer):
            raise WorkerDiedError("the worker answered out of turn")
        self.resident_bytes = answer.resident_bytes
        return answer

    async def kill(self) -> None:
        """End it at once and collect it; also for one that has ended."""
        self._process.kill()
        self._socket.close()
        # A killed process is collected in a moment, yet not in this one; a thread waits.
        await asyncio.shield(asyncio.to_thread(self._process.wait))

    async def _send(self, message: ToWorker, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        encoded = _encoder.encode(message)
        with _as_death():
            await loop.sock_sendall(self._socket, HEADER.pack(len(encoded), len(body)) + encoded)
            if body:
                await loop.sock_sendall(self._socket, body)

    async def _receive(self) -> FromWorker:
        message_len, body_len = HEADER.unpack(await self._receive_exactly(HEADER.size))
        if message_len > _MAX_MESSAGE_BYTES or body_len:
            raise WorkerDiedError("the worker's frame is malformed")
        try:
            return _decoder.decode(await self._receive_exactly(message_len))
        except msgspec.MsgspecError as error:
            raise WorkerDiedError("the worker's message is malformed") from error

    async def _receive_exactly(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = b""
        while len(received) < num_bytes:
            with _as_death():
                piece = await loop.sock_recv(self._socket, num_bytes - len(received))
            if not piece:
                raise WorkerDiedError("the worker closed its socket")
            received += piece
        return received


@contextlib.contextmanager
def _as_death() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise WorkerDiedError("the worker closed its socket") from error
