"""One worker process, seen from the front: start it, give it a task, kill it. The event loop never blocks on it."""

import asyncio
import contextlib
import os
import select
from collections.abc import Iterator

import msgspec

from server.media.protocol import HEADER, Answer, Cancel, FromWorker, Hello, Setup, Task, ToWorker
from server.media.spawner import Fork, Spawner, WorkerDiedError, kill, readable

_MAX_MESSAGE_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello | Answer)


class WorkerProcess:
    """A running worker; made by `start`."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._socket = fork.connection
        self._has_whole_task = False
        self._is_cancelled = False
        self._cancelling: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_tasks = 0
        self.grown_bytes = 0

    @classmethod
    async def start(cls, setup: Setup, *, timeout_s: float, spawner: Spawner) -> "WorkerProcess":
        """Start a worker and wait until it is ready.

        Raises:
            OSError: no process could be made.
            WorkerDiedError, TimeoutError: it ended, or was not ready in time.
        """
        async with asyncio.timeout(timeout_s):
            worker = cls(await spawner.fork())
            try:
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
        return self._fork.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as the kernel has told."""
        if self._is_closed:
            return False
        poll = select.poll()
        poll.register(self._fork.pidfd, select.POLLIN)
        return not poll.poll(0)

    async def call(self, task: Task, body: bytes) -> Answer:
        """Run one task; there must be no other in progress. After a cancellation the worker must be killed.

        Raises:
            WorkerDiedError: it ended before it answered.
        """
        self.num_tasks += 1
        self._is_cancelled = False
        try:
            await self._send(task, body)
            self._has_whole_task = True
            if self._is_cancelled:
                self._send_cancel()
            answer = await self._receive()
        finally:
            self._has_whole_task = False
        if self._cancelling is not None:
            await self._cancelling  # the next task's frame must not start inside this one
            self._cancelling = None
        if not isinstance(answer, Answer):
            raise WorkerDiedError("the worker answered out of turn")
        self.grown_bytes = answer.grown_bytes
        return answer

    def cancel(self) -> None:
        """Ask it to give the running task up at the next packet; it answers the task in any case."""
        if not self._is_cancelled:
            self._is_cancelled = True
            if self._has_whole_task:
                self._send_cancel()

    async def kill(self) -> None:
        """End it at once and wait until it has; also for one that has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._cancelling is not None:
            self._cancelling.cancel()
            await asyncio.gather(self._cancelling, return_exceptions=True)
        kill(self._fork)
        self._socket.close()
        await asyncio.shield(_ended(self._fork.pidfd))

    def _send_cancel(self) -> None:
        # The task's frame is out, but the worker may not have read it yet, so the socket may have no room at the moment.
        self._cancelling = asyncio.create_task(self._send(Cancel(), b""))

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


async def _ended(pidfd: int) -> None:
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _as_death() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise WorkerDiedError("the worker closed its socket") from error
