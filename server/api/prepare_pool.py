"""The processes that prepare large bodies, seen from the front.

A body that is parsed in a thread holds the interpreter's lock for milliseconds at a time, and every stream waits. The event
loop never blocks here: a thread per worker talks to it, and waits for it without the lock.
"""

import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from server.api.prepare import Job
from server.api.prepare_process import PrepareProcess, WorkerFaultError
from server.api.prepare_protocol import TOO_MUCH_MEMORY, TOO_MUCH_TIME, PeerEndedError, Setup
from server.errors import OverloadedError, PayloadTooLargeError, RequestFailedError, ShuttingDownError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

COMMAND: Final = (sys.executable, "-m", "server.api.prepare_worker")
START_TIMEOUT_S: Final = 120.0
# A worker has only the time that nobody else wants; what it may take of that, it limits itself.
TIMEOUT_S: Final = 300.0
MAX_WAITING: Final = 64
WAIT_TIMEOUT_S: Final = 300.0
# A worker may die of other things than its body, but not twice in a row.
NUM_ATTEMPTS: Final = 2
# How a worker ends over a body that takes too long, and how the tokenizer ends it when there is no more memory.
OUT_OF_TIME: Final = -signal.SIGPROF
OUT_OF_MEMORY: Final = -signal.SIGABRT
# A worker that keeps more of what a body took is replaced.
MAX_GROWN_BYTES: Final = 256 << 20


@dataclasses.dataclass
class _Slot:
    """A place for a worker; whoever holds the slot starts, calls and kills it."""

    worker: PrepareProcess | None = None


class PreparePool:
    """Some workers, and the bodies that wait for one. Belongs to one event loop."""

    def __init__(
        self,
        setup: Setup,
        *,
        num_workers: int = 1,
        timeout_s: float = TIMEOUT_S,
        wait_timeout_s: float = WAIT_TIMEOUT_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Nothing runs before `start` or the first `run`.

        Args:
            setup: of every worker.
            num_workers: bodies that are prepared at the same time.
            timeout_s: for one body.
            wait_timeout_s: for its turn to come.
            command: a worker's, without its argument.
        """
        self._setup = setup
        self._timeout_s = timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._command = tuple(command)
        self._slots = [_Slot() for _ in range(num_workers)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()  # a worker that runs is taken before one has to start
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._num_waiting = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prepare-worker")
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [slot.worker.pid for slot in self._slots if slot.worker is not None and slot.worker.is_alive]

    def start(self) -> None:
        """Start one worker in the background, so that no request waits for it."""
        self._begin(self._warm(self._free.get_nowait()))

    async def run(self, job: Job[R], pieces: Sequence[bytes]) -> R:
        """What `job` makes of a body, its pieces in order.

        Raises:
            M3Error: what is wrong with the request.
            OverloadedError: too many bodies wait, or this one has waited for too long.
            PayloadTooLargeError: it takes too much memory or processor time.
            RequestFailedError: the machine is too slow, or its workers died.
            ShuttingDownError: the pool was closed meanwhile.
            WorkerFaultError: a bug.
        """
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("too many large requests wait to be read; retry later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                slot = await self._free.get()
        except TimeoutError:
            raise OverloadedError("large requests are read too slowly; retry later") from None
        finally:
            self._num_waiting -= 1
        # A client that leaves costs the rest of its turn; a worker that is killed would take longer to replace.
        return await asyncio.shield(self._begin(self._run(slot, job, pieces)))

    async def close(self) -> None:
        """End the workers; whoever they work for is cancelled, and whoever waits is refused."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            await self._clear(slot)
        self._threads.shutdown()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked for it may have left

    async def _warm(self, slot: _Slot) -> None:
        try:
            if slot.worker is None:
                await self._revive(slot)
        except RequestFailedError:
            return  # logged; the next request tries again
        finally:
            self._free.put_nowait(slot)

    async def _run(self, slot: _Slot, job: Job[R], pieces: Sequence[bytes]) -> R:
        try:
            if self._is_closed:
                raise ShuttingDownError("the server is shutting down")
            for _ in range(NUM_ATTEMPTS):
                worker = slot.worker
                if worker is None or not worker.is_alive:
                    worker = await self._revive(slot)
                try:
                    return await self._call(slot, self._timeout_s, worker.call, job, pieces)
                except PeerEndedError:
                    logger.error("a prepare worker ended over a request")
                except TimeoutError:
                    logger.error("a prepare worker took too long over a request")
                    raise RequestFailedError("reading the request takes too long") from None
            raise RequestFailedError("the request could not be read")
        finally:
            worker = slot.worker
            if worker is not None and (not worker.is_idle or worker.grown_bytes > MAX_GROWN_BYTES):
                await self._clear(slot)
            if slot.worker is None and not self._is_closed:
                self._begin(self._warm(slot))
            else:
                self._free.put_nowait(slot)

    async def _revive(self, slot: _Slot) -> PrepareProcess:
        """A new worker in the slot.

        Raises:
            RequestFailedError: none can be started; the log says why.
        """
        await self._clear(slot)
        try:
            slot.worker = worker = await PrepareProcess.spawn(self._command)
            await self._call(slot, START_TIMEOUT_S, worker.set_up, self._setup)
        except (PeerEndedError, WorkerFaultError, TimeoutError, OSError) as error:
            logger.error("a prepare worker cannot start: %s", str(error) or type(error).__name__)
            await self._clear(slot)
            raise RequestFailedError("large requests cannot be read at the moment") from error
        return worker

    async def _call(self, slot: _Slot, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Talk to the slot's worker in a thread; unless it answers in time, it is killed, and the thread has ended."""
        call = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(call)
        except PeerEndedError:
            assert slot.worker is not None
            code = await slot.worker.leave()
            await self._clear(slot)
            if code == OUT_OF_MEMORY:
                raise PayloadTooLargeError(TOO_MUCH_MEMORY) from None
            if code == OUT_OF_TIME:
                raise PayloadTooLargeError(TOO_MUCH_TIME) from None
            raise
        except (TimeoutError, asyncio.CancelledError):
            assert slot.worker is not None
            await slot.worker.kill()  # it closes the socket, which ends the thread's wait
            await asyncio.gather(call, return_exceptions=True)
            await self._clear(slot)
            raise

    async def _clear(self, slot: _Slot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None:
            await worker.kill()
            worker.close()
