"""Clips that the media tests make themselves. Every frame shows its own number, so that a test can tell which one it got.

A frame is gray, 10 levels darker or lighter per frame, with a red square at the top left that tells which way is up.
"""

import io
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import av
import numpy as np

STEP = 10
SQUARE = 16


def level(number: int) -> int:
    """The gray level of frame `number`; repeats after 20 frames."""
    return 30 + number % 20 * STEP


def frame(number: int, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8."""
    pixels = np.full((height, width, 3), level(number), np.uint8)
    pixels[:SQUARE, :SQUARE] = (255, 0, 0)
    return pixels


def clip(
    num_frames: int = 30,
    *,
    size: tuple[int, int] = (128, 96),
    rate: Fraction | int = 10,
    kind: str = "mp4",
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    pts: Iterable[int] | None = None,
    time_base: Fraction | None = None,
    rotation: int = 0,
    picture: Callable[[int, int, int], np.ndarray] = frame,
    codec_options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    audio: bool = False,
    cover: bytes | None = None,
    sample_aspect_ratio: Fraction | None = None,
) -> bytes:
    """An encoded clip; `pts` counts in `time_base`, and 1 / rate otherwise."""
    buffer = io.BytesIO()
    rate = Fraction(rate)
    with av.open(buffer, "w", format=kind, options=container_options or {}) as container:
        if cover is not None:
            _add_cover(container, cover)
        stream = container.add_stream(codec, rate=rate, options=codec_options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.time_base = time_base or 1 / rate
        stream.codec_context.time_base = time_base or 1 / rate
        if sample_aspect_ratio is not None:
            stream.codec_context.sample_aspect_ratio = sample_aspect_ratio
        if rotation:
            stream.set_display_rotation(rotation)
        sound = container.add_stream("aac", rate=8000) if audio else None
        for number, stamp in zip(range(num_frames), pts or range(num_frames), strict=False):
            shown = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            shown.pts, shown.time_base = stamp, time_base or 1 / rate
            container.mux(stream.encode(shown))
        container.mux(stream.encode(None))
        if sound is not None:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            noise.sample_rate, noise.pts = 8000, 0
            container.mux(sound.encode(noise))
            container.mux(sound.encode(None))
    return buffer.getvalue()


def remuxed(data: bytes, kind: str, *, options: dict[str, str] | None = None, shift_s: float = 0.0) -> bytes:
    """The same packets in another container, later by `shift_s`."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=kind, options=options or {}) as target:
        original = source.streams.video[0]
        stream = target.add_stream_from_template(original)
        ticks = int(shift_s / original.time_base)
        for packet in source.demux(original):
            if packet.size:
                packet.pts, packet.dts = packet.pts + ticks, packet.dts + ticks
                packet.stream = stream
                target.mux(packet)
    return buffer.getvalue()


def _add_cover(container: Any, cover: bytes) -> None:
    container.add_attachment("cover.jpg", "image/jpeg", cover)


def gray_levels(frames: np.ndarray) -> list[int]:
    """The numbers (below 20) of decoded frames, by the level at their centres."""
    centres = frames[:, frames.shape[1] // 2, frames.shape[2] // 2].mean(-1)  # [F]
    return [round((float(value) - 30) / STEP) % 20 for value in centres]
