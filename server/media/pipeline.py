"""The front's one door to media: plan first, from headers; then pixels into the slab, all of a request's or none.

Owns the slab and the pool. A lease owns its ranges of the slab from the moment `load` returns until `release`. Knows
nothing about prompts; nothing here parses a byte of a client.
"""

import asyncio
from collections.abc import Callable, Sequence

from server.errors import MediaError
from server.media.config import MediaConfig
from server.media.pool import Job, PoolConfig, WorkerPool
from server.media.protocol import FillTask, PlanTask, Setup
from server.media.slab import MediaSlab
from server.media.types import ImagePlan, MediaPlan, MediaSource, image_rule
from server.messages import MediaKind, SlabRef


class MediaLease:
    """A request's ranges of the slab.

    Attributes:
        refs: one per item, in order.
    """

    def __init__(self, refs: tuple[SlabRef, ...], free: Callable[[SlabRef], None]) -> None:
        self.refs = refs
        self._free = free
        self._released = False

    def release(self) -> None:
        """Give the memory back; calls after the first do nothing."""
        if not self._released:
            self._released = True
            for ref in self.refs:
                self._free(ref)


class MediaPipeline:
    """Plans and loads the media of requests; one per front process, on its event loop."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._slab: MediaSlab | None = None
        self._pool: WorkerPool | None = None

    @property
    def slab(self) -> MediaSlab:
        """The allocator; there is one between `start` and `close`."""
        assert self._slab is not None, "the media pipeline is not running"
        return self._slab

    @property
    def pool(self) -> WorkerPool:
        """The workers; there are some between `start` and `close`."""
        assert self._pool is not None, "the media pipeline is not running"
        return self._pool

    @property
    def slab_name(self) -> str:
        """What another process opens the slab by."""
        return self.slab.name

    async def start(self) -> None:
        """Make the slab and start the workers.

        Raises:
            SlabError: there is no room for the slab.
            OSError, WorkerDiedError, TimeoutError: a worker cannot start.
        """
        config = self._config
        self._slab = await asyncio.to_thread(MediaSlab, config.slab_bytes, max_waiting=config.max_waiting)
        pool = WorkerPool(
            PoolConfig(
                num_workers=config.num_workers,
                task_timeout_s=config.task_timeout_s,
                start_timeout_s=config.start_timeout_s,
                recycle_tasks=config.recycle_tasks,
                recycle_bytes=config.recycle_bytes,
            ),
            Setup(slab_name=self._slab.name, memory_bytes=config.worker_memory_bytes),
        )
        try:
            await pool.start()
        except BaseException:
            self._slab.close()
            self._slab = None
            raise
        self._pool = pool

    async def close(self) -> None:
        """Kill the workers and remove the slab; leases that are still open may be released afterwards."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    async def plan(self, sources: Sequence[MediaSource]) -> tuple[MediaPlan, ...]:
        """Judge a request's items by their headers, in workers; nothing is decoded.

        Raises:
            MediaError: an item cannot be used, or there are too many; `param` is the first faulty item's.
            EngineUnavailableError: the pipeline is closing.
        """
        tasks = self._plan_tasks(sources)
        jobs = [self.pool.submit(task, source.data, param=source.param) for task, source in zip(tasks, sources, strict=True)]
        try:
            outcomes = [await job.outcome() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()
        plans = []
        for source, outcome in zip(sources, outcomes, strict=True):
            assert isinstance(outcome, ImagePlan)
            plans.append(
                MediaPlan(
                    kind=source.kind,
                    content_hash=outcome.content_hash,
                    grid_thw=outcome.grid_thw,
                    num_tokens=outcome.num_tokens,
                    num_bytes=outcome.num_bytes,
                    size=outcome.size,
                    source=source,
                )
            )
        return tuple(plans)

    async def load(self, plans: Sequence[MediaPlan]) -> MediaLease:
        """Decode a request's items into the slab; waits for room, in order of arrival.

        Cancelling the wait gives the memory back: at once, or where a worker is writing, as soon as it has ended.

        Raises:
            MediaError: an item cannot be decoded, or the items do not fit the empty slab.
            OverloadedError: too many requests wait for room.
            EngineUnavailableError: the pipeline is closing.
        """
        slab, pool = self.slab, self.pool
        refs = await slab.allocate([plan.num_bytes for plan in plans])
        jobs = [self._submit_fill(pool, plan, ref) for plan, ref in zip(plans, refs, strict=True)]
        try:
            for job in jobs:
                await job.outcome()
        except BaseException:
            for job, ref in zip(jobs, refs, strict=True):
                job.cancel()
                job.when_done(lambda ref=ref: slab.free(ref))  # type: ignore[misc]
            raise
        return MediaLease(refs, slab.free)

    def _submit_fill(self, pool: WorkerPool, plan: MediaPlan, ref: SlabRef) -> Job:
        task = FillTask(size=plan.size, max_pixels=self._config.max_image_pixels, ref=ref)
        return pool.submit(task, plan.source.data, param=plan.source.param)

    def _plan_tasks(self, sources: Sequence[MediaSource]) -> list[PlanTask]:
        if len(sources) > self._config.max_images:
            raise MediaError(f"The request has {len(sources)} pictures; the limit is {self._config.max_images}.")
        tasks = []
        for source in sources:
            if source.kind is not MediaKind.IMAGE:
                raise MediaError("Video input is not supported by this server.", param=source.param)
            if len(source.data) > self._config.max_image_bytes:
                raise MediaError(
                    f"The picture has {len(source.data)} bytes; the limit is {self._config.max_image_bytes}.",
                    param=source.param,
                )
            try:
                rule = image_rule(source.options, self._config.image_policy)
            except MediaError as error:
                raise MediaError(error.message, param=source.param) from None
            tasks.append(PlanTask(rule=rule, max_pixels=self._config.max_image_pixels))
        return tasks
