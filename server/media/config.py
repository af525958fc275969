"""The media pipeline's configuration: a frozen value, read from the server's settings once."""

import dataclasses
import os
from typing import TYPE_CHECKING

from server.media.types import ResizePolicy

if TYPE_CHECKING:
    from server.settings import Settings

MAX_SOURCE_PIXELS = 1 << 26
"""64 megapixels: above the 48 of today's phones, and two RGBA copies of it still fit a worker's memory."""

WORKER_MEMORY_BYTES = 1536 << 20
"""Private memory of a worker: the largest picture as RGBA, its turned copy, RGB and alpha (0.27 + 0.27 + 0.2 + 0.07 GB),
the encoded bytes, the interpreter, and as much again for what a decoder keeps for itself."""

MAX_WORKERS = 8
MAX_TASKS_PER_WORKER = 2000
MAX_WAITING_REQUESTS = 1024


@dataclasses.dataclass(frozen=True)
class MediaConfig:
    """How the pipeline runs.

    Attributes:
        num_workers: decoder processes.
        slab_bytes: shared memory for patches.
        task_timeout_s: a worker that takes longer over one task is killed.
        start_timeout_s: a worker that takes longer to start is killed.
        max_images: pictures per request.
        max_image_bytes: encoded size of one picture.
        max_image_pixels: width times height of one picture before the resize.
        image_policy: resize rule of pictures whose request does not choose.
        worker_memory_bytes: limit on a worker's private memory.
        recycle_tasks: a worker is replaced after that many tasks, because decoders leak.
        recycle_bytes: a worker whose resident set is larger is replaced.
        max_waiting: requests that may wait for room in the slab.
    """

    num_workers: int = 2
    slab_bytes: int = 256 << 20
    task_timeout_s: float = 20.0
    start_timeout_s: float = 60.0
    max_images: int = 200
    max_image_bytes: int = 30 << 20
    max_image_pixels: int = MAX_SOURCE_PIXELS
    image_policy: ResizePolicy = ResizePolicy.AREA
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
            max_images=settings.max_images,
            max_image_bytes=settings.max_image_bytes,
        )
