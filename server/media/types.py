"""What the rest of the front says to the media pipeline and hears from it."""

import dataclasses
import enum

import msgspec

from server.media.geometry import IMAGE_AREA, IMAGE_LONG_SIDE, ResizeRule, Size, long_side_rule
from server.messages import MediaKind


class ResizePolicy(enum.StrEnum):
    """Which rule a picture follows when its request does not choose."""

    AREA = "area"
    LONG_SIDE = "long_side"


class Detail(enum.StrEnum):
    """OpenAI's `detail`: the two rules that the model knows, by cost; `auto` is the server's own."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


@dataclasses.dataclass(frozen=True)
class MediaOptions:
    """What a request may say about one item's pixels.

    Attributes:
        max_long_side_pixel: cap of the longer side, 112..3584; wins over `detail`.
        detail: `low` is at most 576 tokens, `high` a long side of at most 2016 pixels.
    """

    max_long_side_pixel: int | None = None
    detail: Detail = Detail.AUTO


@dataclasses.dataclass(frozen=True)
class MediaSource:
    """One item as it came in.

    Attributes:
        kind: picture or clip.
        data: the encoded file.
        options: of this item.
        param: request field to name in errors.
    """

    kind: MediaKind
    data: bytes = dataclasses.field(repr=False)
    options: MediaOptions = MediaOptions()
    param: str | None = None


class ImagePlan(msgspec.Struct, frozen=True, tag="image_plan"):
    """What a picture becomes.

    Attributes:
        size: pixels after orientation and resize.
        grid_thw: (1, rows, columns) of patches.
        num_tokens: tokens in the language model.
        num_bytes: size of its patches.
        content_hash: 32 bytes over the encoded bytes and everything that decides the pixels.
    """

    size: Size
    grid_thw: tuple[int, int, int]
    num_tokens: int
    num_bytes: int
    content_hash: bytes


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What an item will become, known before a pixel is decoded.

    Attributes:
        kind: picture or clip.
        content_hash: 32 bytes over the encoded file and everything that decides the pixels.
        grid_thw: temporal patches, patch rows, patch columns.
        num_tokens: tokens in the language model.
        num_bytes: size of its patches in the slab.
        size: pixels after the resize.
        source: what was planned.
    """

    kind: MediaKind
    content_hash: bytes
    grid_thw: tuple[int, int, int]
    num_tokens: int
    num_bytes: int
    size: Size
    source: MediaSource


def image_rule(options: MediaOptions, default: ResizePolicy) -> ResizeRule:
    """The rule for one picture.

    Raises:
        MediaError: `max_long_side_pixel` is out of range.
    """
    if options.max_long_side_pixel is not None:
        return long_side_rule(options.max_long_side_pixel)
    policy = {Detail.AUTO: default, Detail.LOW: ResizePolicy.AREA, Detail.HIGH: ResizePolicy.LONG_SIDE}[options.detail]
    return IMAGE_AREA if policy is ResizePolicy.AREA else IMAGE_LONG_SIDE
