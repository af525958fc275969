"""The file behind the slab: its layout, its making, and the removal of those whose owner died.

It lies in /dev/shm or, when that is too small, in the temporary directory, and every process maps it by its path:

    header:      magic, layout version, number of granules        3 x uint64, padded to a page
    generations: one uint64 per granule of 16 KiB, 0 while free   padded to a page
    data:        the granules

Its owner holds a lock on it as long as it lives.
"""

import fcntl
import logging
import mmap
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from server.messages import SlabRef

GRANULE_BYTES = 16 << 10
PREFIX = "m3-media-"
DIRECTORIES = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108
_MAGIC = 0x4D33_4D45_4449_4131
_VERSION = 1
_PAGE = mmap.PAGESIZE

logger = logging.getLogger(__name__)


class SlabError(Exception):
    """The slab cannot be made or opened; the message is for the operator."""


class StaleSlabError(Exception):
    """A reference whose range was freed, or freed and given to another request."""


class SlabMapping:
    """A mapped slab file.

    Attributes:
        num_granules: size of the data.
        generations: [num_granules] uint64, shared; written by the owner only.
        data: [num_granules * GRANULE_BYTES] uint8, shared; it begins a page.
    """

    def __init__(self, fd: int, num_granules: int) -> None:
        self.num_granules = num_granules
        data_start = _data_start(num_granules)
        self._map = mmap.mmap(fd, data_start + num_granules * GRANULE_BYTES)
        self.generations: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, num_granules, offset=_PAGE)
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, num_granules * GRANULE_BYTES, offset=data_start)

    def view(self, ref: SlabRef) -> NDArray[np.uint8]:
        """The bytes of `ref`, [num_bytes].

        Raises:
            StaleSlabError: not every granule under it belongs to it.
        """
        first, past = ref.offset // GRANULE_BYTES, -(-(ref.offset + ref.num_bytes) // GRANULE_BYTES)
        if ref.offset < 0 or ref.num_bytes < 1 or past > self.num_granules:
            raise StaleSlabError(f"range {ref.offset}+{ref.num_bytes} is outside the slab")
        if not ref.generation or not (self.generations[first:past] == ref.generation).all():
            raise StaleSlabError(f"range {ref.offset}+{ref.num_bytes} is not of generation {ref.generation} any more")
        return self.data[ref.offset : ref.offset + ref.num_bytes]

    def close(self) -> None:
        """Let go of the memory; it stays mapped while views that were handed out are alive."""
        del self.generations, self.data
        try:
            self._map.close()
        except BufferError:
            logger.debug("the slab stays mapped until its last view is gone")


def num_granules_of(num_bytes: int) -> int:
    """Granules that hold `num_bytes`."""
    return -(-num_bytes // GRANULE_BYTES)


def create_slab_file(num_granules: int, directories: Sequence[Path]) -> tuple[Path, int]:
    """Make a slab file with all its memory reserved, in the first directory that has the room.

    Returns:
        its path and a locked descriptor, which must stay open as long as the slab lives.

    Raises:
        SlabError: no directory has the room.
    """
    num_bytes = _file_bytes(num_granules)
    faults = []
    for directory in directories:
        try:
            _sweep(directory)
            path, fd = _create_locked(directory)
        except OSError as error:
            faults.append(f"{directory}: {error.strerror}")
            continue
        try:
            # Reserved now: a sparse file would kill whoever touches it first when memory runs out (SIGBUS).
            os.posix_fallocate(fd, 0, num_bytes)
            os.pwrite(fd, np.array([_MAGIC, _VERSION, num_granules], np.uint64).tobytes(), 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            faults.append(f"{directory}: {error.strerror}")
            continue
        if faults:
            logger.warning("the media slab is in %s, which may be slower (%s)", directory, "; ".join(faults))
        return path, fd
    raise SlabError(
        f"no room for a media slab of {num_bytes} bytes ({'; '.join(faults)}); enlarge /dev/shm or lower M3_MEDIA_SLAB_BYTES"
    )


def open_slab_file(name: str) -> SlabMapping:
    """Map a slab that another process owns.

    Raises:
        SlabError: no such slab, or not one of this layout.
    """
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SlabError(f"cannot open the media slab: {error.strerror}") from error
    try:
        magic, version, num_granules = np.frombuffer(os.pread(fd, 24, 0).ljust(24, b"\0"), np.uint64).tolist()
        if (magic, version) != (_MAGIC, _VERSION) or os.fstat(fd).st_size != _file_bytes(num_granules):
            raise SlabError("the media slab has another layout")
        return SlabMapping(fd, num_granules)
    finally:
        os.close(fd)


def _data_start(num_granules: int) -> int:
    return _PAGE + -(-8 * num_granules // _PAGE) * _PAGE


def _file_bytes(num_granules: int) -> int:
    return _data_start(num_granules) + num_granules * GRANULE_BYTES


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{PREFIX}{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # another front's sweep came between the two calls


def _sweep(directory: Path) -> None:
    """Remove slabs whose front died without removing them: the lock ends with its process, whatever ended that."""
    for path in directory.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
