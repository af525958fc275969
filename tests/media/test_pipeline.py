import asyncio
import contextlib
import os
import random
import signal

import numpy as np
import pytest
from PIL import Image

from server.errors import EngineUnavailableError, MediaError, OverloadedError
from server.media import pipeline as pipeline_module
from server.media.config import FetchConfig, MediaConfig
from server.media.geometry import IMAGE_AREA
from server.media.image import fill_image
from server.media.pipeline import MediaPipeline
from server.media.slab import SlabReader
from server.media.slab_file import GRANULE_BYTES
from server.media.types import ClipLimits, Detail, MediaOptions, MediaSource, ResizePolicy
from server.messages import MediaKind
from server.settings import Settings
from tests.media.clips import clip, gray_levels
from tests.media.media_cards import BLUE, RED, encode, halves, picture, run

CARD = encode(Image.fromarray(picture(200, 150, seed=2)), "PNG")


@contextlib.asynccontextmanager
async def running(spawner, **options):
    pipeline = MediaPipeline(MediaConfig(**{"num_workers": 1, "slab_bytes": 4 << 20, **options}), spawner)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


def source(data=CARD, *, param=None, **options):
    return MediaSource(MediaKind.IMAGE, data, MediaOptions(**options), param)


async def all_free(pipeline):
    """Wait until every granule has come back: only then does a request for all of them go through."""
    for ref in await pipeline.slab.allocate([pipeline.slab.capacity_bytes]):
        pipeline.slab.free(ref)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_the_engine_reads_the_pixels_that_the_plan_announced(spawner):
    async def main():
        async with running(spawner, num_workers=2) as pipeline:
            data = [encode(Image.fromarray(picture(width, 90, seed=width)), "PNG") for width in (60, 200, 333)]
            plans = await pipeline.plan([source(item) for item in data])
            lease = await pipeline.load(plans)
            reader = SlabReader(pipeline.slab_name)
            for item, plan, ref in zip(data, plans, lease.refs, strict=True):
                expected = np.empty(plan.num_bytes, np.uint8)
                fill_image(item, plan.size, max_pixels=1 << 26, out=expected)
                t, h, w = plan.grid_thw
                assert ref.num_bytes == plan.num_bytes == t * h * w * 3 * 14 * 14
                assert plan.num_tokens == t * h * w // 4
                assert np.array_equal(reader.read(ref), expected)
            reader.close()
            lease.release()
            lease.release()
            assert pipeline.slab.free_bytes == pipeline.slab.capacity_bytes

    run(main())


def test_a_request_without_media_takes_nothing(spawner):
    async def main():
        async with running(spawner) as pipeline:
            lease = await pipeline.load(await pipeline.plan([]))
            assert lease.refs == ()
            lease.release()

    run(main())


def test_options_choose_the_size_and_change_the_content_hash(spawner):
    async def main():
        data = encode(Image.new("RGB", (1920, 1080)), "PNG")
        async with running(spawner) as pipeline:
            plans = await pipeline.plan(
                [
                    source(data),
                    source(data, detail=Detail.LOW),
                    source(data, detail=Detail.HIGH),
                    source(data, max_long_side_pixel=504),
                    source(data, max_long_side_pixel=1008, detail=Detail.LOW),
                ]
            )
            assert [plan.num_tokens for plan in plans] == [576, 576, 2691, 180, 720]
            assert len({plan.content_hash for plan in plans}) == 4
        async with running(spawner, policy=ResizePolicy.LONG_SIDE) as pipeline:
            (plan,) = await pipeline.plan([source(data)])
            assert plan.num_tokens == 2691

    run(main())


def test_the_first_item_at_fault_is_named_and_the_others_are_let_go(spawner):
    async def main():
        async with running(spawner) as pipeline:
            items = [source(param="first"), source(b"junk", param="second"), source(b"%PDF", param="third"), source()]
            with pytest.raises(MediaError) as caught:
                await pipeline.plan(items)
            assert caught.value.param == "second"
            for wrong, message in (
                (source(max_long_side_pixel=5, param="x"), "between 112 and 3584"),
                (source(bytes((30 << 20) + 1), param="x"), "limit is 31457280"),
                (source(b"", param="x"), "empty"),
                (MediaSource(MediaKind.VIDEO, b"", param="x"), "empty"),
                (MediaSource(MediaKind.VIDEO, b"", MediaOptions(fps=100), "x"), "fps must be between 0.2 and 5"),
                (source(fps=1.0, param="x"), "for videos"),
                (source(max_pixels=100, param="x"), "max_pixels must be between"),
            ):
                with pytest.raises(MediaError, match=message) as caught:
                    await pipeline.plan([source(), wrong])
                assert caught.value.param == "x"

    run(main())


