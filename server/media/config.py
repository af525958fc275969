"""The media pipeline's configuration: a frozen value, read from the server's settings once."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from server.media.types import ClipLimits
from server.settings import ResizePolicy

if TYPE_CHECKING:
    from server.settings import Settings

MAX_SOURCE_PIXELS = 1 << 26
"""64 megapixels: above the 48 of today's phones, and two RGBA copies of it still fit a worker's memory."""

MAX_FRAME_PIXELS = 1 << 25
"""32 megapixels: an 8K frame; a decoder keeps up to sixteen of them for reference."""

WORKER_MEMORY_BYTES = 1536 << 20
"""Private memory of a worker: the largest picture as RGBA, its turned copy, RGB and alpha (0.27 + 0.27 + 0.2 + 0.07 GB), or a
clip's bytes and packets (0.5 GB) and the frames that its decoder refers to (16 of 8K: 0.8 GB)."""

CLIP_LIMITS = ClipLimits(MAX_FRAME_PIXELS, max_duration_s=3600.0, max_frames=2400, max_total_pixels=301_056_000)
MAX_WORKERS = 8
MAX_TASKS_PER_WORKER = 2000
MAX_WAITING_REQUESTS = 1024


@dataclasses.dataclass(frozen=True)
class FetchConfig:
    """What may be fetched.

    Attributes:
        timeout_s: for one item, from name resolution to the last byte, redirects included.
        allowed_hosts: names, or `.name` for its subdomains; every host if empty.
        allow_private: whether loopback and private addresses are connected to.
        local_root: directory for file addresses; None for none.
        max_concurrent: downloads at a time, of all requests.
    """

    timeout_s: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    allow_private: bool = False
    local_root: Path | None = None
    max_concurrent: int = 32


@dataclasses.dataclass(frozen=True)
class MediaConfig:
    """How the pipeline runs.

    Attributes:
        num_workers: decoder processes.
        slab_bytes: shared memory for pixels.
        task_timeout_s: a worker that takes longer over a picture, or over judging a clip, is killed.
        clip_timeout_s: the same for a part of a clip's frames.
        start_timeout_s: a worker that takes longer to start is killed.
        max_images, max_videos: items per request.
        max_image_bytes, max_video_bytes: encoded size of one item.
        max_total_bytes: encoded size of a request's items together.
        max_fetched_bytes: encoded size of what was fetched for all requests and is still needed.
        max_image_pixels: width times height of one picture before the resize.
        clip_limits: of one clip.
        policy: resize rule of items whose request does not choose.
        video_fps, keep_last: frame sampling of clips whose request does not choose.
        fetch: what may be fetched.
        worker_memory_bytes: limit on a worker's private memory, beyond what it starts with.
        recycle_tasks: a worker is replaced after that many tasks, because decoders leak.
        recycle_bytes: a worker whose resident set has grown by more is replaced.
        max_waiting: requests that may wait for room in the slab.
    """

    num_workers: int = 2
    slab_bytes: int = 1 << 30
    task_timeout_s: float = 20.0
    clip_timeout_s: float = 120.0
    start_timeout_s: float = 60.0
    max_images: int = 200
    max_videos: int = 20
    max_image_bytes: int = 30 << 20
    max_video_bytes: int = 250 << 20
    max_total_bytes: int = 512 << 20
    max_fetched_bytes: int = 1 << 30
    max_image_pixels: int = MAX_SOURCE_PIXELS
    clip_limits: ClipLimits = CLIP_LIMITS
    policy: ResizePolicy = ResizePolicy.AREA
    video_fps: float = 1.0
    keep_last: bool = False
    fetch: FetchConfig = FetchConfig()
    worker_memory_bytes: int = WORKER_MEMORY_BYTES
    recycle_tasks: int = MAX_TASKS_PER_WORKER
    recycle_bytes: int = 768 << 20
    max_waiting: int = MAX_WAITING_REQUESTS

    @classmethod
    def from_settings(cls, settings: "Settings") -> "MediaConfig":
        """The configuration that the server's settings describe."""
        return cls(
            num_workers=settings.media_workers or min(os.cpu_count() or 1, MAX_WORKERS),
            slab_bytes=settings.media_slab_bytes,
            task_timeout_s=settings.media_task_timeout_s,
            clip_timeout_s=settings.media_clip_timeout_s,
            max_images=settings.max_images,
            max_videos=settings.max_videos,
            max_image_bytes=settings.max_image_bytes,
            max_video_bytes=settings.max_video_bytes,
            max_total_bytes=settings.max_media_bytes,
            max_fetched_bytes=max(settings.max_fetched_bytes, settings.max_media_bytes),
            clip_limits=ClipLimits(
                MAX_FRAME_PIXELS, settings.max_video_seconds, settings.max_video_frames, settings.max_video_pixels
            ),
            policy=settings.media_policy,
            video_fps=settings.video_fps,
            keep_last=settings.video_keep_last,
            fetch=FetchConfig(
                timeout_s=settings.media_fetch_timeout_s,
                allowed_hosts=settings.media_allowed_hosts,
                allow_private=settings.media_allow_private_hosts,
                local_root=settings.media_local_root,
            ),
        )
