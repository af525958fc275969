"""How large a picture or a frame becomes: the two resize policies of MiniMax-M3, as pure functions.

The area rule is the released processor's `smart_resize` with its own pixel bounds; the long-side rule is the one of the
hosted API. Both end on multiples of 28 pixels (patch 14 times merge 2). Sides are those after the orientation was applied.
Knows nothing about formats, options of a request, or memory.
"""

import math

import msgspec

from server.errors import MediaError

PATCH = 14
MERGE = 2
FACTOR = PATCH * MERGE
TEMPORAL_PATCH = 2

MAX_ASPECT_RATIO = 200
MIN_LONG_SIDE_CAP = 112
MAX_LONG_SIDE_CAP = 3584
MAX_AREA_CAP = MAX_LONG_SIDE_CAP**2
MIN_SHORT_SIDE = 112
"""The long-side rule enlarges what is narrower, as far as its cap allows."""


class AreaRule(msgspec.Struct, frozen=True, tag="area"):
    """Keep the area within bounds.

    Attributes:
        min_pixels: a smaller result is enlarged to at least this area.
        max_pixels: a larger result is reduced to at most this area.
    """

    min_pixels: int
    max_pixels: int


class LongSideRule(msgspec.Struct, frozen=True, tag="long_side"):
    """Keep the longer side within `cap` pixels, a multiple of 28; the cap wins over the shortest short side."""

    cap: int


ResizeRule = AreaRule | LongSideRule

IMAGE_AREA = AreaRule(min_pixels=4 * FACTOR**2, max_pixels=672**2)
VIDEO_AREA = AreaRule(min_pixels=4 * FACTOR**2, max_pixels=768 * 784)
IMAGE_LONG_SIDE = LongSideRule(2016)
VIDEO_LONG_SIDE = LongSideRule(672)


class Size(msgspec.Struct, frozen=True):
    """Width and height in pixels."""

    width: int
    height: int


def long_side_rule(max_long_side_pixel: int) -> LongSideRule:
    """The rule for a client's cap; a cap between two multiples of 28 counts as the lower one.

    Raises:
        MediaError: the cap is outside 112..3584.
    """
    if not MIN_LONG_SIDE_CAP <= max_long_side_pixel <= MAX_LONG_SIDE_CAP:
        raise MediaError(f"max_long_side_pixel must be between {MIN_LONG_SIDE_CAP} and {MAX_LONG_SIDE_CAP} pixels.")
    return LongSideRule(max_long_side_pixel // FACTOR * FACTOR)


def area_rule(max_pixels: int) -> AreaRule:
    """The rule for a client's cap of the area.

    Raises:
        MediaError: the cap is outside 3136..12845056.
    """
    if not IMAGE_AREA.min_pixels <= max_pixels <= MAX_AREA_CAP:
        raise MediaError(f"max_pixels must be between {IMAGE_AREA.min_pixels} and {MAX_AREA_CAP} pixels.")
    return AreaRule(IMAGE_AREA.min_pixels, max_pixels)


def target_size(size: Size, rule: ResizeRule) -> Size:
    """The size that `size` is resized to under `rule`; both sides are multiples of 28.

    Slivers: the area rule has no lower bound on a side before it looks at the area, so a side that rounds to nothing makes
    the picture grow (400x2 becomes 812x28), as in the released processor; other engines clamp first. Under the long-side
    rule a narrow picture grows to a short side of 112 only as far as its long side stays within the cap.

    Raises:
        MediaError: an empty side, or one side more than 200 times the other.
    """
    long, short = max(size.width, size.height), min(size.width, size.height)
    if short < 1:
        raise MediaError("The picture has no pixels.")
    if long > MAX_ASPECT_RATIO * short:
        raise MediaError(f"The picture's longer side is more than {MAX_ASPECT_RATIO} times its shorter side.")
    return _by_area(size, rule) if isinstance(rule, AreaRule) else _by_long_side(size, rule)


def _by_area(size: Size, rule: AreaRule) -> Size:
    # round() is banker's rounding on purpose: 70 pixels are 2.5 units and become 2, as in the released processor.
    width, height = round(size.width / FACTOR) * FACTOR, round(size.height / FACTOR) * FACTOR
    if width * height > rule.max_pixels:
        shrink = math.sqrt(size.width * size.height / rule.max_pixels)
        width = max(FACTOR, math.floor(size.width / shrink / FACTOR) * FACTOR)
        height = max(FACTOR, math.floor(size.height / shrink / FACTOR) * FACTOR)
    elif width * height < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (size.width * size.height))
        width = math.ceil(size.width * grow / FACTOR) * FACTOR
        height = math.ceil(size.height * grow / FACTOR) * FACTOR
    return Size(width, height)


def _by_long_side(size: Size, rule: LongSideRule) -> Size:
    long, short = max(size.width, size.height), min(size.width, size.height)
    if long > rule.cap:
        numerator, denominator = rule.cap, long
    elif short < MIN_SHORT_SIDE:
        numerator, denominator = min((MIN_SHORT_SIDE, short), (rule.cap, long), key=lambda ratio: ratio[0] / ratio[1])
    else:
        numerator, denominator = 1, 1

    def scaled(side: int) -> int:
        return max(FACTOR, round(side * numerator / denominator / FACTOR) * FACTOR)

    return Size(scaled(size.width), scaled(size.height))


def grid_of(size: Size, num_frames: int = 1) -> tuple[int, int, int]:
    """`(t, h, w)`: temporal patches (an odd frame is paired with a copy of itself), patch rows, patch columns."""
    return -(-num_frames // TEMPORAL_PATCH), size.height // PATCH, size.width // PATCH


def num_tokens(grid_thw: tuple[int, int, int]) -> int:
    """Tokens in the language model: one for each 2x2 block of patches."""
    t, h, w = grid_thw
    return t * h * w // MERGE**2
