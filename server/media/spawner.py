"""The fork server, seen from the front: start it, ask it for workers, start it again when it died."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import server
from server.media.forkserver import MESSAGE_BYTES, REFUSED

COMMAND = (sys.executable, "-m", "server.media.forkserver")

_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL")
_DECODER_ENV = {
    # Big buffers come back from the heap instead of from fresh, zeroed pages: a 12-megapixel decode takes 44 ms, not 107.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

T = TypeVar("T")


class WorkerDiedError(Exception):
    """A worker, or the process that forks them, has ended."""


def worker_environment() -> dict[str, str]:
    """The environment of workers: what it takes to find Python and this package, and nothing else of ours."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    root = str(Path(server.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env | _DECODER_ENV


@dataclasses.dataclass(frozen=True)
class Fork:
    """A new worker process.

    Attributes:
        pid: for logs.
        pidfd: names the process for good, unlike its id; readable once it has ended.
        connection: our end of its socket, non-blocking.
    """

    pid: int
    pidfd: int
    connection: socket.socket


class Spawner:
    """Makes worker processes, by one fork server that it keeps alive. On the event loop; `fork` may be called at any time."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The fork server's process id, None when there is none."""
        return None if self._process is None else self._process.pid

    async def fork(self) -> Fork:
        """A new worker; starts the fork server first when none is running.

        Raises:
            OSError: no fork server could be made.
            WorkerDiedError: the fork server ended, there can be no worker, or it ended before it could be watched.
        """
        async with self._turn:
            if self._process is not None and self._process.poll() is not None:
                await self._stop()
            try:
                if self._requests is None:
                    await self._start()
                fork = await self._request()
            except BaseException:
                await self._stop()  # whether it still owes an answer is unknown
                raise
        if fork is None:
            raise WorkerDiedError("the worker could not be forked, or ended at once")
        return fork

    async def close(self) -> None:
        """End the fork server, and with it every worker."""
        async with self._turn:
            await self._stop()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._requests = ours
        with theirs:
            # From the event loop's own thread: the kernel ties a child's death signal to the thread that made it.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [*self._command, str(os.getpid())], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=worker_environment()
            )
        await _read(ours, lambda: _checked(ours.recv(MESSAGE_BYTES)))

    async def _stop(self) -> None:
        requests, process, self._requests, self._process = self._requests, self._process, None, None
        if requests is not None:
            requests.close()
        if process is not None:
            process.kill()
            # A killed process is collected in a moment, yet not in this one; a thread waits.
            await asyncio.shield(asyncio.to_thread(process.wait))

    async def _request(self) -> Fork | None:
        """A worker; None when it could not be made, or ended before its descriptor could be."""
        requests = self._requests
        assert requests is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(requests, [b"fork"], [theirs.fileno()])
            message, fds = await _read(requests, lambda: socket.recv_fds(requests, MESSAGE_BYTES, 1)[:2])
            if _checked(message) == REFUSED or not fds:
                ours.close()
                return None
            ours.setblocking(False)
            return Fork(int(message), fds[0], ours)
        except BaseException as error:
            ours.close()
            if isinstance(error, ConnectionError):
                raise WorkerDiedError("the process that forks workers has ended") from error
            raise


def _checked(message: bytes) -> bytes:
    if not message:
        raise WorkerDiedError("the process that forks workers has ended")
    return message


async def _read(connection: socket.socket, receive: Callable[[], T]) -> T:
    """`receive()` as soon as there is something to receive."""
    await readable(connection.fileno())
    try:
        return receive()
    except ConnectionError as error:
        raise WorkerDiedError("the process that forks workers has ended") from error


async def readable(fd: int) -> None:
    """Wait until `fd` has something to read; for a process's descriptor, until it has ended."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def kill(fork: Fork) -> None:
    """End a worker at once; nothing happens when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
