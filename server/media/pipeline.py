"""The front's one door to media: fetch, plan from headers, then pixels into the slab, all of a request's or none.

Owns the slab, the pool and the fetcher. A lease owns its ranges of the slab from the moment `load` returns until `release`.
Knows nothing about prompts; nothing here parses a byte of a client.
"""

import asyncio
from collections.abc import Callable, Sequence

from server.errors import MediaError
from server.held_bytes import HeldBytes
from server.media.config import MediaConfig
from server.media.fetch import TOO_MUCH_FETCHED, ByteBudget, Fetcher
from server.media.pool import Job, PoolConfig, WorkerPool
from server.media.protocol import FillClipTask, FillTask, PlanClipTask, PlanTask, Setup
from server.media.slab import MediaSlab
from server.media.spawner import Spawner
from server.media.stats import MediaStats, MediaTotals
from server.media.types import ClipPlan, ImagePlan, MediaPlan, MediaSource, clip_rule, clip_sampling, image_rule
from server.messages import MediaKind, SlabRef

PART_FRAMES = 32
"""A clip is decoded in parts of so many chosen frames, by as many workers as are free."""

PART_HANDICAP_S = 0.5
"""Each further part of a clip lets pictures pass that come that much later than the part before could have let."""


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

    def __init__(self, config: MediaConfig, spawner: Spawner | None = None) -> None:
        """`spawner` makes the workers; by default the pipeline has its own."""
        self._config = config
        self._spawner = spawner
        self._slab: MediaSlab | None = None
        self._pool: WorkerPool | None = None
        self._fetcher: Fetcher | None = None
        self._downloaded = HeldBytes(config.max_fetched_bytes, TOO_MUCH_FETCHED)
        self._totals = MediaTotals()

    @property
    def slab(self) -> MediaSlab:
        """The allocator; there is one between `make_slab` and `close`."""
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

    async def make_slab(self) -> None:
        """Make the slab, so that what needs its name can start before the workers have.

        Raises:
            SlabError: there is no room for it.
        """
        self._slab = await asyncio.to_thread(MediaSlab, self._config.slab_bytes, max_waiting=self._config.max_waiting)

    async def start(self) -> None:
        """Start the workers; makes the slab first when there is none.

        Raises:
            SlabError: there is no room for the slab.
            OSError, WorkerDiedError, TimeoutError: a worker cannot start.
        """
        config = self._config
        if self._slab is None:
            await self.make_slab()
        pool = WorkerPool(
            PoolConfig(
                num_workers=config.num_workers,
                start_timeout_s=config.start_timeout_s,
                recycle_tasks=config.recycle_tasks,
                recycle_bytes=config.recycle_bytes,
            ),
            Setup(slab_name=self.slab_name, memory_bytes=config.worker_memory_bytes),
            self._spawner,
        )
        try:
            await pool.start()
        except BaseException:
            self.slab.close()
            self._slab = None
            raise
        self._pool = pool
        self._fetcher = Fetcher(config.fetch)

    async def close(self) -> None:
        """Kill the workers and remove the slab; leases that are still open may be released afterwards."""
        if self._fetcher is not None:
            await self._fetcher.close()
            self._fetcher = None
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    async def plan(self, sources: Sequence[MediaSource]) -> tuple[MediaPlan, ...]:
        """Fetch what has an address, and judge a request's items by their headers, in workers.

        What was fetched counts until the plans are given to `forget`.

        Raises:
            MediaError: an item cannot be used, or there are too many; `param` is the first faulty item's.
            OverloadedError: too much was fetched for all requests together.
            EngineUnavailableError: the pipeline is closing.
        """
        tasks = self._plan_tasks(sources)
        num_given_bytes = sum(len(source.data) for source in sources)
        budget = ByteBudget(self._config.max_total_bytes - num_given_bytes, self._downloaded)
        try:
            fetched = await self._fetched(sources, budget)
            self._check_bytes(fetched)
            return await self._planned(tasks, fetched)
        except BaseException:
            self._downloaded.give_back(budget.num_spent)
            raise

    def forget(self, plans: Sequence[MediaPlan]) -> None:
        """The encoded files of a request's items are not needed any more; exactly once for what `plan` returned."""
        self._downloaded.give_back(sum(len(plan.source.data) for plan in plans if plan.source.url is not None))

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
            for job in (job for parts in jobs for job in parts):
                await job.outcome()
        except BaseException:
            for parts, ref in zip(jobs, refs, strict=True):
                for job in parts:
                    job.cancel()
                _when_all_done(parts, lambda ref=ref: slab.free(ref))  # type: ignore[misc]
            raise
        for plan in plans:
            self._totals.loaded(plan)
        return MediaLease(refs, slab.free)

    def stats(self) -> MediaStats:
        """Counters and gauges of the moment; all zero while the pipeline does not run."""
        return self._totals.snapshot(self._pool, self._slab, self._fetcher)

    def _submit_fill(self, pool: WorkerPool, plan: MediaPlan, ref: SlabRef) -> list[Job]:
        """One job for a picture, several for a clip: each writes its own stretch of the item's range."""
        config, source = self._config, plan.source
        if plan.kind is MediaKind.IMAGE:
            task = FillTask(size=plan.size, max_pixels=config.max_image_pixels, ref=ref)
            return [pool.submit(task, source.data, timeout_s=config.task_timeout_s, param=source.param)]
        jobs = []
        for number, start in enumerate(range(0, len(plan.picks), PART_FRAMES)):
            picks = plan.picks[start : start + PART_FRAMES]
            part = SlabRef(ref.offset + start * plan.frame_bytes, len(picks) * plan.frame_bytes, ref.generation)
            clip_task = FillClipTask(
                size=plan.size, picks=picks, max_frame_pixels=config.clip_limits.max_frame_pixels, ref=part
            )
            handicap_s = number * PART_HANDICAP_S
            jobs.append(
                pool.submit(clip_task, source.data, timeout_s=config.clip_timeout_s, param=source.param, handicap_s=handicap_s)
            )
        return jobs

    async def _planned(self, tasks: Sequence[PlanTask | PlanClipTask], sources: Sequence[MediaSource]) -> tuple[MediaPlan, ...]:
        timeout_s = self._config.task_timeout_s
        pairs = zip(tasks, sources, strict=True)
        jobs = [self.pool.submit(task, source.data, timeout_s=timeout_s, param=source.param) for task, source in pairs]
        try:
            outcomes = [await job.outcome() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()
        return tuple(_plan_of(source, outcome) for source, outcome in zip(sources, outcomes, strict=True))

    async def _fetched(self, sources: Sequence[MediaSource], budget: ByteBudget) -> list[MediaSource]:
        """The sources with their data; the first fault, in their order, is raised once all have ended or were cancelled."""
        fetcher = self._fetcher
        assert fetcher is not None, "the media pipeline is not running"

        async def fetched(source: MediaSource) -> MediaSource:
            if source.url is None:
                return source
            max_bytes = self._max_bytes(source.kind)
            data = await fetcher.fetch(source.url, max_bytes=max_bytes, budget=budget, param=source.param)
            return source.with_data(data)

        if all(source.url is None for source in sources):
            return list(sources)
        self._check_bytes([source for source in sources if source.url is None])
        downloads = [asyncio.create_task(fetched(source)) for source in sources]
        try:
            return [await download for download in downloads]
        finally:
            for download in downloads:
                download.cancel()
            await asyncio.gather(*downloads, return_exceptions=True)

    def _plan_tasks(self, sources: Sequence[MediaSource]) -> list[PlanTask | PlanClipTask]:
        config = self._config
        for kind, limit, noun in (
            (MediaKind.IMAGE, config.max_images, "pictures"),
            (MediaKind.VIDEO, config.max_videos, "videos"),
        ):
            items = [source for source in sources if source.kind is kind]
            if len(items) > limit:
                raise MediaError(f"The request has {len(items)} {noun}; the limit is {limit}.", param=items[limit].param)
        tasks: list[PlanTask | PlanClipTask] = []
        for source in sources:
            try:
                tasks.append(self._plan_task(source))
            except MediaError as error:
                raise MediaError(error.message, param=source.param) from None
        return tasks

    def _plan_task(self, source: MediaSource) -> PlanTask | PlanClipTask:
        config = self._config
        if source.kind is MediaKind.IMAGE:
            return PlanTask(rule=image_rule(source.options, config.policy), max_pixels=config.max_image_pixels)
        sampling = clip_sampling(source.options, config.video_fps, keep_last=config.keep_last)
        return PlanClipTask(clip_rule(source.options, config.policy), sampling, config.clip_limits)

    def _max_bytes(self, kind: MediaKind) -> int:
        return self._config.max_image_bytes if kind is MediaKind.IMAGE else self._config.max_video_bytes

    def _check_bytes(self, sources: Sequence[MediaSource]) -> None:
        for source in sources:
            limit = self._max_bytes(source.kind)
            if len(source.data) > limit:
                noun = "picture" if source.kind is MediaKind.IMAGE else "video"
                raise MediaError(f"The {noun} has {len(source.data)} bytes; the limit is {limit}.", param=source.param)
        total = sum(len(source.data) for source in sources)
        if total > self._config.max_total_bytes:
            raise MediaError(f"The request's media have {total} bytes; the limit is {self._config.max_total_bytes}.")


def _plan_of(source: MediaSource, outcome: object) -> MediaPlan:
    if isinstance(outcome, ClipPlan):
        return MediaPlan(source.kind, outcome.content_hash, outcome.size, outcome.picks, outcome.timestamps_s, source)
    assert isinstance(outcome, ImagePlan)
    return MediaPlan(source.kind, outcome.content_hash, outcome.size, (0,), None, source)


def _when_all_done(jobs: Sequence[Job], callback: Callable[[], None]) -> None:
    """Call `callback` as soon as no worker will touch any of the jobs any more."""
    remaining = len(jobs)

    def one_done() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            callback()

    for job in jobs:
        job.when_done(one_done)
