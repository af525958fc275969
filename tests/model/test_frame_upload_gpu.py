"""Pixels from a real slab on a GPU: the slab may be another request's as soon as the launch has returned."""

import asyncio

import numpy as np
import pytest
import torch

from server.engine_pixels import CudaHostMemory, SlabPixels, open_pixels, whole_pages
from server.media.slab import MediaSlab
from server.messages import MediaItem, MediaKind, TokenRange
from server.model.media_features import MediaFeatures
from server.scheduler.plan import Chunk

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 1_000_000_000  # some 500 ms
# Temporal patches, rows and columns of patches: pictures of 27 KB to 9 MB, and a clip of two pieces.
GRIDS = ((1, 108, 144), (1, 2, 2), (1, 6, 10), (7, 8, 6), (1, 48, 48))
SEGMENT_LEN = 4


class Copying:
    """An encoder whose features are the pixels themselves, read when their turn on the device comes."""

    media_segment_len = SEGMENT_LEN

    def encode_media(self, items):
        return [frames.reshape(num_tokens(frames.shape), -1).clone() for frames in items]


def num_tokens(shape):
    return (shape[0] + 1) // 2 * shape[1] * shape[2] // 28**2


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def slab():
    slab = MediaSlab(64 << 20)
    yield slab
    slab.close()


def fill(slab, pixels, number):
    """A sequence's items with random pixels, and these."""
    rng = np.random.default_rng(number)
    sizes = [(1 if t == 1 else 2 * t) * h * w * 14 * 14 * 3 for t, h, w in GRIDS]
    items, expected, first = [], [], 0
    for index, (grid, ref) in enumerate(zip(GRIDS, asyncio.run(slab.allocate(sizes)), strict=True)):
        t, h, w = grid
        content = rng.integers(0, 256, ref.num_bytes, np.uint8)
        pixels.read(ref)[:] = content
        ranges = tuple(TokenRange(first + pair * h * w // 4, h * w // 4) for pair in range(t))
        first += t * h * w // 4
        kind = MediaKind.IMAGE if t == 1 else MediaKind.VIDEO
        items.append(MediaItem(kind, bytes([number, index]) * 16, grid, ranges, ref))
        expected.append(torch.from_numpy(content))
    return tuple(items), torch.cat(expected)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_slab_may_be_reused_as_soon_as_a_launch_returns(device, slab, is_pinned):
    pixels = SlabPixels(slab.name, CudaHostMemory(device) if is_pinned else None)
    assert pixels.is_pinned == is_pinned
    features = MediaFeatures(Copying(), pixels.read, device)

    def launch(slot, items):
        """Encode a sequence's items in one step, give their ranges away, and return the features."""
        length = sum(part.length for item in items for part in item.ranges)
        chunk = Chunk(slot, 0, length, (), samples=True)
        features.admit(slot, items)
        features.prepare([chunk])
        rows = features.rows_of(chunk)
        features.release(slot)
        for item in items:
            pixels.read(item.pixels)[:] = 255 - slot
            slab.free(item.pixels)
        return [part.features for part in rows]

    for is_warm in (False, True):  # an allocator that asks the driver for memory may wait for the device
        filled = [fill(slab, pixels, number) for number in range(3)]
        step_in_flight = torch.cuda.Event()
        torch.cuda._sleep(BUSY_CYCLES)
        step_in_flight.record()
        launched = [launch(slot, items) for slot, (items, _) in enumerate(filled)]
        assert not (is_warm and step_in_flight.query()), "no launch waits for the step before it"
        for got, (_, expected) in zip(launched, filled, strict=True):
            assert torch.equal(torch.cat([part.flatten() for part in got]).cpu(), expected)
    pixels.close()
    assert slab.free_bytes == slab.capacity_bytes


def test_an_engine_on_a_gpu_reads_from_pinned_memory(device, slab):
    read = open_pixels(slab.name, device)
    (ref,) = asyncio.run(slab.allocate([100_000]))
    assert torch.from_numpy(read(ref)).is_pinned()


def test_a_refusal_leaves_the_device_as_it_was(device, slab, caplog):
    first = SlabPixels(slab.name, CudaHostMemory(device))
    memory = first._slab.data
    with pytest.raises(torch.cuda.CudaError):
        CudaHostMemory(device).pin(*whole_pages(memory))
    assert torch.arange(4, device=device).sum().item() == 6
    assert torch.from_numpy(memory).is_pinned()
    del memory
    first.close()
    assert not caplog.records
