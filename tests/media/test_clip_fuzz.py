"""Damaged clips in real workers: whatever is flipped or cut, the answer is frames or a `MediaError`, and no worker grows."""

import asyncio

import numpy as np
import pytest

from server.errors import MediaError
from server.media.config import MediaConfig
from server.media.pipeline import MediaPipeline
from server.media.types import MediaOptions, MediaSource
from server.messages import MediaKind
from tests.media.clips import clip
from tests.media.media_cards import run

FILES = {
    "mp4": {"codec_options": {"g": "5"}},
    "matroska": {},
    "mpegts": {},
    "avi": {"codec": "mpeg4"},
    "webm": {"codec": "libvpx-vp9"},
}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    if rng.random() < 0.3:
        return data[: int(rng.integers(0, len(data)))]
    changed = bytearray(data)
    for position in rng.integers(0, len(data), size=rng.integers(1, 8)):
        changed[position] ^= int(rng.integers(1, 256))
    return bytes(changed)


async def survive(pipeline: MediaPipeline, data: bytes) -> bool:
    source = MediaSource(MediaKind.VIDEO, data, MediaOptions(fps=5.0, max_long_side_pixel=112))
    try:
        lease = await pipeline.load(await pipeline.plan([source]))
    except MediaError:
        return False
    lease.release()
    return True


@pytest.mark.parametrize("name", FILES)
def test_200_damaged_clips(name, spawner):
    async def main():
        data = clip(12, kind=name, size=(64, 48), **FILES[name])
        rng = np.random.default_rng(list(name.encode()))
        pipeline = MediaPipeline(MediaConfig(num_workers=2, slab_bytes=16 << 20, task_timeout_s=10), spawner)
        await pipeline.start()
        try:
            assert await survive(pipeline, data)
            for _ in range(50):
                await asyncio.gather(*(survive(pipeline, damaged(data, rng)) for _ in range(4)))
            assert pipeline.slab.free_bytes == pipeline.slab.capacity_bytes
            assert all(worker.grown_bytes < 256 << 20 for worker in pipeline.pool._workers.values())
        finally:
            await pipeline.close()

    run(main())
