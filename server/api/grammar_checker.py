"""Whether a grammar can be used, before its request goes anywhere near the engine.

A worker process compiles it under a deadline. One that takes too long or brings the worker down is refused like a malformed
one, and the worker is replaced. Verdicts are kept, so a grammar is compiled here once. The event loop never blocks.
"""

import asyncio
import hashlib
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from server.api.grammar_worker import FRAME_LEN, Verdict
from server.api.worker_process import worker_environment
from server.errors import BadRequestError, OverloadedError, RequestFailedError
from server.messages import Grammar

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "server.api.grammar_worker")
# llguidance limits its own work to far less; only a fault in it takes as long.
CHECK_TIMEOUT_S: Final = 5.0
START_TIMEOUT_S: Final = 60.0
MAX_PENDING: Final = 64
MAX_VERDICTS: Final = 1024
TOO_SLOW: Final = "the grammar takes too long to compile"
TOO_COMPLEX: Final = "the grammar is too complex to compile"


class _WorkerError(Exception):
    """The worker cannot be used: it did not start, or it ended."""


class _Worker:
    """One worker process; a call at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_Worker":
        """Start one and wait until it is ready.

        Raises:
            _WorkerError: it did not become ready.
        """
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, str(os.getpid()), stdin=pipe, stdout=pipe, stderr=null, env=worker_environment(RAYON_NUM_THREADS="1")
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                fault = (await worker._receive()).fault
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                raise _WorkerError("it did not become ready in time") from error
            raise
        if fault is not None:
            await worker.kill()
            raise _WorkerError(fault)
        return worker

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return self._process.returncode is None

    async def call(self, grammar: Grammar) -> Verdict:
        """Judge one grammar; after an exception the worker must be killed."""
        assert self._process.stdin is not None
        encoded = msgspec.msgpack.encode(grammar)
        try:
            self._process.stdin.write(FRAME_LEN.pack(len(encoded)) + encoded)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise _WorkerError("it ended") from error
        return await self._receive()

    async def kill(self) -> None:
        """End it at once and collect it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _receive(self) -> Verdict:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            (length,) = FRAME_LEN.unpack(await stdout.readexactly(FRAME_LEN.size))
            return msgspec.msgpack.decode(await stdout.readexactly(length), type=Verdict)
        except (asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise _WorkerError("it ended") from error


def digest(grammar: Grammar) -> bytes:
    """What stands for a grammar among the verdicts."""
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()


class GrammarChecker:
    """The verdicts and the worker behind them. Belongs to one event loop."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        *,
        timeout_s: float = CHECK_TIMEOUT_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Nothing runs before `start` or the first `check`.

        Args:
            model_dir: the checkpoint.
            vocab_size: width of the logits.
            timeout_s: for one grammar.
            command: the worker's, without its arguments.
        """
        self._command = (*command, str(model_dir), str(vocab_size))
        self._timeout_s = timeout_s
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()  # the worker is started, called and killed by whoever holds it
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # by digest: grammars may be large
        self._pending: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._start: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the worker in the background, so that no request waits for it."""
        self._start = asyncio.create_task(self._start_worker())

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if the engine can follow `grammar`.

        Raises:
            BadRequestError: it is malformed, too complex, or matches nothing; `param` is the field it came from.
            OverloadedError: too many grammars wait for their verdict.
            RequestFailedError: there is no worker.
        """
        key = digest(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            # A client that leaves must not break off a call that others may wait for.
            verdict = await asyncio.shield(self._pending.get(grammar) or self._begin(grammar))
        else:
            self._verdicts.move_to_end(key)
        if verdict.fault is not None:
            raise BadRequestError(verdict.fault, param=param, code="invalid_grammar")

    async def close(self) -> None:
        """End the worker; whoever waits is cancelled."""
        tasks = [*self._pending.values(), *([self._start] if self._start else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._turn:
            await self._kill_worker()

    def _begin(self, grammar: Grammar) -> "asyncio.Task[Verdict]":
        if len(self._pending) >= MAX_PENDING:
            raise OverloadedError("too many grammars wait to be compiled; try again later")
        task = self._pending[grammar] = asyncio.create_task(self._judge(grammar))
        task.add_done_callback(lambda _: self._pending.pop(grammar))
        return task

    async def _judge(self, grammar: Grammar) -> Verdict:
        async with self._turn:
            worker = self._worker if self._worker and self._worker.alive else await self._revive()
            try:
                async with asyncio.timeout(self._timeout_s):
                    verdict = await worker.call(grammar)
            except BaseException as error:
                await self._kill_worker()
                if not isinstance(error, TimeoutError | _WorkerError):
                    raise
                self.start()
                # Not kept: a machine in trouble may be at fault.
                return Verdict(TOO_SLOW if isinstance(error, TimeoutError) else TOO_COMPLEX)
        self._verdicts[digest(grammar)] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _start_worker(self) -> None:
        async with self._turn:
            if self._worker is None:
                try:
                    await self._revive()
                except RequestFailedError:
                    return  # logged; the next request tries again

    async def _revive(self) -> _Worker:
        await self._kill_worker()
        try:
            self._worker = await _Worker.start(self._command)
        except (_WorkerError, OSError) as error:
            logger.error("the grammar worker cannot start: %s", error)
            raise RequestFailedError("structured output is not available") from error
        return self._worker

    async def _kill_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()
