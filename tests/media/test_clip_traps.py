"""Clips that other servers show wrong or choke on: interlaced, HDR, anamorphic, giant and changing frames, covers.

Every clip is made here; what is expected of it is its size, its frames, its colours at two points and its prompt tokens.
"""

import io
import math
from fractions import Fraction

import av
import numpy as np
import pytest
from av.stream import Disposition

from server.errors import MediaError
from server.media.config import MAX_FRAME_PIXELS
from server.media.geometry import VIDEO_AREA, Size, grid_of, num_tokens
from server.media.image import plan_image
from tests.media.clips import SQUARE, clip, level
from tests.media.media_cards import RED, encode, halves
from tests.media.test_clip import SMALL, limits, shown

FIRST_GRAY = (level(0),) * 3
QUIET = {"log-level": "none"}


def first_frame(data):
    """The first frame as FFmpeg decodes it."""
    with av.open(io.BytesIO(data)) as container:
        return next(container.decode(video=0))


def assert_card(data, *, size, picks, tokens, within=12, **options):
    """The clip shows the card: gray at the centre and red in the corner of its first frame."""
    plan, frames = shown(data, **options)
    assert plan.size == size
    assert list(plan.picks) == picks
    assert num_tokens(grid_of(plan.size, len(plan.picks))) == tokens
    inside = SQUARE * size.height // 96 // 3
    for seen, expected in ((frames[0, size.height // 2, size.width // 2], FIRST_GRAY), (frames[0, inside, inside], RED)):
        assert np.abs(seen.astype(int) - expected).max() <= within
    return plan, frames


class TestColours:
    def test_interlaced_frames_are_shown_as_they_are_stored(self):
        data = clip(22, codec_options={"flags": "+ilme+ildct", "x264-params": "interlaced=1"})
        assert first_frame(data).interlaced_frame
        assert_card(data, size=Size(112, 84), picks=[0, 10, 20], tokens=24)

    @pytest.mark.parametrize(("transfer", "number"), [("smpte2084", 16), ("arib-std-b67", 18)], ids=["PQ", "HLG"])
    def test_hdr_keeps_its_levels(self, transfer, number):
        params = f"log-level=none:colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
        data = clip(12, codec="libx265", pix_fmt="yuv420p10le", codec_options={**QUIET, "x265-params": params})
        frame = first_frame(data)
        assert (frame.color_trc, frame.format.name) == (number, "yuv420p10le")
        _, frames = assert_card(data, size=Size(112, 84), picks=[0, 10], tokens=12)
        plain = clip(12, codec="libx265", pix_fmt="yuv420p10le", codec_options={**QUIET, "x265-params": "log-level=none"})
        _, untagged = shown(plain)
        assert np.abs(frames[0, 40:, 40:].astype(int) - untagged[0, 40:, 40:]).max() <= 2  # gray does not depend on the matrix

    def test_limited_and_full_range_are_told_apart(self):
        limited, full = (
            shown(clip(1, codec_options={"x264-params": f"fullrange={flag}"}))[1][0, 42, 56] for flag in ("off", "on")
        )
        assert np.abs(limited.astype(int) - FIRST_GRAY).max() <= 3
        # The card's level, written in limited range and read as full: 16 + 30 * 219 / 255.
        assert np.abs(full.astype(int) - (16 + level(0) * 219 // 255)).max() <= 3


class TestShapes:
    @pytest.mark.parametrize("ratio", [Fraction(4, 3), Fraction(3, 4), Fraction(1, 1)])
    @pytest.mark.parametrize("kind", ["mp4", "matroska"])
    def test_pixels_that_are_not_square_are_shown_as_they_are_stored(self, ratio, kind):
        data = clip(11, kind=kind, sample_aspect_ratio=ratio)
        with av.open(io.BytesIO(data)) as container:
            assert container.streams.video[0].sample_aspect_ratio == ratio
        assert_card(data, size=Size(112, 84), picks=[0, 10], tokens=12)

    def test_a_giant_frame_is_refused_by_its_header(self):
        data = clip(1, size=(8192, 8192), codec="mjpeg", kind="avi", pix_fmt="yuvj420p", picture=flat)
        assert math.prod((8192, 8192)) > MAX_FRAME_PIXELS
        with pytest.raises(MediaError, match=f"8192x8192 pixels; the limit is {MAX_FRAME_PIXELS}"):
            shown(data, limits=limits(max_frame_pixels=MAX_FRAME_PIXELS))

    def test_the_largest_frames_are_scaled_into_their_tokens(self):
        data = clip(1, size=(4096, 2304), codec="mjpeg", kind="avi", pix_fmt="yuvj420p", picture=flat)
        plan, frames = shown(data, rule=VIDEO_AREA, limits=limits(max_frame_pixels=MAX_FRAME_PIXELS))
        assert (plan.size, frames.shape[0]) == (Size(1008, 560), 1)
        assert num_tokens(grid_of(plan.size, 1)) == 720
        for seen in (frames[0, 0, 0], frames[0, -1, -1]):
            assert np.abs(seen.astype(int) - FIRST_GRAY).max() <= 3

    def test_frames_that_grow_beyond_the_limit_in_mid_stream_are_not_decoded(self):
        small = clip(20, kind="mpegts")
        large = clip(20, kind="mpegts", size=(1024, 768), pts=range(20, 40))
        plan, frames = shown(small + large, limits=limits(max_frame_pixels=128 * 96 * 2))
        assert plan.size == Size(112, 84)
        assert (frames[plan.picks.index(10)] == frames[-1]).all()  # what cannot be decoded shows the frame before it
        allowed = shown(small + large)[1]
        assert not (allowed[plan.picks.index(10)] == allowed[-1]).all()


def flat(number, width, height):
    return np.full((height, width, 3), level(number), np.uint8)


def mp4_with_cover(*, moving):
    """An MP4 with a cover, an attached picture, which is a video stream; and with a clip or with sound."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 200, 200, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        stream = container.add_stream("libx264" if moving else "aac", rate=10 if moving else 8000)
        if moving:
            stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        packet = av.Packet(encode(halves(200, 200), "JPEG"))
        packet.stream, packet.pts, packet.dts, packet.time_base = cover, 0, 0, Fraction(1, 1)
        container.start_encoding()
        container.mux(packet)
        if moving:
            source = clip(12)
            with av.open(io.BytesIO(source)) as clip_container:
                for frame in clip_container.decode(video=0):
                    frame.pict_type = 0
                    container.mux(stream.encode(frame))
        else:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            noise.sample_rate, noise.pts = 8000, 0
            container.mux(stream.encode(noise))
        container.mux(stream.encode(None))
    return buffer.getvalue()


class TestCovers:
    def test_the_cover_of_an_mp4_is_not_the_clip(self):
        data = mp4_with_cover(moving=True)
        with av.open(io.BytesIO(data)) as container:
            assert any(stream.disposition & Disposition.attached_pic for stream in container.streams.video)
        assert_card(data, size=Size(112, 84), picks=[0, 10], tokens=12)

    def test_music_with_a_cover_has_no_video(self):
        with pytest.raises(MediaError, match="no video stream"):
            shown(mp4_with_cover(moving=False))


class TestHeic:
    @pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"hevc"])
    def test_phone_pictures_are_refused_by_name(self, brand):
        head = (24).to_bytes(4, "big") + b"ftyp" + brand + bytes(4) + b"mif1" + brand
        for read in (lambda data: plan_image(data, SMALL, max_pixels=1 << 20), shown):
            with pytest.raises(MediaError, match="HEIC, which is not supported"):
                read(head + bytes(200))
