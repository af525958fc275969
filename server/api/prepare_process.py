"""One process that prepares large bodies, seen from the front: start it, talk to it in a thread, end it."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from server.api.prepare import Job
from server.api.prepare_protocol import Answer, Idle, Setup, Task, receive, receive_exactly, send, unpacked
from server.api.tokenizer import PIECES_PER_BATCH
from server.api.worker_process import worker_environment

R = TypeVar("R", bound=msgspec.Struct)

LEAVE_TIMEOUT_S: Final = 1.0
# Pieces of a text that a worker tokenizes at the same time; a core is left to everything else.
NUM_TOKENIZER_THREADS: Final = max(1, min(PIECES_PER_BATCH, len(os.sched_getaffinity(0)) - 1))


class WorkerFaultError(Exception):
    """A bug in the worker; the log has what the worker said about it."""


class PrepareProcess:
    """One running process; a call at a time.

    Attributes:
        grown_bytes: memory that it kept of its bodies.
        is_idle: all that it said was read; otherwise the next call would read what is left of the last one.
    """

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self.grown_bytes = 0
        self.is_idle = True
        self._process = process
        self._connection = connection

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> "PrepareProcess":
        """Start one; its first call must be `set_up`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(os.getpid()),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    env=worker_environment(RAYON_NUM_THREADS=str(NUM_TOKENIZER_THREADS)),
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return self._process.returncode is None

    def set_up(self, setup: Setup) -> None:
        """Wait until it is ready. In a thread.

        Raises:
            PeerEndedError: it ended.
            WorkerFaultError: it cannot work.
        """
        send(self._connection, setup)
        fault = receive(self._connection, Answer).fault
        if fault is not None:
            raise WorkerFaultError(fault)

    def call(self, job: Job[R], pieces: Sequence[bytes]) -> R:
        """Run one job. In a thread.

        Raises:
            PeerEndedError: it ended before it answered.
            M3Error: what is wrong with the request.
            WorkerFaultError: a bug.
        """
        connection = self._connection
        self.is_idle = False
        send(connection, Task(job.name, sum(map(len, pieces))), pieces)
        answer = receive(connection, Answer)
        following = [receive_exactly(connection, num_bytes) for num_bytes in answer.num_bytes]
        self.grown_bytes = receive(connection, Idle).grown_bytes
        self.is_idle = True
        for line in answer.log:
            logging.getLogger(line.logger).log(line.level, "%s", line.message)
        if answer.refusal is not None:
            raise answer.refusal.error()
        if answer.fault is not None:
            raise WorkerFaultError(answer.fault)
        return unpacked(msgspec.json.decode(answer.result, type=job.result), following)

    async def kill(self) -> None:
        """End it at once and collect it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def leave(self) -> int | None:
        """Collect it after it closed its socket: it is about to end. How it did; None when it had to be killed."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            await self.kill()
            return None

    def close(self) -> None:
        """Close the socket; no call may be in progress."""
        self._connection.close()
