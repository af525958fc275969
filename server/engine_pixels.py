"""The engine's view of the media slab, which is pinned for its GPU once, at start.

From pinned memory the device fetches frames by itself (`model/frame_upload.py`). Where pinning is refused, by a sandbox or a
limit, requests get the same answers, and the host copies every frame once more.
"""

import contextlib
import logging
import mmap
import time
import weakref
from typing import Any, Final, Protocol

import torch

from server.media.slab import SlabReader
from server.messages import SlabRef
from server.model.media_features import MediaFeaturesError, PixelReader, Pixels

logger = logging.getLogger(__name__)

_PORTABLE: Final = 1  # cudaHostRegisterPortable


class HostMemory(Protocol):
    """How a device's driver pins memory of this process."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin whole pages; raises RuntimeError when the driver refuses."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; never raises."""


class CudaHostMemory:
    """Pinning by the CUDA runtime, for `device` and all others of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin whole pages.

        Raises:
            torch.cuda.CudaError: the driver refuses.
        """
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostRegister(address, num_bytes, _PORTABLE))
        if code:
            # The runtime keeps the error until a launch looks for one, and that launch must not be a request's.
            with contextlib.suppress(torch.AcceleratorError):
                torch.ones(1, device=self._device)
            raise torch.cuda.CudaError(code)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        code = int(_runtime().cudaHostUnregister(address))
        if code:
            logger.debug("the media slab stays pinned until this process ends (CUDA error %d)", code)


class SlabPixels:
    """The slab, mapped and, if possible, pinned until `close` or the end of the process.

    Attributes:
        is_pinned: whether it is.
    """

    def __init__(self, name: str, host: HostMemory | None) -> None:
        """Map the slab `name`, and pin it by `host` if there is a device to pin it for.

        Raises:
            SlabError: no such slab, or not one of this layout.
        """
        self._slab = SlabReader(name)
        self.is_pinned = False
        if host is None:
            return
        address, num_bytes = whole_pages(self._slab.data)
        start_s = time.perf_counter()
        try:
            host.pin(address, num_bytes)
        except RuntimeError as error:
            logger.warning("the media slab cannot be pinned, so the host copies pixels before the GPU does: %s", error)
            return
        logger.info("pinned the media slab, %d MiB, in %.2f s", num_bytes >> 20, time.perf_counter() - start_s)
        self.is_pinned = True
        self._unpin = weakref.finalize(self, host.unpin, address)

    def read(self, ref: SlabRef) -> Pixels:
        """The bytes of `ref`, as `SlabReader.read`."""
        return self._slab.read(ref)

    def close(self) -> None:
        """Unpin and unmap. No copy may be under way."""
        if self.is_pinned:
            self._unpin()
            self.is_pinned = False
        self._slab.close()


def whole_pages(memory: Pixels) -> tuple[int, int]:
    """Address and bytes of the pages that `memory` touches; a mapping has no others between its ends."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    first, past = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    return first * mmap.PAGESIZE, (past - first) * mmap.PAGESIZE


def open_pixels(slab_name: str | None, device: torch.device) -> PixelReader:
    """The reader of the media slab for a model on `device`; without a slab, one that fails each request with media."""
    if slab_name is not None:
        return SlabPixels(slab_name, CudaHostMemory(device) if device.type == "cuda" else None).read

    def refuse(ref: SlabRef) -> Pixels:
        raise MediaFeaturesError(f"there is no media slab to read {ref.num_bytes} bytes from")

    return refuse


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
