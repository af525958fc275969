"""One encoded clip: what it will cost, and its frames.

`plan_clip` reads the container and one frame (FFmpeg's display matrix hangs on frames), so that a clip that is too long or
too large is refused before it is decoded; `fill_clip` decodes the chosen frames. Both belong in a worker process.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

import av
import numpy as np
from av.video.stream import VideoStream

from server.errors import MediaError
from server.media.clip_decoder import ClipDecoder
from server.media.container import ClipIndex, index_packets, opened
from server.media.geometry import ResizeRule, Size, target_size
from server.media.resize import Pixels, resize_into
from server.media.sampling import FrameSampling, patch_times, pick_frames
from server.media.types import ClipLimits, ClipPlan

PIXEL_VERSION = b"m3-clip-1"
"""Changes whenever the same bytes, size and frames would give other pixels."""

MAX_PROBE_PACKETS = 300
"""How far into a damaged clip a first good frame is looked for."""

MIN_GOOD_SHARE = 0.5
"""A frame that is damaged shows the one before it; a clip with fewer good frames than this share is refused."""


def plan_clip(data: bytes, rule: ResizeRule, sampling: FrameSampling, limits: ClipLimits) -> ClipPlan:
    """Judge a clip by its packets and its first frame.

    Args:
        data: encoded bytes.
        rule: resize rule of its frames.
        sampling: which frames to take.
        limits: what it may cost.

    Raises:
        MediaError: not an accepted clip, or beyond a limit.
    """
    with opened(data, limits.max_frame_pixels) as (container, stream):
        index = index_packets(container, stream)
        if index.times_s[-1] > limits.max_duration_s:
            raise MediaError(
                f"The video is {index.times_s[-1]:.0f} seconds long; the limit is {limits.max_duration_s:.0f} seconds."
            )
        size = target_size(_upright_size(stream, index), rule)
    picks = pick_frames(index.times_s, sampling)
    _check_budgets(len(picks), size, limits)
    digest = hashlib.sha256(PIXEL_VERSION + struct.pack(f"<{2 + len(picks)}I", size.width, size.height, *picks))
    digest.update(data)
    return ClipPlan(size, digest.digest(), tuple(picks), patch_times(index.times_s, picks))


def fill_clip(
    data: bytes,
    size: Size,
    picks: Sequence[int],
    *,
    max_frame_pixels: int,
    out: Pixels,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Decode frames of a clip, bring them to `size` and write them.

    Args:
        data: encoded bytes.
        size: the plan's size.
        picks: some of the plan's picks, ascending.
        max_frame_pixels: as in the plan.
        out: flat uint8 array, len(picks) * height * width * 3.
        is_cancelled: asked between packets.

    Raises:
        MediaError: the frames cannot be decoded, or nobody wants them any more.
    """
    frames = out.reshape(len(picks), size.height, size.width, 3)
    is_good = np.zeros(len(picks), np.bool_)
    with opened(data, max_frame_pixels) as (container, stream):
        index = index_packets(container, stream)
        if picks[-1] >= len(index.stamps):
            raise MediaError("The video does not have the frames that it announced.")
        positions = {index.stamps[pick]: position for position, pick in enumerate(picks)}
        for stamp, frame in ClipDecoder(stream, index, is_cancelled).frames(set(positions)):
            position = positions[stamp]
            resize_into(_upright_pixels(frame), frames[position])
            is_good[position] = True
    if is_good.sum() < max(1, MIN_GOOD_SHARE * len(picks)):
        raise MediaError("The video's frames are corrupt or incomplete.")
    last_good = int(is_good.argmax())
    for number in range(len(picks)):
        if is_good[number]:
            last_good = number
        else:
            frames[number] = frames[last_good]


def _upright_size(stream: VideoStream, index: ClipIndex) -> Size:
    """Size of the first frame that can be decoded, turned as it is to be shown."""
    for packet in index.packets[:MAX_PROBE_PACKETS]:
        try:
            frames = stream.decode(packet)
        except av.FFmpegError:
            continue
        for frame in frames:
            return _turned(frame)
    for frame in stream.decode(None):
        return _turned(frame)
    raise MediaError("The video's frames are corrupt or incomplete.")


def _turned(frame: av.VideoFrame) -> Size:
    return Size(frame.height, frame.width) if frame.rotation % 180 else Size(frame.width, frame.height)


def _check_budgets(num_frames: int, size: Size, limits: ClipLimits) -> None:
    advice = "lower fps, max_frames or max_long_side_pixel"
    if num_frames > limits.max_frames:
        raise MediaError(f"The video gives {num_frames} frames; the limit is {limits.max_frames}: {advice}.")
    num_pixels = num_frames * size.width * size.height
    if num_pixels > limits.max_total_pixels:
        raise MediaError(
            f"The video gives {num_frames} frames of {size.width}x{size.height}, {num_pixels} pixels in all;"
            f" the limit is {limits.max_total_pixels}: {advice}."
        )


def _upright_pixels(frame: av.VideoFrame) -> Pixels:
    """[H, W, 3] uint8 RGB: transparent parts on white, turned by the display matrix."""
    if any(component.is_alpha for component in frame.format.components) or frame.format.has_palette:
        layers = frame.to_ndarray(format="rgba").astype(np.uint16)  # [H, W, 4]
        alpha = layers[..., 3:]
        pixels = ((layers[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    else:
        pixels = frame.to_ndarray(format="rgb24")
    quarter_turns = frame.rotation // 90 % 4
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns)) if quarter_turns else pixels
