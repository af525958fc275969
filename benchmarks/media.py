"""What media cost on this machine: `python -m benchmarks.media [--out FILE]`.

Processor time of pictures and clips in the real workers, throughput of one and two workers, and the handover through the
slab; beside them Pillow's own resize, a decoding of every frame, and, where torchvision is installed, the released image
processor, all in the same run. Times are medians; the spread is the range.
"""

import argparse
import asyncio
import dataclasses
import datetime
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
from PIL import Image

from server.media.config import MediaConfig
from server.media.pipeline import MediaPipeline
from server.media.slab import MediaSlab, SlabReader
from server.media.types import Detail, MediaOptions, MediaSource
from server.messages import MediaKind

ROUNDS = 9
HANDOVER_BYTES = 2016 * 1512 * 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report: `ours` and `other` in `unit`, medians with their range."""

    name: str
    unit: str
    ours: float
    ours_range: tuple[float, float]
    other_name: str = ""
    other: float | None = None
    target: str = ""


def photo(width: int, height: int) -> bytes:
    """A JPEG with the statistics of a photograph: large smooth shapes, some grain, quality 90."""
    rng = np.random.default_rng(1)
    shapes = Image.fromarray(rng.integers(0, 256, (height // 60, width // 60, 3), np.uint8))
    smooth = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.normal(0, 3, (height, width, 1)).astype(np.int16)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def film(seconds: int, width: int, height: int, rate: int) -> bytes:
    """H.264 as x264 makes it by default: a picture that moves."""
    rng = np.random.default_rng(2)
    small = rng.integers(0, 256, (height // 30, width // 20, 3), np.uint8)
    wide = np.asarray(Image.fromarray(small).resize((2 * width, height), Image.Resampling.BICUBIC))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(seconds * rate):
            shift = 3 * number % width
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(wide[:, shift : shift + width]), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def measured(function: Callable[[], object]) -> tuple[float, tuple[float, float]]:
    """Median and range of the processor time of `function`, in milliseconds."""
    times_ms = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        function()
        times_ms.append(1e3 * (time.process_time() - start_s))
    return statistics.median(times_ms), (min(times_ms), max(times_ms))


async def worker_ms(pipeline: MediaPipeline, source: MediaSource, rounds: int) -> tuple[float, tuple[float, float]]:
    """Processor time that a worker spends on planning and loading `source`, in milliseconds; the first time is left out."""
    times_ms = []
    for _ in range(rounds + 1):
        before_s = pipeline.stats().decode_cpu_seconds_total
        lease = await pipeline.load(await pipeline.plan([source]))
        lease.release()
        times_ms.append(1e3 * (pipeline.stats().decode_cpu_seconds_total - before_s))
    return statistics.median(times_ms[1:]), (min(times_ms[1:]), max(times_ms[1:]))


def pillow_ms(data: bytes, size: tuple[int, int]) -> float:
    """Decode and resize with Pillow alone, in this process."""
    return measured(lambda: Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.BICUBIC).load())[0]


def released_ms(data: bytes, size: tuple[int, int]) -> float | None:
    """Decode, and the released image processor to patches of the picture in `size`; None without torchvision."""
    if find_spec("torchvision") is None or find_spec("transformers") is None:
        return None
    from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import MiniMaxM3VLImageProcessor

    processor = MiniMaxM3VLImageProcessor()

    def process() -> object:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return processor(images=[picture], max_pixels=size[0] * size[1], return_tensors="pt")

    return measured(process)[0]


def every_frame_ms(data: bytes) -> float:
    """Decode a clip from start to end with one thread."""

    def decode() -> None:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"
            for _ in container.decode(stream):
                pass

    start_s = time.process_time()
    decode()
    return 1e3 * (time.process_time() - start_s)


async def pictures() -> list[Row]:
    rows = []
    async with asyncio.timeout(300):
        pipeline = MediaPipeline(MediaConfig(num_workers=1, slab_bytes=64 << 20))
        await pipeline.start()
        for name, width, height, size, target in (
            ("1080p JPEG to 1932x1092", 1920, 1080, (1932, 1092), "<= 19"),
            ("12 MP JPEG to 2016x1512", 4032, 3024, (2016, 1512), "<= 60"),
        ):
            data = photo(width, height)
            source = MediaSource(MediaKind.IMAGE, data, MediaOptions(detail=Detail.HIGH))
            median, spread = await worker_ms(pipeline, source, ROUNDS)
            released = released_ms(data, size)
            other = ("released processor", released) if released is not None else ("Pillow", pillow_ms(data, size))
            rows.append(Row(name, "CPU ms", median, spread, *other, target))
        await pipeline.close()
    return rows


async def clips() -> list[Row]:
    data = film(60, 1280, 720, 30)
    pipeline = MediaPipeline(MediaConfig(num_workers=1, slab_bytes=256 << 20))
    await pipeline.start()
    median, spread = await worker_ms(pipeline, MediaSource(MediaKind.VIDEO, data), 3)
    await pipeline.close()
    whole = statistics.median(every_frame_ms(data) for _ in range(3))
    return [Row("60 s of 720p H.264 at 1 fps", "CPU ms", median, spread, "decoding every frame", whole, "<= 0.75x")]


async def throughput() -> list[Row]:
    source = MediaSource(MediaKind.IMAGE, photo(1920, 1080), MediaOptions(detail=Detail.HIGH))
    rates = {}
    for num_workers in (1, 2):
        pipeline = MediaPipeline(MediaConfig(num_workers=num_workers, slab_bytes=512 << 20))
        await pipeline.start()
        plans = await pipeline.plan([source] * 60)
        (await pipeline.load(plans)).release()
        samples = []
        for _ in range(3):
            start_s = time.monotonic()
            (await pipeline.load(plans)).release()
            samples.append(len(plans) / (time.monotonic() - start_s))
        rates[num_workers] = max(samples)
        await pipeline.close()
    return [Row("1080p pictures, two workers", "1/s", rates[2], (rates[2], rates[2]), "one worker", rates[1], ">= 1.8x")]


async def handover() -> list[Row]:
    slab = MediaSlab(32 << 20)
    (ref,) = await slab.allocate([HANDOVER_BYTES])
    writer, reader = SlabReader(slab.name), SlabReader(slab.name)
    pixels = np.random.default_rng(0).integers(0, 256, HANDOVER_BYTES, dtype=np.uint8)
    np.copyto(writer.read(ref), pixels)

    def hand_over() -> None:
        np.copyto(writer.read(ref), pixels)
        reader.read(ref)

    median, spread = measured(hand_over)
    for each in (writer, reader):
        each.close()
    slab.close()
    return [Row("handover of 9 MB", "CPU ms", median, spread, target="< 1")]


def show(rows: Sequence[Row]) -> None:
    """Print the report as a table."""
    for row in rows:
        beside = "" if row.other is None else f"{row.other_name} {row.other:.1f} ({row.ours / row.other:.2f}x)"
        low, high = row.ours_range
        print(f"{row.name:32} {row.ours:8.2f} [{low:.2f}..{high:.2f}] {row.unit:7} {row.target:9} {beside}")


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    arguments = parser.parse_args()

    async def everything() -> list[Row]:
        return [*await pictures(), *await clips(), *await throughput(), *await handover()]

    rows = asyncio.run(everything())
    show(rows)
    if arguments.out:
        report = {
            "command": "python -m benchmarks.media",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
            "python": platform.python_version(),
            "torchvision": find_spec("torchvision") is not None,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
