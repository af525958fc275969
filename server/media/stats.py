"""What the media pipeline counts, as one frozen value that a scrape can read."""

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from server.media.types import MediaPlan
from server.messages import MediaKind

if TYPE_CHECKING:
    from server.media.fetch import Fetcher
    from server.media.pool import WorkerPool
    from server.media.slab import MediaSlab


class MediaStats(msgspec.Struct, frozen=True):
    """Counters (`*_total`) since the start, and values of the moment (`num_*`, `slab_*`).

    Attributes:
        pictures_total, clips_total: items whose pixels reached the slab.
        frames_total: frames of those clips.
        encoded_bytes_total: what those items had encoded.
        fetches_total, fetched_bytes_total, fetch_seconds_total: downloads, also failed ones.
        tasks_total: what workers answered or were killed over.
        queue_seconds_total: time that tasks waited for a worker.
        worker_seconds_total: time that workers were busy.
        decode_cpu_seconds_total: processor time of those tasks.
        worker_deaths_total: workers that died of a task or passed its deadline.
        worker_starts_total: workers started, replacements included.
        num_workers: workers that are ready.
        num_queued: tasks that wait for a worker.
        num_waiting: requests that wait for room in the slab.
        slab_bytes, slab_free_bytes: size of the slab, and what of it is free.
    """

    pictures_total: int
    clips_total: int
    frames_total: int
    encoded_bytes_total: int
    fetches_total: int
    fetched_bytes_total: int
    fetch_seconds_total: float
    tasks_total: int
    queue_seconds_total: float
    worker_seconds_total: float
    decode_cpu_seconds_total: float
    worker_deaths_total: int
    worker_starts_total: int
    num_workers: int
    num_queued: int
    num_waiting: int
    slab_bytes: int
    slab_free_bytes: int


@dataclasses.dataclass
class MediaTotals:
    """The pipeline's own counters; those of its parts are added by `snapshot`."""

    num_pictures: int = 0
    num_clips: int = 0
    num_frames: int = 0
    encoded_bytes: int = 0

    def loaded(self, plan: MediaPlan) -> None:
        """An item's pixels are in the slab."""
        if plan.kind is MediaKind.IMAGE:
            self.num_pictures += 1
        else:
            self.num_clips += 1
            self.num_frames += len(plan.picks)
        self.encoded_bytes += len(plan.source.data)

    def snapshot(self, pool: "WorkerPool | None", slab: "MediaSlab | None", fetcher: "Fetcher | None") -> MediaStats:
        """All counters and gauges; those of a part that is not running are zero."""
        return MediaStats(
            pictures_total=self.num_pictures,
            clips_total=self.num_clips,
            frames_total=self.num_frames,
            encoded_bytes_total=self.encoded_bytes,
            fetches_total=fetcher.num_fetches if fetcher else 0,
            fetched_bytes_total=fetcher.num_bytes if fetcher else 0,
            fetch_seconds_total=fetcher.seconds if fetcher else 0.0,
            tasks_total=pool.totals.num_jobs if pool else 0,
            queue_seconds_total=pool.totals.queue_s if pool else 0.0,
            worker_seconds_total=pool.totals.run_s if pool else 0.0,
            decode_cpu_seconds_total=pool.totals.cpu_s if pool else 0.0,
            worker_deaths_total=pool.totals.num_deaths if pool else 0,
            worker_starts_total=pool.totals.num_started if pool else 0,
            num_workers=pool.num_ready if pool else 0,
            num_queued=pool.num_queued if pool else 0,
            num_waiting=slab.num_waiting if slab else 0,
            slab_bytes=slab.capacity_bytes if slab else 0,
            slab_free_bytes=slab.free_bytes if slab else 0,
        )
