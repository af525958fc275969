import asyncio
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import EngineUnavailableError, MediaError, OverloadedError
from server.media.freelist import FreeList
from server.media.slab import MediaSlab, SlabError, SlabReader, StaleSlabError
from server.media.slab_file import GRANULE_BYTES, PREFIX
from server.messages import SlabRef
from tests.media.media_cards import run

UNIT = GRANULE_BYTES


@pytest.fixture
def slab(tmp_path):
    slab = MediaSlab(8 * UNIT, max_waiting=3, directories=[tmp_path])
    yield slab
    slab.close()
    assert list(tmp_path.iterdir()) == []


async def turns(count=5):
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 12), min_size=1, max_size=4)), max_size=40)
)
def test_the_free_list_never_lends_a_unit_twice_and_gets_all_back(num_units, steps):
    free = FreeList(num_units)
    owned = []  # (first, count)
    for give, counts in steps:
        if give and owned:
            free.give(*owned.pop(len(counts) % len(owned)))
            continue
        before = free.num_free
        firsts = free.take(counts)
        if firsts is None:
            assert free.num_free == before
            continue
        owned += zip(firsts, counts, strict=True)
        units = [unit for first, count in owned for unit in range(first, first + count)]
        assert len(units) == len(set(units))
        assert not units or (min(units) >= 0 and max(units) < num_units)
        assert free.num_free == num_units - len(units)
    for stretch in owned:
        free.give(*stretch)
    assert free.take([num_units]) == (0,)  # one stretch again


def test_what_a_worker_writes_is_what_the_engine_reads(slab):
    async def main():
        refs = await slab.allocate([100, 3 * UNIT + 1])
        assert [ref.num_bytes for ref in refs] == [100, 3 * UNIT + 1]
        worker, engine = SlabReader(slab.name), SlabReader(slab.name)
        for value, ref in enumerate(refs, start=1):
            worker.read(ref)[:] = value
        for value, ref in enumerate(refs, start=1):
            seen = engine.read(ref)
            assert seen.shape == (ref.num_bytes,)
            assert seen.dtype == np.uint8
            assert (seen == value).all()
        worker.close()
        engine.close()

    run(main())


def test_a_reference_to_freed_or_reused_memory_is_refused(slab):
    async def main():
        reader = SlabReader(slab.name)
        (old,) = await slab.allocate([2 * UNIT])
        reader.read(old)
        slab.free(old)
        with pytest.raises(StaleSlabError):
            reader.read(old)
        (new,) = await slab.allocate([UNIT])
        assert new.offset == old.offset
        with pytest.raises(StaleSlabError):
            reader.read(old)
        with pytest.raises(StaleSlabError):
            slab.free(old)
        reader.read(new)
        for wrong in (
            SlabRef(new.offset, 2 * UNIT, new.generation),
            SlabRef(new.offset, new.num_bytes, new.generation + 1),
            SlabRef(-UNIT, UNIT, new.generation),
            SlabRef(8 * UNIT, 1, 0),
            SlabRef(4 * UNIT, UNIT, 0),
            SlabRef(0, 0, new.generation),
        ):
            with pytest.raises(StaleSlabError):
                reader.read(wrong)
        reader.close()

    run(main())


def test_a_request_gets_all_its_ranges_or_waits_for_all(slab):
    async def main():
        first = await slab.allocate([3 * UNIT, 3 * UNIT])
        waiting = asyncio.create_task(slab.allocate([UNIT, 2 * UNIT]))
        await turns()
        assert not waiting.done()
        assert slab.free_bytes == 2 * UNIT  # the part that would fit is not held
        slab.free(first[0])
        assert len(await waiting) == 2

    run(main())


def test_waiting_requests_are_served_in_order_also_past_smaller_ones(slab):
    async def main():
        held = await slab.allocate([4 * UNIT, 4 * UNIT])
        served = []

        async def want(name, size):
            refs = await slab.allocate([size])
            served.append(name)
            return refs

        large = asyncio.create_task(want("large", 5 * UNIT))
        await turns()
        small = asyncio.create_task(want("small", UNIT))
        await turns()
        slab.free(held[0])
        await turns()
        assert served == []  # the small one would fit, but it is not its turn
        slab.free(held[1])
        await asyncio.gather(large, small)
        assert served == ["large", "small"]

    run(main())


