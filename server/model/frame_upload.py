"""Frames on their way to the device.

The device fetches frames that lie in pinned memory by itself, on a stream of its own, so that a copy does not queue behind the
step in flight. Other frames are copied into pinned memory first, by the host. It knows neither pieces nor slots.
"""

import torch
from torch import Tensor


class FrameUpload:
    """Copies to one device, started and waited for by one thread. Where host and device are one, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        """Copy to `device`; its stream is made with the first frames that need it."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(self, frames: Tensor) -> Tensor:
        """Begin to copy frames [F, H, W, 3] uint8.

        Returns:
            the same on the device, which the current stream may read behind `join`. The frames must stay as they are until
            `wait`.
        """
        if self._device.type != "cuda":
            return frames
        if not frames.is_pinned():
            return frames.pin_memory().to(self._device, non_blocking=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            # So is the memory of the copy: what the current stream would take may be in use by the step in flight.
            copied = frames.to(self._device, non_blocking=True)
        copied.record_stream(torch.cuda.current_stream(self._device))
        return copied

    def join(self) -> None:
        """Put all copies that were started before the current stream's next work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        """Return when all frames were read.

        Raises:
            torch.AcceleratorError: the device is lost.
        """
        if self._stream is not None:
            self._stream.synchronize()