def test_200_pictures_in_one_request_and_not_one_more(spawner):
    async def main():
        async with running(spawner, num_workers=2, slab_bytes=200 * GRANULE_BYTES) as pipeline:
            tiny = encode(halves(28, 28), "PNG")
            lease = await pipeline.load(await pipeline.plan([source(tiny)] * 200))
            assert len(set(lease.refs)) == 200
            lease.release()
            with pytest.raises(MediaError, match="201 pictures; the limit is 200"):
                await pipeline.plan([source(tiny)] * 201)

    run(main())


def test_a_picture_whose_pixels_are_broken_gives_all_memory_back(spawner):
    async def main():
        noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8))
        cut = encode(noise, "JPEG")[:-3000]
        async with running(spawner) as pipeline:
            plans = await pipeline.plan([source(), source(cut, param="cut"), source()])
            with pytest.raises(MediaError, match="truncated") as caught:
                await pipeline.load(plans)
            assert caught.value.param == "cut"
            await all_free(pipeline)

    run(main())


def test_media_larger_than_the_slab_are_refused_and_smaller_ones_wait_their_turn(spawner):
    async def main():
        async with running(spawner, slab_bytes=1 << 20) as pipeline:
            (large,) = await pipeline.plan([source(encode(Image.new("RGB", (1000, 1000)), "PNG"))])
            with pytest.raises(MediaError, match="room for 1048576"):
                await pipeline.load([large])
            (middle,) = await pipeline.plan([source(encode(Image.new("RGB", (504, 504)), "PNG"))])
            first = await pipeline.load([middle])
            second = asyncio.create_task(pipeline.load([middle]))
            await until(lambda: pipeline.slab.num_waiting == 1)
            first.release()
            (await second).release()
            await all_free(pipeline)

    run(main())


def test_a_worker_killed_while_it_fills_does_not_show(spawner):
    async def main():
        async with running(spawner) as pipeline:
            plans = await pipeline.plan([source(encode(halves(), "PNG"))])
            (pid,) = pipeline.pool.pids
            os.kill(pid, signal.SIGSTOP)
            loading = asyncio.create_task(pipeline.load(plans))
            await until(lambda: pipeline.slab.free_bytes < pipeline.slab.capacity_bytes and not pipeline.pool.num_queued)
            os.kill(pid, signal.SIGKILL)
            lease = await loading
            reader = SlabReader(pipeline.slab_name)
            size = plans[0].size
            pixels = reader.read(lease.refs[0]).reshape(size.height, size.width, 3)
            assert np.abs(pixels[3, 3].astype(int) - RED).max() <= 2
            assert np.abs(pixels[-3, -3].astype(int) - BLUE).max() <= 2
            del pixels
            reader.close()
            assert pipeline.stats().worker_deaths_total == 1

    run(main())