def test_one_that_gives_up_waiting_lets_the_next_pass(slab):
    async def main():
        await slab.allocate([6 * UNIT])
        large = asyncio.create_task(slab.allocate([5 * UNIT]))
        small = asyncio.create_task(slab.allocate([UNIT]))
        await turns()
        assert slab.num_waiting == 2
        large.cancel()
        assert len(await small) == 1
        assert slab.num_waiting == 0
        assert slab.free_bytes == UNIT

    run(main())


def test_memory_that_is_given_to_a_cancelled_request_comes_back(slab):
    async def main():
        (held,) = await slab.allocate([8 * UNIT])
        waiting = asyncio.create_task(slab.allocate([UNIT]))
        await turns()
        slab.free(held)  # serves the one that waits ...
        waiting.cancel()  # ... which is cancelled before it runs again
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert slab.free_bytes == slab.capacity_bytes

    run(main())


def test_what_can_never_fit_is_refused_at_once(slab):
    async def main():
        with pytest.raises(MediaError, match=f"room for {8 * UNIT}"):
            await slab.allocate([8 * UNIT, 1])
        assert await slab.allocate([]) == ()

    run(main())


def test_too_many_waiting_is_overload(slab):
    async def main():
        await slab.allocate([8 * UNIT])
        waiting = [asyncio.create_task(slab.allocate([UNIT])) for _ in range(3)]
        await turns()
        with pytest.raises(OverloadedError):
            await slab.allocate([UNIT])
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(main())


def test_closing_refuses_those_who_wait_and_removes_the_file(slab):
    async def main():
        (held,) = await slab.allocate([8 * UNIT])
        waiting = asyncio.create_task(slab.allocate([UNIT]))
        await turns()
        slab.close()
        with pytest.raises(EngineUnavailableError):
            await waiting
        with pytest.raises(EngineUnavailableError):
            await slab.allocate([UNIT])
        slab.free(held)  # whoever still holds memory may let go of it
        slab.close()
        with pytest.raises(SlabError, match="No such file"):
            SlabReader(slab.name)

    run(main())


def test_random_requests_and_cancellations_leak_nothing(slab):
    async def main():
        rng = random.Random(11)

        async def request():
            refs = await slab.allocate([rng.randint(1, 3 * UNIT) for _ in range(rng.randint(1, 2))])
            try:
                await turns(rng.randint(0, 4))
            finally:
                for ref in refs:
                    slab.free(ref)

        for _ in range(100):
            tasks = [asyncio.create_task(request()) for _ in range(rng.randint(1, 3))]
            for task in tasks:
                await turns(rng.randint(0, 3))
                if rng.random() < 0.4:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert slab.free_bytes == slab.capacity_bytes
        assert slab.num_waiting == 0

    run(main())


def test_the_file_is_private_and_reserved(slab):
    status = os.stat(slab.name)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= slab.capacity_bytes


def test_a_full_directory_falls_back_to_the_next_with_a_warning(tmp_path, caplog, monkeypatch):
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    reserve = os.posix_fallocate

    def no_room_in_small(fd, offset, length):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(small)):
            raise OSError(28, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", no_room_in_small)
    slab = MediaSlab(UNIT, directories=[small, large])
    assert slab.name.startswith(str(large))
    assert "No space left" in caplog.text
    slab.close()
    with pytest.raises(SlabError, match=r"No space left.*M3_MEDIA_SLAB_BYTES"):
        MediaSlab(UNIT, directories=[small])
    with pytest.raises(SlabError, match="No such file"):
        MediaSlab(UNIT, directories=[tmp_path / "missing"])
    assert list(small.iterdir()) == list(large.iterdir()) == []


def test_another_file_is_not_taken_for_a_slab(tmp_path):
    for content in (b"", b"x" * 10, b"x" * 100_000):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(SlabError, match="another layout"):
            SlabReader(str(tmp_path / "file"))


def test_the_slab_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(tmp_path):
    script = (
        "import sys, pathlib; from server.media.slab import MediaSlab; "
        "slab = MediaSlab(1, directories=[pathlib.Path(sys.argv[1])]); print(slab.name, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        name = other.stdout.readline().strip()
        ours = MediaSlab(UNIT, directories=[tmp_path])
        assert {str(path) for path in tmp_path.glob(f"{PREFIX}*")} == {name, ours.name}
        other.kill()
        other.wait()
        ours.close()
        again = MediaSlab(UNIT, directories=[tmp_path])
        assert [str(path) for path in tmp_path.iterdir()] == [again.name]
        again.close()
