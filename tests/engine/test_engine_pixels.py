import gc
import mmap

import numpy as np
import pytest
import torch

from server.engine_pixels import SlabPixels, open_pixels, whole_pages
from server.media.slab import MediaSlab, SlabError, StaleSlabError
from server.media.slab_file import GRANULE_BYTES
from server.messages import SlabRef
from server.model.media_features import MediaFeaturesError
from tests.media.media_cards import run


class Driver:
    """Pins what it is asked to, or refuses, and writes down what is pinned."""

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.pinned = {}
        self.num_asked = 0

    def pin(self, address, num_bytes):
        self.num_asked += 1
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.pinned[address] = num_bytes

    def unpin(self, address):
        del self.pinned[address]


@pytest.fixture
def slab(tmp_path):
    slab = MediaSlab(3 * GRANULE_BYTES, directories=[tmp_path])
    yield slab
    slab.close()


def check_that_pixels_arrive(slab, pixels):
    async def main():
        (ref,) = await slab.allocate([GRANULE_BYTES + 5])
        pixels.read(ref)[:] = 7
        assert (pixels.read(ref) == 7).all()
        slab.free(ref)
        with pytest.raises(StaleSlabError):
            pixels.read(ref)

    run(main())


def test_all_of_the_slab_is_pinned_once_in_whole_pages(slab):
    driver = Driver()
    pixels = SlabPixels(slab.name, driver)
    ((address, num_bytes),) = driver.pinned.items()
    assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
    assert num_bytes == slab.capacity_bytes
    check_that_pixels_arrive(slab, pixels)
    assert pixels.is_pinned
    assert driver.num_asked == 1

    async def first():
        (ref,) = await slab.allocate([1])
        return pixels.read(ref).ctypes.data

    assert run(first()) == address
    pixels.close()


def test_closing_unpins_and_once_is_enough(slab):
    driver = Driver()
    pixels = SlabPixels(slab.name, driver)
    pixels.close()
    assert not pixels.is_pinned
    assert not driver.pinned


def test_a_view_that_nobody_closes_unpins_before_it_is_unmapped(slab):
    driver = Driver()
    read = SlabPixels(slab.name, driver).read
    gc.collect()
    assert driver.pinned, "whoever can read keeps it pinned"
    del read
    gc.collect()
    assert not driver.pinned


def test_a_refusal_is_said_once_and_pixels_are_read_all_the_same(slab, caplog):
    driver = Driver("operation not permitted (800)")
    pixels = SlabPixels(slab.name, driver)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "cannot be pinned" in record.message
    assert "operation not permitted (800)" in record.message
    assert not pixels.is_pinned
    check_that_pixels_arrive(slab, pixels)
    pixels.close()


def test_without_a_device_nothing_is_pinned_or_said(slab, caplog):
    pixels = SlabPixels(slab.name, None)
    check_that_pixels_arrive(slab, pixels)
    assert not pixels.is_pinned
    assert not caplog.records
    pixels.close()


def test_nothing_is_pinned_where_no_slab_is(tmp_path):
    driver = Driver()
    with pytest.raises(SlabError):
        SlabPixels(str(tmp_path / "missing"), driver)
    assert not driver.num_asked


@pytest.mark.parametrize("skipped", [0, 1, 100])
def test_pages_that_are_touched_in_part_count_whole(skipped):
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as memory:
        bytes_ = np.frombuffer(memory, np.uint8)
        start = bytes_.ctypes.data
        assert whole_pages(bytes_[skipped : mmap.PAGESIZE]) == (start, mmap.PAGESIZE)
        assert whole_pages(bytes_[skipped : mmap.PAGESIZE + 1]) == (start, 2 * mmap.PAGESIZE)
        assert whole_pages(bytes_[mmap.PAGESIZE + skipped :]) == (start + mmap.PAGESIZE, 2 * mmap.PAGESIZE)
        del bytes_


def test_a_model_on_the_cpu_reads_the_slab_as_it_is(slab, caplog):
    read = open_pixels(slab.name, torch.device("cpu"))

    async def main():
        (ref,) = await slab.allocate([5])
        assert read(ref).shape == (5,)

    run(main())
    assert not caplog.records


def test_an_engine_without_a_slab_refuses_media():
    read = open_pixels(None, torch.device("cpu"))
    with pytest.raises(MediaFeaturesError, match="no media slab"):
        read(SlabRef(0, 5, 1))
