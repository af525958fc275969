"""The media pool: N worker processes, one queue, and the promise that a bad picture costs its own request only.

Every worker has one serving task on the event loop: take a job, give it to the process, wait for the answer. A worker that
dies is replaced and its job tried once more on a fresh one; a worker that passes its deadline is killed and its job is
refused, because it would only take as long again. Jobs are served in order of their submission plus their handicap: the
parts of a long clip let pictures that come a little later pass, and nothing waits for ever. No worker is kept in reserve:
a new one is forked in milliseconds. Knows nothing about the slab's allocation or about requests.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable

from server.errors import EngineUnavailableError, M3Error, MediaError
from server.media.process import WorkerProcess
from server.media.protocol import Answer, Broken, Outcome, Refused, Setup, Task
from server.media.spawner import Spawner, WorkerDiedError

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
        start_timeout_s: deadline of a worker's start.
        recycle_tasks: a worker is replaced after that many tasks.
        recycle_bytes: a worker is replaced when its resident set has grown by more.
    """

    num_workers: int
    start_timeout_s: float
    recycle_tasks: int
    recycle_bytes: int


@dataclasses.dataclass
class PoolTotals:
    """Counters since the start.

    Attributes:
        num_jobs: tasks answered or refused.
        num_deaths: workers that died of a task or passed its deadline.
        num_started: workers started.
        queue_s: time that tasks waited for a worker.
        run_s: time that workers were busy.
        cpu_s: processor time that the tasks took.
    """

    num_jobs: int = 0
    num_deaths: int = 0
    num_started: int = 0
    queue_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0


class Job:
    """One task on its way through the pool; made by `WorkerPool.submit`."""

    def __init__(self, task: Task, body: bytes, param: str | None, timeout_s: float) -> None:
        self.task = task
        self.body = body
        self.param = param
        self.timeout_s = timeout_s
        self.submitted_s = time.monotonic()
        self.running = False
        self.abandoned = False
        self._worker: WorkerProcess | None = None
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
        """Drop the job if it is queued; one that runs ends by itself, a clip at its next packet, and is not tried again."""
        self.abandoned = True
        if not self.running:
            self._result.cancel()
            self.body = b""
        elif self._worker is not None and not self.done:
            self._worker.cancel()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as no worker will touch the job any more; at once if that is so."""
        if self.done:
            callback()
        else:
            self._result.add_done_callback(lambda _: callback())

    def given_to(self, worker: WorkerProcess) -> None:
        """For the pool: `worker` has the job from now on."""
        self._worker = worker

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
        spawner: makes the workers; one that is given is not closed with the pool.
    """

    def __init__(self, config: PoolConfig, setup: Setup, spawner: Spawner | None = None) -> None:
        self._config = config
        self._setup = setup
        self.spawner = spawner or Spawner()
        self._owns_spawner = spawner is None
        self._queue: asyncio.PriorityQueue[tuple[float, int, Job]] = asyncio.PriorityQueue()
        self._num_submitted = 0
        self._workers: dict[int, WorkerProcess] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._closed = False
        self.totals = PoolTotals()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are ready."""
        return tuple(worker.pid for worker in self._workers.values())

    @property
    def num_ready(self) -> int:
        """Workers that are ready."""
        return len(self._workers)

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
            await self._close_spawner()
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
        await self._close_spawner()
        self._refuse_queued("The server is shutting down.")

    def submit(self, task: Task, body: bytes, *, timeout_s: float, param: str | None = None, handicap_s: float = 0.0) -> Job:
        """Queue a task.

        Args:
            task: what to do.
            body: the encoded item.
            timeout_s: the worker is killed after that time, the transfer of the bytes included.
            param: request field to name in errors.
            handicap_s: what is submitted up to so much later goes first.
        """
        job = Job(task, body, param, timeout_s)
        if self._closed:
            job.fail(EngineUnavailableError("The server is shutting down."))
        else:
            self._num_submitted += 1
            self._queue.put_nowait((job.submitted_s + handicap_s, self._num_submitted, job))
        return job

    async def _close_spawner(self) -> None:
        if self._owns_spawner:
            await self.spawner.close()

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._setup, timeout_s=self._config.start_timeout_s, spawner=self.spawner)
        self.totals.num_started += 1
        return worker

    async def _serve(self, slot: int) -> None:
        try:
            while True:
                while slot not in self._workers and not await self._replace(slot):
                    if not self._workers:
                        self._refuse_queued(_NO_WORKERS)
                    await asyncio.sleep(RESTART_PAUSE_S)
                *_, job = await self._queue.get()
                try:
                    if not job.done:
                        await self._run(slot, job)
                except Exception:
                    logger.exception("the media pool failed")  # the job's end is told; the slot must go on
        finally:
            await self._drop(slot)

    async def _replace(self, slot: int) -> bool:
        """Start a worker for `slot`; False when the machine refuses."""
        try:
            self._workers[slot] = await self._start_worker()
        except Exception:
            logger.exception("a media worker cannot start")
            return False
        return True

    async def _drop(self, slot: int) -> None:
        if worker := self._workers.pop(slot, None):
            await worker.kill()

    async def _run(self, slot: int, job: Job) -> None:
        job.running = True
        start_s = time.monotonic()
        self.totals.queue_s += start_s - job.submitted_s
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
            self.totals.num_jobs += 1
            self.totals.run_s += time.monotonic() - start_s

    async def _answer(self, slot: int, job: Job) -> Answer:
        """Give the job to the slot's worker, and once more to a fresh one if that dies of it."""
        for _ in range(MAX_ATTEMPTS):
            if slot in self._workers and not self._workers[slot].alive:
                await self._drop(slot)
            if slot not in self._workers and not await self._replace(slot):
                raise EngineUnavailableError(_NO_WORKERS)
            if job.abandoned:
                break
            answer = await self._attempt(slot, job)
            if answer is not None:
                return answer
        raise MediaError("The media cannot be decoded.", param=job.param)

    async def _attempt(self, slot: int, job: Job) -> Answer | None:
        """One try; None when the worker died of it."""
        worker = self._workers[slot]
        job.given_to(worker)
        try:
            async with asyncio.timeout(job.timeout_s):
                answer = await worker.call(job.task, job.body)
        except TimeoutError:
            logger.warning("media worker %d passed its deadline", worker.pid)
            self.totals.num_deaths += 1
            await self._drop(slot)
            raise MediaError("The media take too long to decode.", param=job.param) from None
        except WorkerDiedError:
            logger.warning("media worker %d died", worker.pid)
            self.totals.num_deaths += 1
            await self._drop(slot)
            return None
        self.totals.cpu_s += answer.cpu_s
        if worker.num_tasks >= self._config.recycle_tasks or worker.grown_bytes > self._config.recycle_bytes:
            await self._drop(slot)
        return answer

    def _refuse_queued(self, message: str) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._queue.get_nowait()[2].fail(EngineUnavailableError(message))


def _settle(job: Job, answer: Answer) -> None:
    match answer.result:
        case Refused(message=message):
            job.fail(MediaError(message, param=job.param))
        case Broken(trace=trace):
            logger.error("a media worker failed:\n%s", trace)
            job.fail(MediaError("The media cannot be decoded.", param=job.param))
        case outcome:
            job.succeed(outcome)
