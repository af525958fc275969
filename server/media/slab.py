"""The slab: one warm piece of shared memory through which pixels reach the engine without a copy in the front.

`MediaSlab` lives in the front and is the only one that allocates; workers and the engine use `SlabReader`. Every range
carries a generation that was never used before; whoever follows a reference compares it with the slab's own before it
trusts an offset. Room is bounded and those who wait for it are served in order, so the slab is also the back-pressure.
Knows nothing about pictures.
"""

import asyncio
import collections
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from server.errors import EngineUnavailableError, MediaError, OverloadedError
from server.media.freelist import FreeList
from server.media.slab_file import (
    DIRECTORIES,
    GRANULE_BYTES,
    SlabError,
    SlabMapping,
    StaleSlabError,
    create_slab_file,
    num_granules_of,
    open_slab_file,
)
from server.messages import SlabRef

__all__ = ["MediaSlab", "SlabError", "SlabReader", "StaleSlabError"]

_Waiting = tuple[tuple[int, ...], "asyncio.Future[tuple[SlabRef, ...]]"]


class SlabReader:
    """Another process's access to the slab.

    Args:
        name: the slab's path, as `MediaSlab.name`.

    Raises:
        SlabError: no such slab, or not one of this layout.
    """

    def __init__(self, name: str) -> None:
        self._mapping = open_slab_file(name)

    def read(self, ref: SlabRef) -> NDArray[np.uint8]:
        """A view of the bytes of `ref`, [num_bytes] uint8, without a copy.

        Treat it as read-only, except in the worker that was lent the range: it is writable only because torch warns about
        read-only arrays. It must not be used once the range may have been freed.

        Raises:
            StaleSlabError: the range was freed since.
        """
        return self._mapping.view(ref)

    @property
    def data(self) -> NDArray[np.uint8]:
        """All of the slab's memory, [capacity_bytes] uint8; only a range that `read` gives may be looked at."""
        return self._mapping.data

    def close(self) -> None:
        """Unmap."""
        self._mapping.close()


class MediaSlab:
    """The allocator, in the front process and on its event loop.

    Args:
        num_bytes: room for data; rounded up to whole granules.
        max_waiting: requests that may wait for room; beyond it `allocate` raises OverloadedError.
        directories: where to try to put the file, in order.

    Raises:
        SlabError: no directory has the room.
    """

    def __init__(self, num_bytes: int, *, max_waiting: int = 1024, directories: Sequence[Path] = DIRECTORIES) -> None:
        self._num_granules = num_granules_of(num_bytes)
        self._max_waiting = max_waiting
        path, self._lock_fd = create_slab_file(self._num_granules, directories)
        self.name = str(path)
        self._unlink = weakref.finalize(self, path.unlink, missing_ok=True)
        self._mapping = SlabMapping(self._lock_fd, self._num_granules)
        self._free = FreeList(self._num_granules)
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._last_generation = 0
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """Size of the data area."""
        return self._num_granules * GRANULE_BYTES

    @property
    def free_bytes(self) -> int:
        """What is free, in whole granules."""
        return self._free.num_free * GRANULE_BYTES

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    async def allocate(self, sizes: Sequence[int]) -> tuple[SlabRef, ...]:
        """Ranges for all of `sizes` (in bytes, each >= 1), or none: waits in order of arrival until all fit.

        Raises:
            MediaError: they would not fit the empty slab.
            OverloadedError: too many wait already.
            EngineUnavailableError: the slab is closed, or was closed meanwhile.
        """
        if self._closed:
            raise EngineUnavailableError("The server is shutting down.")
        if sum(map(num_granules_of, sizes)) > self._num_granules:
            raise MediaError(
                f"The request's media take {sum(sizes)} bytes after decoding; the server has room for {self.capacity_bytes}."
            )
        if not self._waiting and (refs := self._take(sizes)) is not None:
            return refs
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError("Too many requests with media are waiting; try again later.")
        future: asyncio.Future[tuple[SlabRef, ...]] = asyncio.get_running_loop().create_future()
        waiting = (tuple(sizes), future)
        self._waiting.append(waiting)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                for ref in future.result():  # served and cancelled in the same turn of the loop
                    self.free(ref)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve_waiting()  # the one behind it may fit
            raise

    def free(self, ref: SlabRef) -> None:
        """Give a range back and serve those who wait; nothing is left to do once the slab is closed.

        Raises:
            StaleSlabError: it is not allocated (any more).
        """
        if self._closed:
            return
        self._mapping.view(ref)
        first, count = ref.offset // GRANULE_BYTES, num_granules_of(ref.num_bytes)
        self._mapping.generations[first : first + count] = 0
        self._free.give(first, count)
        self._serve_waiting()

    def close(self) -> None:
        """Refuse those who wait, unmap and remove the file; processes that have it mapped keep their view."""
        if self._closed:
            return
        self._closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(EngineUnavailableError("The server is shutting down."))
        self._waiting.clear()
        self._mapping.close()
        self._unlink()
        os.close(self._lock_fd)

    def _serve_waiting(self) -> None:
        while self._waiting:
            sizes, future = self._waiting[0]
            if not future.done():
                if (refs := self._take(sizes)) is None:
                    return
                future.set_result(refs)
            self._waiting.popleft()

    def _take(self, sizes: Sequence[int]) -> tuple[SlabRef, ...] | None:
        counts = [num_granules_of(size) for size in sizes]
        firsts = self._free.take(counts)
        if firsts is None:
            return None
        self._last_generation += 1
        generation = self._last_generation
        for first, count in zip(firsts, counts, strict=True):
            self._mapping.generations[first : first + count] = generation
        return tuple(SlabRef(first * GRANULE_BYTES, size, generation) for first, size in zip(firsts, sizes, strict=True))
