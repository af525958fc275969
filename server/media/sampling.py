"""Which frames of a clip the model sees, and when they are: pure functions on times, no container and no pixels.

The released servers walk over frame numbers of a constant rate: take frame 0, then always the first frame at least 1/fps
later, with a tolerance of 0.1 ms. Here the same walk goes over the frames' own times, so that clips of varying rate are
sampled in time. Where the rate is constant, times are snapped to it first, because containers round them (to whole
milliseconds in Matroska), and a rounded time must not move a pick.
"""

import bisect
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from server.media.geometry import TEMPORAL_PATCH

TOLERANCE_S = 1e-4
MIN_FPS = 0.2
MAX_FPS = 5.0


class FrameSampling(msgspec.Struct, frozen=True):
    """How frames are chosen.

    Attributes:
        fps: frames per second of clip time.
        keep_last: also take the last frame, unless it is the last one chosen anyway.
        max_frames: thin the choice evenly to that many, the first and the last among them; None for no thinning.
    """

    fps: float
    keep_last: bool = False
    max_frames: int | None = None


def pick_frames(times_s: Sequence[float], sampling: FrameSampling) -> list[int]:
    """Positions of the frames to take, ascending.

    Args:
        times_s: of all frames in display order, ascending from 0; at least one.
        sampling: the rule.
    """
    picks = [0]
    while True:
        wanted_s = times_s[picks[-1]] + 1 / sampling.fps - TOLERANCE_S
        position = bisect.bisect_left(times_s, wanted_s, lo=picks[-1] + 1)
        if position == len(times_s):
            break
        picks.append(position)
    last = len(times_s) - 1
    if sampling.keep_last and times_s[last] > times_s[picks[-1]] + TOLERANCE_S:
        picks.append(last)
    return _thinned(picks, sampling.max_frames)


def _thinned(picks: list[int], max_frames: int | None) -> list[int]:
    if max_frames is None or len(picks) <= max_frames:
        return picks
    if max_frames == 1:
        return picks[:1]
    steps = max_frames - 1
    return [picks[(index * (len(picks) - 1) + steps // 2) // steps] for index in range(max_frames)]


def patch_times(times_s: Sequence[float], picks: Sequence[int]) -> tuple[float, ...]:
    """When each temporal patch begins: the time of its first frame, in seconds from the clip's first frame."""
    return tuple(times_s[pick] for pick in picks[::TEMPORAL_PATCH])


def frame_times(stamps: Sequence[int], time_base: Fraction, rates: Sequence[Fraction]) -> list[float]:
    """Times of frames from their presentation stamps.

    Args:
        stamps: distinct, ascending, in units of `time_base`; at least one.
        time_base: seconds per unit.
        rates: frame rates that the container claims; the mean rate is tried as well.

    Returns:
        seconds from the first frame; multiples of 1 / rate where one rate explains all stamps up to their rounding.
    """
    first, count = stamps[0], len(stamps)
    candidates = [rate for rate in rates if rate > 0]
    if count > 1:
        candidates.append(Fraction(count - 1) / ((stamps[-1] - first) * time_base))
    for rate in candidates:
        ticks_per_frame = float(1 / (rate * time_base))
        if all(abs(stamp - first - number * ticks_per_frame) <= 1 for number, stamp in enumerate(stamps)):
            return [float(number / rate) for number in range(count)]
    return [float((stamp - first) * time_base) for stamp in stamps]