def test_memory_of_a_cancelled_request_stays_lent_as_long_as_a_worker_may_write_to_it(spawner):
    async def main():
        async with running(spawner) as pipeline:
            plans = await pipeline.plan([source(), source()])
            (pid,) = pipeline.pool.pids
            os.kill(pid, signal.SIGSTOP)
            loading = asyncio.create_task(pipeline.load(plans))
            await until(lambda: pipeline.pool.num_queued == 1)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            one = -(-plans[0].num_bytes // GRANULE_BYTES) * GRANULE_BYTES
            assert pipeline.slab.free_bytes == pipeline.slab.capacity_bytes - one  # the queued one's is back
            os.kill(pid, signal.SIGCONT)
            await all_free(pipeline)

    run(main())


def test_random_cancellations_and_kills_leak_nothing(spawner):
    async def main():
        rng = random.Random(5)
        bad = CARD[: len(CARD) // 2]
        async with running(spawner, num_workers=2, slab_bytes=20 * GRANULE_BYTES) as pipeline:
            good_plans = await pipeline.plan([source(), source(bad)])

            async def request():
                lease = await pipeline.load(rng.choices(good_plans, weights=(5, 1), k=rng.randint(1, 2)))
                try:
                    await asyncio.sleep(0)
                finally:
                    lease.release()

            for round_number in range(12):
                tasks = [asyncio.create_task(request()) for _ in range(rng.randint(1, 5))]
                for task in tasks:
                    for _ in range(rng.randint(0, 30)):
                        await asyncio.sleep(0)
                    if rng.random() < 0.4:
                        task.cancel()
                if round_number % 4 == 3 and pipeline.pool.pids:
                    os.kill(rng.choice(pipeline.pool.pids), signal.SIGKILL)
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(end is None or isinstance(end, MediaError | asyncio.CancelledError) for end in ends)
            await all_free(pipeline)

    run(main())


def test_closing_fails_what_is_open_and_a_lease_may_still_be_released(spawner):
    async def main():
        async with running(spawner) as pipeline:
            plans = await pipeline.plan([source()])
            lease = await pipeline.load(plans)
            os.kill(pipeline.pool.pids[0], signal.SIGSTOP)
            loading = asyncio.create_task(pipeline.load(plans))
            await until(lambda: pipeline.slab.free_bytes < pipeline.slab.capacity_bytes - lease.refs[0].num_bytes * 2)
            await pipeline.close()
            with pytest.raises(EngineUnavailableError):
                await loading
            lease.release()

    run(main())


def test_the_configuration_follows_the_servers_settings(tmp_path):
    settings = Settings(
        model=tmp_path, media_workers=3, media_slab_bytes=1 << 20, media_task_timeout_s=2.5, max_images=7, max_image_bytes=99
    )
    config = MediaConfig.from_settings(settings)
    assert (config.num_workers, config.slab_bytes, config.task_timeout_s) == (3, 1 << 20, 2.5)
    assert (config.max_images, config.max_image_bytes) == (7, 99)
    assert 1 <= MediaConfig.from_settings(Settings(model=tmp_path)).num_workers <= 8


CLIP = clip(70)


def clip_source(data=CLIP, *, param=None, **options):
    return MediaSource(MediaKind.VIDEO, data, MediaOptions(**options), param)


def test_a_clip_is_decoded_in_parts_by_several_workers(spawner, monkeypatch):
    monkeypatch.setattr(pipeline_module, "PART_FRAMES", 3)

    async def main():
        async with running(spawner, num_workers=2) as pipeline:
            (plan,) = await pipeline.plan([clip_source()])
            assert plan.picks == (0, 10, 20, 30, 40, 50, 60)
            assert plan.grid_thw == (4, 6, 10)
            assert plan.timestamps_s == (0, 2, 4, 6)
            tasks = pipeline.stats().tasks_total
            lease = await pipeline.load([plan])
            assert pipeline.stats().tasks_total - tasks == 3
            reader = SlabReader(pipeline.slab_name)
            frames = reader.read(lease.refs[0]).reshape(7, 84, 140, 3)
            assert gray_levels(frames) == [0, 10, 0, 10, 0, 10, 0]
            del frames
            reader.close()
            lease.release()
            assert pipeline.slab.free_bytes == pipeline.slab.capacity_bytes
            stats = pipeline.stats()
            assert (stats.clips_total, stats.frames_total, stats.pictures_total) == (1, 7, 0)
            assert stats.encoded_bytes_total == len(CLIP)
            assert stats.decode_cpu_seconds_total > 0

    run(main())


def test_options_choose_frames_and_their_size(spawner):
    async def main():
        wide = clip(35, size=(1280, 720), codec_options={"preset": "ultrafast"})
        async with running(spawner) as pipeline:
            plans = await pipeline.plan(
                [
                    clip_source(wide),
                    clip_source(wide, detail=Detail.LOW),
                    clip_source(wide, max_long_side_pixel=504),
                    clip_source(wide, max_pixels=200_000),
                    clip_source(wide, fps=5.0, max_frames=3),
                ]
            )
            assert [(plan.grid_thw, plan.num_tokens) for plan in plans] == [
                ((2, 40, 72), 1440),
                ((2, 28, 48), 672),
                ((2, 20, 36), 360),
                ((2, 22, 42), 462),
                ((2, 40, 72), 1440),
            ]
            assert plans[-1].picks == (0, 18, 34)
        async with running(spawner, policy=ResizePolicy.LONG_SIDE, video_fps=2.0, keep_last=True) as pipeline:
            (plan,) = await pipeline.plan([clip_source(wide)])
            assert plan.grid_thw == (4, 28, 48)
            assert plan.picks == (0, 5, 10, 15, 20, 25, 30, 34)

    run(main())


def test_20_clips_in_one_request_and_not_one_more(spawner):
    async def main():
        tiny = clip(2, size=(64, 64))
        async with running(spawner, num_workers=2) as pipeline:
            lease = await pipeline.load(await pipeline.plan([clip_source(tiny)] * 20 + [source()]))
            assert len(set(lease.refs)) == 21
            lease.release()
            items = [clip_source(tiny, param=str(number)) for number in range(21)]
            with pytest.raises(MediaError, match="21 videos; the limit is 20") as caught:
                await pipeline.plan(items)
            assert caught.value.param == "20"

    run(main())


def test_budgets_are_kept_before_anything_is_decoded(spawner):
    async def main():
        async with running(spawner, clip_limits=ClipLimits(1 << 22, 3600, 5, 1 << 30), max_total_bytes=len(CLIP)) as pipeline:
            with pytest.raises(MediaError, match="7 frames; the limit is 5") as caught:
                await pipeline.plan([clip_source(param="x")])
            assert caught.value.param == "x"
            with pytest.raises(MediaError, match="the limit is " + str(len(CLIP))):
                await pipeline.plan([clip_source(), source()])
            assert pipeline.slab.free_bytes == pipeline.slab.capacity_bytes

    run(main())


def test_a_client_that_leaves_ends_the_decoding_of_its_clip(spawner, monkeypatch):
    def slow(number, width, height):
        return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)

    async def main():
        long = clip(120, size=(640, 480), picture=slow, codec_options={"preset": "ultrafast"})
        async with running(spawner, slab_bytes=64 << 20) as pipeline:
            plans = await pipeline.plan([clip_source(long, fps=2.0)])
            jobs = []
            submit = pipeline.pool.submit
            monkeypatch.setattr(pipeline.pool, "submit", lambda *task, **how: jobs.append(submit(*task, **how)) or jobs[-1])
            (pid,) = pipeline.pool.pids
            os.kill(pid, signal.SIGSTOP)
            loading = asyncio.create_task(pipeline.load(plans))
            await until(lambda: jobs and jobs[-1].running)
            loading.cancel()
            os.kill(pid, signal.SIGCONT)
            await all_free(pipeline)
            with pytest.raises(MediaError, match="cancelled"):
                await jobs[-1].outcome()
            assert pipeline.pool.pids == (pid,)

    run(main())


def test_files_with_an_address_are_fetched_first(spawner, tmp_path):
    (tmp_path / "card.png").write_bytes(CARD)

    async def main():
        async with running(spawner, fetch=FetchConfig(local_root=tmp_path)) as pipeline:
            url = f"file://{tmp_path}/card.png"
            here = MediaSource(MediaKind.IMAGE, url=url)
            plans = await pipeline.plan([here, source(), here])
            assert len({plan.content_hash for plan in plans}) == 1
            assert plans[0].source.data == CARD
            gone = MediaSource(MediaKind.IMAGE, param="gone", url=f"file://{tmp_path}/gone.png")
            for items in ([source(), gone, here], [here, gone, source(b"junk", param="later")]):
                with pytest.raises(MediaError, match="file URL") as caught:
                    await pipeline.plan(items)
                assert caught.value.param == "gone"
            assert pipeline.stats().fetches_total >= 4

    run(main())


def test_what_was_fetched_for_all_requests_has_a_limit_until_it_is_forgotten(spawner, tmp_path):
    (tmp_path / "card.png").write_bytes(CARD)
    (tmp_path / "junk.png").write_bytes(b"junk")
    here, junk = (MediaSource(MediaKind.IMAGE, url=f"file://{tmp_path}/{name}.png") for name in ("card", "junk"))

    async def main():
        limits = {"fetch": FetchConfig(local_root=tmp_path), "max_fetched_bytes": 2 * len(CARD) + 3}
        async with running(spawner, **limits) as pipeline:
            one = await pipeline.plan([here, source()])
            two = await pipeline.plan([here])
            with pytest.raises(OverloadedError):
                await pipeline.plan([here])
            with pytest.raises(OverloadedError):
                await pipeline.plan([source(), junk])
            (await pipeline.load(await pipeline.plan([source()]))).release()  # what came with a request counts elsewhere
            pipeline.forget(one)
            with pytest.raises(MediaError, match="unknown type"):
                await pipeline.plan([junk])
            three = await pipeline.plan([here])
            for plans in (two, three):
                (await pipeline.load(plans)).release()
                pipeline.forget(plans)
            assert pipeline._downloaded.num_bytes == 0

    run(main())


def test_fetched_files_and_given_ones_share_the_limit_of_a_request(spawner, tmp_path):
    (tmp_path / "card.png").write_bytes(CARD)
    here = MediaSource(MediaKind.IMAGE, param="here", url=f"file://{tmp_path}/card.png")

    async def main():
        limits = {"fetch": FetchConfig(local_root=tmp_path), "max_total_bytes": 2 * len(CARD)}
        async with running(spawner, **limits) as pipeline:
            assert len(await pipeline.plan([source(), here])) == 2
            with pytest.raises(MediaError, match="bytes together") as caught:
                await pipeline.plan([source(), source(), here])
            assert caught.value.param == "here"
            with pytest.raises(MediaError, match=f"the limit is {2 * len(CARD)}"):
                await pipeline.plan([source(), source(), source(), here])
            assert pipeline.stats().fetches_total == 2

    run(main())


def test_the_default_slab_holds_200_full_pictures_or_the_largest_clip():
    config = MediaConfig()
    assert 200 * 3 * IMAGE_AREA.max_pixels <= config.slab_bytes
    assert 3 * config.clip_limits.max_total_pixels <= config.slab_bytes
