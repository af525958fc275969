"""Every kind of clip: which frames are shown, when, which way up; and what is refused."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from server.errors import MediaError
from server.media.clip import fill_clip, plan_clip
from server.media.clip_decoder import spans
from server.media.container import index_packets, opened
from server.media.geometry import VIDEO_AREA, Size, grid_of, long_side_rule
from server.media.sampling import FrameSampling
from server.media.types import ClipLimits
from tests.media.clips import SQUARE, clip, gray_levels, level, remuxed
from tests.media.media_cards import encode, halves

LIMITS = ClipLimits(max_frame_pixels=1 << 22, max_duration_s=3600, max_frames=2400, max_total_pixels=301_056_000)
SMALL = long_side_rule(112)


def shown(data, fps=1.0, *, rule=SMALL, limits=LIMITS, **sampling):
    """The plan of a clip and its frames, [F, H, W, 3]."""
    plan = plan_clip(data, rule, FrameSampling(fps, **sampling), limits)
    size, count = plan.size, len(plan.picks)
    out = np.full(count * size.height * size.width * 3, 99, np.uint8)
    fill_clip(data, size, plan.picks, max_frame_pixels=limits.max_frame_pixels, out=out)
    return plan, out.reshape(count, size.height, size.width, 3)


def assert_shows(data, picks, times_s, fps=1.0, **options):
    """`data` shows the frames with these numbers, and its temporal patches begin at these times."""
    plan, frames = shown(data, fps, **options)
    assert list(plan.picks) == picks
    assert gray_levels(frames) == [pick % 20 for pick in picks]
    assert plan.timestamps_s == pytest.approx(times_s, abs=1e-9)
    assert len(plan.timestamps_s) == grid_of(plan.size, len(picks))[0]
    return frames


def assert_refused(data, message, **options):
    with pytest.raises(MediaError, match=message) as caught:
        shown(data, **options)
    assert "Errno" not in caught.value.message


BASE = clip(35)


class TestContainersAndCodecs:
    @pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "avi", "mpegts", "flv"])
    def test_h264(self, kind):
        assert_shows(clip(30, kind=kind), [0, 5, 10, 15, 20, 25], [0, 1, 2], fps=2)

    @pytest.mark.parametrize(
        ("codec", "kind", "pix_fmt"),
        [
            ("libx265", "mp4", "yuv420p"),
            ("libvpx", "webm", "yuv420p"),
            ("libvpx-vp9", "webm", "yuv420p"),
            ("libsvtav1", "mp4", "yuv420p"),
            ("mjpeg", "avi", "yuvj420p"),
            ("prores_ks", "mov", "yuv422p10le"),
            ("qtrle", "mov", "rgb24"),
            ("mpeg2video", "mpegts", "yuv420p"),
        ],
    )
    def test_codecs(self, codec, kind, pix_fmt):
        rate = 25 if codec == "mpeg2video" else 10
        options = {"log-level": "none"} if codec == "libx265" else {}
        data = clip(12, codec=codec, kind=kind, pix_fmt=pix_fmt, rate=rate, codec_options=options)
        picks, times_s = ([0, 4, 8], [0, 0.8]) if rate == 10 else ([0, 10], [0])
        assert_shows(data, picks, times_s, fps=2.5)

    def test_a_gif_is_composed_frame_by_frame(self):
        frames = [halves(56, 56), halves(56, 56).rotate(180)]
        buffer = io.BytesIO()
        frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=500)
        _, pixels = shown(buffer.getvalue(), fps=2)
        assert [tuple(frame[50, 20]) for frame in pixels] == [(255, 0, 0), (0, 0, 255)]

    def test_an_old_avi_without_presentation_stamps(self):
        data = clip(30, kind="avi", codec="mpeg4", codec_options={"bf": "2", "qscale": "2", "flags": "+qscale"})
        plan, frames = shown(data, fps=2)
        assert plan.picks == (0, 5, 10, 15, 20, 25)
        assert np.abs(frames[:, 50, 50].mean(-1) - [level(pick) for pick in plan.picks]).max() < 25

    @pytest.mark.parametrize("pix_fmt", ["yuv420p10le", "yuv444p"])
    def test_pixel_formats(self, pix_fmt):
        frames = assert_shows(clip(12, pix_fmt=pix_fmt), [0, 10], [0])
        assert np.abs(frames[0, 4, 4].astype(int) - (255, 0, 0)).max() < 12

    def test_gray_clips_have_three_equal_channels(self):
        _, frames = shown(clip(12, pix_fmt="gray"))
        assert frames[1].mean() - frames[0].mean() > 60
        assert np.ptp(frames, axis=-1).max() == 0

    def test_odd_sides(self):
        assert_shows(clip(12, size=(101, 67), pix_fmt="yuv444p", kind="matroska"), [0, 10], [0])

    def test_transparency_lies_on_white(self):
        def glass(number, width, height):
            return np.dstack([np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.uint8)])

        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mov") as container:
            stream = container.add_stream("qtrle", rate=10)
            stream.width, stream.height, stream.pix_fmt = 56, 56, "argb"
            picture = av.VideoFrame.from_ndarray(glass(0, 56, 56), format="rgba").reformat(format="argb")
            container.mux(stream.encode(picture))
            container.mux(stream.encode(None))
        _, frames = shown(buffer.getvalue())
        assert (frames == 255).all()


class TestTime:
    def test_the_sampling_rate_and_the_last_frame(self):
        assert_shows(BASE, [0, 10, 20, 30], [0, 2])
        assert_shows(BASE, [0, 10, 20, 30, 34], [0, 2, 3.4], keep_last=True)
        assert_shows(
            BASE, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34], [0.4 * i for i in range(9)], fps=5
        )

    def test_thinning_keeps_the_first_and_the_last(self):
        assert_shows(BASE, [0, 20, 30], [0, 3], max_frames=3)
        assert_shows(BASE, [0], [0], max_frames=1)

    def test_a_varying_rate_is_sampled_in_time_and_stamped_with_it(self):
        stamps = [13 * number * number for number in range(20)]
        data = clip(20, kind="matroska", pts=stamps, time_base=Fraction(1, 1000))
        assert_shows(data, [0, 7, 10, 12, 14, 16, 18], [0, 1.3, 2.548, 4.212], fps=2)

    @pytest.mark.parametrize("kind", ["matroska", "mp4", "mpegts"])
    def test_time_starts_with_the_first_frame(self, kind):
        assert_shows(remuxed(clip(30), kind, shift_s=10), [0, 10, 20], [0, 2])

    def test_fragmented_and_live_files_have_no_index(self):
        data = clip(30, container_options={"movflags": "frag_keyframe+empty_moov"}, codec_options={"g": "10"})
        assert_shows(data, [0, 10, 20], [0, 2])
        assert_shows(clip(30, kind="webm", codec="libvpx-vp9", container_options={"live": "1"}), [0, 10, 20], [0, 2])

    @pytest.mark.parametrize("count", [1, 2])
    def test_one_and_two_frames(self, count):
        assert_shows(clip(count), [0], [0])
        assert_shows(clip(count), list(range(count)), [0], keep_last=True)

    @pytest.mark.parametrize(("rate", "picks"), [(240, [0, 240]), (1000, [0])])
    def test_high_rates(self, rate, picks):
        assert_shows(clip(300, rate=rate, size=(64, 64)), picks, [0])

    def test_a_slow_clip_gives_what_it_has(self):
        assert_shows(clip(4, rate=Fraction(1, 10), kind="matroska"), [0, 1, 2, 3], [0, 20])

    def test_the_edit_list_hides_frames_that_are_decoded_all_the_same(self):
        data = with_edit_start(clip(30), 5)
        plan, frames = shown(data, fps=1)
        assert plan.picks == (0, 10, 20)
        assert gray_levels(frames) == [5, 15, 5]


def with_edit_start(data, num_frames, rate=10):
    """Move the start of the mp4's one edit to frame `num_frames`."""
    at = data.index(b"elst") + 4
    version, count = data[at], struct.unpack_from(">I", data, at + 4)[0]
    assert (version, count) == (0, 1)
    duration, start = struct.unpack_from(">Ii", data, at + 8)
    at_mdhd = data.index(b"mdhd") + 4
    timescale = struct.unpack_from(">I", data, at_mdhd + 12)[0]
    moved = struct.pack(">Ii", duration - duration * num_frames // 30, start + timescale * num_frames // rate)
    return data[: at + 8] + moved + data[at + 16 :]


class TestOrientation:
    @pytest.mark.parametrize(("rotation", "corner"), [(0, (0, 0)), (90, (1, 0)), (180, (1, 1)), (270, (0, 1))])
    def test_phones_turn_their_pictures_by_a_matrix(self, rotation, corner):
        plan, frames = shown(clip(5, rotation=rotation))
        assert plan.size == (Size(84, 112) if rotation % 180 else Size(112, 84))
        bottom, right = corner
        inside = SQUARE // 3
        seen = frames[0][-inside if bottom else inside, -inside if right else inside]
        assert seen[0] > 200
        assert seen[1:].max() < 60


class TestDecoding:
    """Savings never change a pixel: frames are those of a plain, complete decoding."""

    @pytest.mark.parametrize(
        "options",
        [
            {"g": "250"},
            {"g": "12"},
            {"g": "12", "x264-params": "open-gop=1:bframes=3"},
            {"x264-params": "intra-refresh=1:bframes=0:keyint=15"},
            {"g": "1"},
        ],
        ids=["one group", "groups", "open groups", "no keyframes", "only keyframes"],
    )
    @pytest.mark.parametrize("fps", [0.4, 1, 5])
    def test_frames_are_those_of_a_complete_decoding(self, options, fps):
        def noisy(number, width, height):
            return np.random.default_rng(number // 3).integers(0, 256, (height, width, 3), np.uint8)

        data = clip(60, size=(112, 84), picture=noisy, codec_options=options)
        plan, frames = shown(data, fps)
        with av.open(io.BytesIO(data)) as container:
            complete = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert plan.size == Size(112, 84)
        assert np.array_equal(frames, np.stack([complete[pick] for pick in plan.picks]))

    def test_groups_without_a_wanted_frame_are_not_decoded(self):
        with opened(clip(60, codec_options={"g": "10", "bf": "0", "sc_threshold": "0"}), LIMITS.max_frame_pixels) as (
            container,
            stream,
        ):
            index = index_packets(container, stream)
            assert spans(index.packets, {index.stamps[25], index.stamps[40]}) == [(20, 26), (40, 41)]
            assert spans(index.packets, {index.stamps[29], index.stamps[30]}) == [(20, 31)]

    def test_cancelling_ends_it_between_packets(self):
        asked = []
        plan = plan_clip(BASE, SMALL, FrameSampling(1), LIMITS)
        out = np.empty(len(plan.picks) * plan.size.width * plan.size.height * 3, np.uint8)
        with pytest.raises(MediaError, match="cancelled"):
            fill_clip(
                BASE,
                plan.size,
                plan.picks,
                max_frame_pixels=1 << 22,
                out=out,
                is_cancelled=lambda: asked.append(1) or len(asked) == 7,
            )
        assert len(asked) == 7


def with_zeroed_frames(data, numbers):
    """An AVI file with the bytes of some frames zeroed."""
    data = bytearray(data)
    at, starts = data.index(b"movi") + 4, []
    while data[at : at + 4] == b"00dc":
        starts.append(at + 8)
        at += 8 + struct.unpack_from("<I", data, at + 4)[0] + 1 & ~1
    for number in numbers:
        num_bytes = struct.unpack_from("<I", data, starts[number] - 4)[0]
        data[starts[number] : starts[number] + num_bytes] = bytes(num_bytes)
    return bytes(data)


class TestDamage:
    def test_a_file_without_its_index_is_refused(self):
        assert_refused(BASE[: len(BASE) // 2], "corrupt, incomplete")

    def test_what_is_there_of_a_cut_file_is_shown(self):
        data = remuxed(BASE, "matroska")
        plan, frames = shown(data[: len(data) * 2 // 3])
        assert 1 <= len(plan.picks) <= 3
        assert gray_levels(frames) == [pick % 20 for pick in plan.picks]

    @pytest.mark.parametrize(("broken", "levels"), [([20], [0, 10, 10, 10]), ([0, 10], [0, 0, 0, 10])])
    def test_a_broken_frame_shows_the_one_before_or_the_first_good_one(self, broken, levels):
        plan, frames = shown(with_zeroed_frames(clip(40, kind="avi", codec="mjpeg", pix_fmt="yuvj420p"), broken))
        assert plan.picks == (0, 10, 20, 30)
        assert gray_levels(frames) == levels

    def test_mostly_broken_frames_are_refused(self):
        data = clip(40, kind="avi", codec="mjpeg", pix_fmt="yuvj420p")
        assert_refused(with_zeroed_frames(data, range(1, 40)), "corrupt or incomplete")
        assert_refused(with_zeroed_frames(data, range(40)), "corrupt or incomplete")

    def test_no_video(self):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as container:
            sound = container.add_stream("aac", rate=8000, layout="mono")
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            noise.sample_rate = 8000
            container.mux(sound.encode(noise))
            container.mux(sound.encode(None))
        assert_refused(buffer.getvalue(), "no video stream")

    def test_a_cover_is_not_the_clip(self):
        cover = encode(halves(200, 200), "JPEG")
        assert_shows(clip(12, kind="matroska", cover=cover), [0, 10], [0])


class TestRefusals:
    @pytest.mark.parametrize(
        "data",
        [
            b"ffconcat version 1.0\nfile base.mp4\n",
            b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nbase.ts\n",
            b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
            b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
            bytes(5000),
            b"abc" * 1000,
        ],
        ids=["concat", "m3u8", "sdp", "dash", "zeros", "text"],
    )
    def test_what_is_no_clip(self, data, tmp_path, monkeypatch):
        (tmp_path / "base.mp4").write_bytes(BASE)
        (tmp_path / "base.ts").write_bytes(remuxed(BASE, "mpegts"))
        monkeypatch.chdir(tmp_path)
        assert_refused(data, "unsupported type")

    def test_a_raw_stream_is_refused(self):
        assert_refused(remuxed(BASE, "h264"), "unsupported type")

    def test_empty_and_other_files_by_name(self):
        assert_refused(b"", "empty")
        assert_refused(encode(halves(), "PNG"), "PNG")
        assert_refused(b"<!doctype html><p>404", "HTML")

    def test_codecs_outside_the_list_by_name(self):
        assert_refused(clip(5, kind="matroska", codec="ffv1"), "ffv1")

    def test_budgets(self):
        assert_refused(BASE, "frames have 128x96 pixels", limits=limits(max_frame_pixels=1000))
        assert_refused(BASE, "3 seconds long; the limit is 2", limits=limits(max_duration_s=2.0))
        assert_refused(BASE, "gives 4 frames; the limit is 3", limits=limits(max_frames=3))
        assert_refused(BASE, "37632 pixels in all", limits=limits(max_total_pixels=37_000))
        assert_shows(BASE, [0, 20, 30], [0, 3], limits=limits(max_frames=3), max_frames=3)

    def test_three_hours_are_judged_by_their_packets(self):
        data = clip(10_900, rate=1, size=(64, 64), codec_options={"preset": "ultrafast", "g": "1000"})
        assert_refused(data, "10899 seconds long; the limit is 3600", rule=VIDEO_AREA)

    def test_slivers(self):
        assert_refused(clip(2, size=(16, 3600), codec="mjpeg", kind="avi", pix_fmt="yuvj420p"), "more than 200 times")


def limits(**changes):
    return ClipLimits(**{name: changes.get(name, getattr(LIMITS, name)) for name in LIMITS.__struct_fields__})


def test_the_content_hash_tells_size_frames_and_bytes_apart():
    def content(data, rule=SMALL, **sampling):
        return plan_clip(data, rule, FrameSampling(**{"fps": 1.0, **sampling}), LIMITS).content_hash

    hashes = [
        content(BASE),
        content(BASE, VIDEO_AREA),
        content(BASE, fps=2.0),
        content(BASE, keep_last=True),
        content(clip(36)),
    ]
    assert len(set(hashes)) == 5
    assert content(BASE, max_frames=100) == hashes[0]
