"""One encoded clip, opened and indexed without decoding it.

FFmpeg is told which containers it may recognise and that it may open nothing but the bytes it is given: by default a text
that names a local file counts as a video, and its file is read. Belongs in a worker process. Whatever the demuxer raises
becomes a `MediaError` with a text of our own.
"""

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from fractions import Fraction

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from server.errors import MediaError
from server.media.sampling import frame_times
from server.media.sniff import sniff

DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,flv,gif,mpeg,asf,ogg"
CONTAINERS = "MP4, MOV, MKV, WebM, AVI, MPEG-TS, FLV or GIF"
CODECS = frozenset(
    (
        *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "mpeg1video"),
        *("mpeg2video", "mpeg4", "msmpeg4v2", "msmpeg4", "h263", "flv", "wmv1", "wmv2", "wmv3"),
        *("vc1", "mjpeg", "gif", "prores", "qtrle", "theora", "rawvideo"),
    )
)
MAX_PACKETS = 2_000_000
"""Two and a half hours at 240 frames per second; a scan of so many takes seconds."""

_NOT_CLIPS = frozenset(("HTML", "SVG", "PDF", "PostScript", "WMF", "PSD", "JPEG", "PNG", "WEBP", "BMP", "TIFF", "ICO"))
_OPTIONS = {"format_whitelist": DEMUXERS, "protocol_whitelist": "none"}


@dataclasses.dataclass(frozen=True)
class ClipIndex:
    """What a pass over a clip's packets tells.

    Attributes:
        packets: of the video stream, in decoding order.
        stamps: what tells a frame from the others, in display order: its presentation stamp, or its number where the
            container has none.
        times_s: when each frame is shown, from 0.
        has_stamps: whether `stamps` are presentation stamps.
    """

    packets: list[av.Packet]
    stamps: list[int]
    times_s: list[float]
    has_stamps: bool


@contextlib.contextmanager
def opened(data: bytes, max_frame_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its one video stream, whose decoder is single-threaded and refuses larger frames.

    Raises:
        MediaError: not an accepted clip; also for any fault of FFmpeg's while it is in use.
    """
    found = sniff(data)
    if found == "empty":
        raise MediaError("The video is empty.")
    if found in _NOT_CLIPS or found in ("HEIC", "AVIF", "JPEG XL", "JPEG 2000"):
        raise MediaError(f"The video is {found}, which is not supported; send {CONTAINERS}.")
    try:
        # Titles and the like may be in any encoding; nobody reads them here.
        with av.open(io.BytesIO(data), options=dict(_OPTIONS), metadata_errors="replace") as container:
            assert isinstance(container, InputContainer)
            stream = _video_stream(container)
            _check_codec(stream, max_frame_pixels)
            yield container, stream
    except MediaError:
        raise
    except MemoryError:
        raise MediaError("Decoding the video takes more memory than one video may use.") from None
    except (av.FFmpegError, ValueError, OverflowError, EOFError):
        raise MediaError(f"The video is corrupt, incomplete or of an unsupported type; send {CONTAINERS}.") from None


def _video_stream(container: InputContainer) -> VideoStream:
    """The best stream that is a moving picture; a cover is stored as a video stream, too."""
    moving = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not moving:
        raise MediaError("The file has no video stream.")
    best = container.streams.best("video")
    return next((stream for stream in moving if best is not None and stream.index == best.index), moving[0])


def _check_codec(stream: VideoStream, max_frame_pixels: int) -> None:
    context = stream.codec_context
    if context is None:
        raise MediaError("The video's codec is not supported.")
    if context.name not in CODECS:
        raise MediaError(f"The video's codec {context.name} is not supported.")
    if context.width * context.height > max_frame_pixels:
        size = f"{context.width}x{context.height}"
        raise MediaError(f"The video's frames have {size} pixels; the limit is {max_frame_pixels} pixels.")
    context.options = {"max_pixels": str(max_frame_pixels)}
    context.thread_type = "NONE"
    context.thread_count = 1


def index_packets(container: InputContainer, stream: VideoStream) -> ClipIndex:
    """Read all packets; what comes after the first one that cannot be read is not there.

    Raises:
        MediaError: no frames, too many, or no way to tell when they are.
    """
    packets: list[av.Packet] = []
    try:
        for packet in container.demux(stream):
            if packet.size:
                packets.append(packet)
            if len(packets) > MAX_PACKETS:
                raise MediaError(f"The video has more than {MAX_PACKETS} frames.")
    except av.FFmpegError:
        pass  # cut off or damaged: what was read may still be shown
    shown = [packet for packet in packets if not packet.is_discard]
    if not shown:
        raise MediaError("The video has no frames.")
    time_base = stream.time_base
    rates = [Fraction(rate) for rate in (stream.average_rate, stream.guessed_rate) if rate]
    stamps = sorted({packet.pts for packet in shown if packet.pts is not None})
    if time_base and all(packet.pts is not None for packet in shown):
        return ClipIndex(packets, stamps, frame_times(stamps, Fraction(time_base), rates), has_stamps=True)
    if not rates:
        raise MediaError("The video does not tell when its frames are shown.")
    # Old AVI files number their frames by position only; they have a constant rate.
    times_s = [float(number / rates[0]) for number in range(len(shown))]
    return ClipIndex(packets, list(range(len(shown))), times_s, has_stamps=False)
