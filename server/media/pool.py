"""The media pool: N worker processes, one queue, and the promise that a bad picture costs its own request only.

Every worker has one serving task on the event loop: take a job, give it to the process, wait for the answer. A worker that
dies is replaced and its job tried once more on a fresh one; a worker that passes its deadline is killed and its job is
refused, because it would only take as long again. Knows nothing about the slab's allocation or about requests.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

from server.errors import EngineUnavailableError, M3Error, MediaError
from server.media.process import COMMAND, WorkerDiedError, WorkerProcess
from server.media.protocol import Answer, Broken, Outcome, Refused, Setup, Task

MAX_ATTEMPTS = 2
RESTART_PAUSE_S = 1.0
"""Between attempts to start a worker when the machine refuses."""

_NO_WORKERS = "Media cannot be decoded at the moment; try again later."

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """How the pool runs.

    Attributes:
        num_workers: processes.
        task_timeout_s: deadline of one task, the transfer of its bytes included.
        start_timeout_s: deadline of a worker's start.
        recycle_tasks: a worker is replaced after that many tasks.
        recycle_bytes: a worker is replaced when its resident set is larger.
        command: what to run; the parent's process id is appended.
    """

    num_workers: int
    task_timeout_s: float
    start_timeout_s: float
    recycle_tasks: int
    recycle_bytes: int
    command: Sequence[str] = COMMAND


class Job:
    """One task on its way through the pool; made by `WorkerPool.submit`."""

    def __init__(self, task: Task, body: bytes, param: str | None) -> None:
        self.task = task
        self.body = body
        self.param = param
        self.running = False
        self.abandoned = False
        self._result: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # A caller that stops at the first fault of several jobs never asks for the others'.
        self._result.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def done(self) -> bool:
        """Whether no worker will touch the job (any more)."""
        return self._result.done()

    async def outcome(self) -> Outcome:
        """Wait for the answer. Cancelling the wait does not cancel the job.

        Raises:
            MediaError: the item cannot be used.
            EngineUnavailableError: the pool is closed or has no workers.
        """
        return await asyncio.shield(self._result)

    def cancel(self) -> None:
        """Drop the job if it is queued; one that runs ends by itself and is not tried again."""
        self.abandoned = True
        if not self.running:
            self._result.cancel()
            self.body = b""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as no worker will touch the job any more; at once if that is so."""
        if self.done:
            callback()
        else:
            self._result.add_done_callback(lambda _: callback())

    def succeed(self, outcome: Outcome) -> None:
        """For the pool: the job's answer."""
        self._result.set_result(outcome)

    def fail(self, error: M3Error) -> None:
        """For the pool: the job's error."""
        if not self._result.done():
            self._result.set_exception(error)


class WorkerPool:
    """N disposable worker processes behind one queue.

    Args:
        config: how to run.
        setup: first message to every worker.
    """

    def __init__(self, config: PoolConfig, setup: Setup) -> None:
        self._config = config
        self._setup = setup
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._workers: dict[int, WorkerProcess] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._closed = False
        self.num_deaths = 0
        self.num_started = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are ready."""
        return tuple(worker.pid for worker in self._workers.values())

    @property
    def num_queued(self) -> int:
        """Jobs that no worker has taken."""
        return self._queue.qsize()

    async def start(self) -> None:
        """Start all workers.

        Raises:
            OSError, WorkerDiedError, TimeoutError: one cannot start; none is left behind.
        """
        starts = [asyncio.create_task(self._start_worker()) for _ in range(self._config.num_workers)]
        try:
            workers = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, WorkerProcess):
                    await result.kill()
            raise
        for slot, worker in enumerate(workers):
            self._workers[slot] = worker
            self._servers.append(asyncio.create_task(self._serve(slot), name=f"media-worker-{slot}"))

    async def close(self) -> None:
        """Kill the workers and fail what is open."""
        self._closed = True
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        for slot in list(self._workers):  # of a serving task that was cancelled before its first turn
            await self._drop(slot)
        self._refuse_queued("The server is shutting down.")

    def submit(self, task: Task, body: bytes, *, param: str | None = None) -> Job:
        """Queue a task.

        Args:
            task: what to do.
            body: the encoded item.
            param: request field to name in errors.
        """
        job = Job(task, body, param)
        if self._closed:
            job.fail(EngineUnavailableError("The server is shutting down."))
        else:
            self._queue.put_nowait(job)
        return job

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._setup, timeout_s=self._config.start_timeout_s, command=self._config.command)
        self.num_started += 1
        return worker

    async def _serve(self, slot: int) -> None:
        try:
            while True:
                while slot not in self._workers and not await self._replace(slot):
                    if not self._workers:
                        self._refuse_queued(_NO_WORKERS)
                    await asyncio.sleep(RESTART_PAUSE_S)
                job = await self._queue.get()
                if not job.done:
                    await self._run(slot, job)
        finally:
            await self._drop(slot)

    async def _replace(self, slot: int) -> bool:
        """Start a worker for `slot`; False when the machine refuses."""
        try:
            self._workers[slot] = await self._start_worker()
        except (OSError, WorkerDiedError, TimeoutError):
            logger.exception("a media worker cannot start")
            return False
        return True

    async def _drop(self, slot: int) -> None:
        if worker := self._workers.pop(slot, None):
            await worker.kill()

    async def _run(self, slot: int, job: Job) -> None:
        job.running = True
        try:
            _settle(job, await self._answer(slot, job))
        except M3Error as error:
            job.fail(error)
        except Exception:
            logger.exception("the media pool failed")
            await self._drop(slot)
            job.fail(MediaError("The media cannot be decoded.", param=job.param))
        finally:
            job.fail(EngineUnavailableError("The server is shutting down."))
            job.body = b""

    async def _answer(self, slot: int, job: Job) -> Answer:
        """Give the job to the slot's worker, and once more to a fresh one if that dies of it."""
        for _ in range(MAX_ATTEMPTS):
            if slot in self._workers and not self._workers[slot].alive:
                await self._drop(slot)
            if slot not in self._workers and not await self._replace(slot):
                raise EngineUnavailableError(_NO_WORKERS)
            answer = await self._attempt(slot, job)
            if answer is not None:
                return answer
            if job.abandoned:
                break
        raise MediaError("The media cannot be decoded.", param=job.param)

    async def _attempt(self, slot: int, job: Job) -> Answer | None:
        """One try; None when the worker died of it."""
        worker = self._workers[slot]
        try:
            async with asyncio.timeout(self._config.task_timeout_s):
                answer = await worker.call(job.task, job.body)
        except TimeoutError:
            logger.warning("media worker %d passed its deadline", worker.pid)
            self.num_deaths += 1
            await self._drop(slot)
            raise MediaError("The media take too long to decode.", param=job.param) from None
        except WorkerDiedError:
            logger.warning("media worker %d died", worker.pid)
            self.num_deaths += 1
            await self._drop(slot)
            return None
        if worker.num_tasks >= self._config.recycle_tasks or worker.resident_bytes > self._config.recycle_bytes:
            await self._drop(slot)
        return answer

    def _refuse_queued(self, message: str) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._queue.get_nowait().fail(EngineUnavailableError(message))


def _settle(job: Job, answer: Answer) -> None:
    match answer.result:
        case Refused(message=message):
            job.fail(MediaError(message, param=job.param))
        case Broken(trace=trace):
            logger.error("a media worker failed:\n%s", trace)
            job.fail(MediaError("The media cannot be decoded.", param=job.param))
        case outcome:
            job.succeed(outcome)
