"""Times the way of pixels from the slab to a GPU: `python -m benchmarks.pixels`.

How long it takes to pin a slab of 1 GiB, and how long a launch keeps its thread with the frames of a step while a kernel runs
on the device: frames that the device fetches from the pinned slab, and frames that the host copies into pinned memory first,
with one thread and with as many as torch takes by itself. A copy that differs is an error. Prints a table.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Timing, summary
from server.engine_pixels import CudaHostMemory, SlabPixels
from server.media.slab import MediaSlab
from server.messages import SlabRef
from server.model.frame_upload import FrameUpload

SLAB_BYTES: Final = 1 << 30
NUM_SETS: Final = 4  # launches take turns, so that no frames are in the processor's caches for long
REPEATS: Final = 10
BUSY_CYCLES: Final = 40_000_000  # about 20 milliseconds
STEPS: Final = {
    "one picture, 9.1 MB": [(1, 1512, 2016, 3)],
    "20 pictures of 0.45 MB": [(1, 336, 448, 3)] * 20,
    "3 pieces of a clip, 12 MB each": [(8, 700, 700, 3)] * 3,
}
Shape = tuple[int, ...]


def start_kernel() -> torch.cuda.Event:
    """Keep the device busy; the event is its end."""
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()
    return end


def launch(upload: FrameUpload, frames: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """What a launch does with frames: microseconds, and what the device reads."""
    start_s = time.perf_counter()
    started = [upload.start(each) for each in frames]
    upload.join()
    upload.wait()
    taken_us = 1e6 * (time.perf_counter() - start_s)
    return taken_us, [each.clone() for each in started]


def time_launches(pixels: SlabPixels, sets: Sequence[Sequence[SlabRef]], shapes: Sequence[Shape]) -> tuple[Timing, int]:
    """Times of launches behind a running kernel, and how many were over before it; the first two rounds do not count."""
    upload = FrameUpload(torch.device("cuda"))
    samples, num_hidden = [], 0
    for number in range(-2 * NUM_SETS, REPEATS):
        refs = sets[number % NUM_SETS]
        frames = [torch.from_numpy(pixels.read(ref).reshape(shape)) for ref, shape in zip(refs, shapes, strict=True)]
        end = start_kernel()
        taken_us, copies = launch(upload, frames)
        if number >= 0:
            samples.append(taken_us)
            num_hidden += not end.query()  # type: ignore[no-untyped-call]
        for copied, each in zip(copies, frames, strict=True):
            if not torch.equal(copied.cpu(), each):
                raise SystemExit("a copy differs from its frames")
    return summary(samples), num_hidden


def main() -> None:
    """Measure and print."""
    torch.ones(1, device="cuda")
    slab = MediaSlab(SLAB_BYTES)
    plain = SlabPixels(slab.name, None)
    start_s = time.perf_counter()
    pinned = SlabPixels(slab.name, CudaHostMemory(torch.device("cuda", torch.cuda.current_device())))
    if not pinned.is_pinned:
        raise SystemExit("this slab cannot be pinned")
    print(f"{torch.cuda.get_device_name()}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; microseconds of a launch")
    print(f"pinned {SLAB_BYTES >> 20} MiB in {time.perf_counter() - start_s:.2f} s")
    all_threads = torch.get_num_threads()
    ways = (("pinned slab", pinned, 1), ("staged, 1 thread", plain, 1), (f"staged, {all_threads} threads", plain, all_threads))
    rng = np.random.default_rng(0)
    for step, shapes in STEPS.items():
        sets = [asyncio.run(slab.allocate([math.prod(shape) for shape in shapes])) for _ in range(NUM_SETS)]
        for ref in (ref for refs in sets for ref in refs):
            plain.read(ref)[:] = rng.integers(0, 256, ref.num_bytes, np.uint8)
        for way, pixels, num_threads in ways:
            torch.set_num_threads(num_threads)
            timing, num_hidden = time_launches(pixels, sets, shapes)
            spread = f"[{timing.low_us:.0f}..{timing.high_us:.0f}]"
            print(f"{step:32} {way:20} {timing.us:9.0f} {spread:20} {num_hidden} of {REPEATS} beside the kernel")
        for ref in (ref for refs in sets for ref in refs):
            slab.free(ref)
    pinned.close()
    plain.close()
    slab.close()


if __name__ == "__main__":
    main()
