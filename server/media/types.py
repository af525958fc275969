"""What the rest of the front says to the media pipeline and hears from it."""

import dataclasses
import enum

import msgspec

from server.errors import MediaError
from server.media.geometry import (
    IMAGE_AREA,
    IMAGE_LONG_SIDE,
    VIDEO_AREA,
    VIDEO_LONG_SIDE,
    ResizeRule,
    Size,
    area_rule,
    grid_of,
    long_side_rule,
    num_tokens,
)
from server.media.sampling import MAX_FPS, MIN_FPS, FrameSampling
from server.messages import MediaKind
from server.settings import ResizePolicy


class Detail(enum.StrEnum):
    """OpenAI's `detail`: the two rules that the model knows, by cost; `auto` is the server's own."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


@dataclasses.dataclass(frozen=True)
class MediaOptions:
    """What a request may say about one item's pixels.

    Attributes:
        max_long_side_pixel: cap of the longer side, 112..3584; wins over everything else.
        detail: for pictures `low` is at most 576 tokens and `high` a long side of at most 2016 pixels; for the frames of
            clips `low` is a long side of at most 672 pixels and `high` at most 768 tokens.
        max_pixels: cap of the area, for a clip of each frame; wins over `detail`.
        fps: of a clip, frames per second to take.
        max_frames: of a clip, frames to take at most, evenly thinned.
    """

    max_long_side_pixel: int | None = None
    detail: Detail = Detail.AUTO
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None


@dataclasses.dataclass(frozen=True)
class MediaSource:
    """One item as it came in.

    Attributes:
        kind: picture or clip.
        data: the encoded file; empty when `url` says where it is, until it was fetched.
        options: of this item.
        param: request field to name in errors.
        url: http, https or file address to get the file from; None when it came with the request.
    """

    kind: MediaKind
    data: bytes = dataclasses.field(default=b"", repr=False)
    options: MediaOptions = MediaOptions()
    param: str | None = None
    url: str | None = dataclasses.field(default=None, repr=False)

    def with_data(self, data: bytes) -> "MediaSource":
        """The same item with another encoded file."""
        return dataclasses.replace(self, data=data)


class ClipLimits(msgspec.Struct, frozen=True):
    """What a clip may cost.

    Attributes:
        max_frame_pixels: width times height of a frame as it is stored.
        max_duration_s: time from the first frame to the last.
        max_frames: frames that are taken.
        max_total_pixels: width times height after the resize, times the frames that are taken.
    """

    max_frame_pixels: int
    max_duration_s: float
    max_frames: int
    max_total_pixels: int


class ImagePlan(msgspec.Struct, frozen=True, tag="image_plan"):
    """What a picture becomes.

    Attributes:
        size: pixels after orientation and resize.
        content_hash: 32 bytes over the encoded bytes and everything that decides the pixels.
    """

    size: Size
    content_hash: bytes


class ClipPlan(msgspec.Struct, frozen=True, tag="clip_plan"):
    """What a clip becomes.

    Attributes:
        size: pixels of a frame, after rotation and resize.
        content_hash: 32 bytes over the encoded bytes and everything that decides the pixels.
        picks: positions of the chosen frames among all, in display order.
        timestamps_s: when each temporal patch begins, from the clip's first frame.
    """

    size: Size
    content_hash: bytes
    picks: tuple[int, ...]
    timestamps_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What an item will become, known before its pixels are decoded.

    Attributes:
        kind: picture or clip.
        content_hash: 32 bytes over the encoded file and everything that decides the pixels.
        size: pixels after the resize.
        picks: of a clip, positions of the chosen frames; (0,) for a picture.
        timestamps_s: of a clip, when each temporal patch begins; None for a picture.
        source: what was planned.
    """

    kind: MediaKind
    content_hash: bytes
    size: Size
    picks: tuple[int, ...]
    timestamps_s: tuple[float, ...] | None
    source: MediaSource

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Temporal patches, patch rows, patch columns."""
        return grid_of(self.size, len(self.picks))

    @property
    def num_tokens(self) -> int:
        """Tokens in the language model, marks and time stamps not counted."""
        return num_tokens(self.grid_thw)

    @property
    def frame_bytes(self) -> int:
        """Size of one frame in the slab, RGB uint8."""
        return self.size.width * self.size.height * 3

    @property
    def num_bytes(self) -> int:
        """Size of all frames in the slab."""
        return len(self.picks) * self.frame_bytes


def image_rule(options: MediaOptions, default: ResizePolicy) -> ResizeRule:
    """The rule for one picture.

    Raises:
        MediaError: an option is out of range, or one for clips.
    """
    if options.fps is not None or options.max_frames is not None:
        raise MediaError("fps and max_frames are for videos.")
    policy = {Detail.AUTO: default, Detail.LOW: ResizePolicy.AREA, Detail.HIGH: ResizePolicy.LONG_SIDE}[options.detail]
    return _given_rule(options) or (IMAGE_AREA if policy is ResizePolicy.AREA else IMAGE_LONG_SIDE)


def clip_rule(options: MediaOptions, default: ResizePolicy) -> ResizeRule:
    """The rule for the frames of one clip.

    Raises:
        MediaError: an option is out of range.
    """
    policy = {Detail.AUTO: default, Detail.LOW: ResizePolicy.LONG_SIDE, Detail.HIGH: ResizePolicy.AREA}[options.detail]
    return _given_rule(options) or (VIDEO_AREA if policy is ResizePolicy.AREA else VIDEO_LONG_SIDE)


def _given_rule(options: MediaOptions) -> ResizeRule | None:
    if options.max_long_side_pixel is not None:
        return long_side_rule(options.max_long_side_pixel)
    return None if options.max_pixels is None else area_rule(options.max_pixels)


def clip_sampling(options: MediaOptions, default_fps: float, *, keep_last: bool) -> FrameSampling:
    """Which frames of one clip are taken.

    Raises:
        MediaError: an option is out of range.
    """
    fps = default_fps if options.fps is None else options.fps
    if not MIN_FPS <= fps <= MAX_FPS:
        raise MediaError(f"fps must be between {MIN_FPS:g} and {MAX_FPS:g}.")
    if options.max_frames is not None and options.max_frames < 1:
        raise MediaError("max_frames must be at least 1.")
    return FrameSampling(fps, keep_last, options.max_frames)
