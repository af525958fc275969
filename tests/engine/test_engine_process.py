"""The real engine process with a tiny model, driven by the real client."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import server
from server.api.engine_client import EngineClient, EngineState
from server.engine_launch import EngineLaunch
from server.errors import EngineUnavailableError
from server.grammars import GrammarTokenizer
from server.heartbeat import STACKS_SIGNAL
from server.media.slab import MediaSlab
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    MediaItem,
    MediaKind,
    SlabRef,
    Tokens,
)
from server.settings import load_settings
from server.transport import make_address
from tests.engine.real_engine import TIMEOUT_S, collect, drive, tokens_of
from tests.engine.serving import Pixels, Server
from tests.engine.test_determinism import REQUESTS, picture, request, with_picture

pytestmark = pytest.mark.e2e


def settings_for(checkpoint, **values):
    return load_settings({"model": checkpoint, "device": "cpu", "max_num_batched_tokens": 64, **values}, environ={})


def with_engine(scenario, checkpoint, **settings):
    """Run `scenario(client)` against a ready engine."""

    async def when_ready(client):
        await client.wait_ready()
        await scenario(client)

    drive(when_ready, settings_for(checkpoint, **settings))


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_a_real_engine_serves_aborts_and_ignores_ctrl_c(checkpoint, model, overlap_steps):
    expected = Server(model).serve(REQUESTS)

    async def scenario(client):
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        endless = client.submit(request("endless", [5, 6, 7], num_output=8000))
        streams = [client.submit(each) for each in REQUESTS]
        results = await asyncio.gather(*map(collect, streams))
        assert {each.request_id: tokens_of(events) for each, events in zip(REQUESTS, results, strict=True)} == expected
        assert all(events[-1].reason is FinishReason.LENGTH for events in results)

        endless.abort()
        aborted = await collect(endless)
        assert aborted[-1].reason is FinishReason.ABORT
        assert aborted[-1].num_output_tokens == len(tokens_of(aborted))

        too_long = await collect(client.submit(request("too long", [5] * 9000)))
        assert too_long[0].kind is FailureKind.NO_FIT
        unknown = await collect(client.submit(request("unknown id", [256])))
        assert unknown[0].kind is FailureKind.INVALID

        assert client.num_open == 0
        # Statistics come without an event to wait for.
        while client.stats is None or client.stats.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert client.stats.num_free_pages + client.stats.num_cached_pages == client.stats.num_pages

    with_engine(scenario, checkpoint, overlap_steps=overlap_steps)


def test_a_real_engine_follows_grammars_and_refuses_bad_ones():
    tiny = Path(server.__file__).parent / "model/tiny"
    choice, broken = Grammar(GrammarKind.CHOICE, '["yes", "no"]'), Grammar(GrammarKind.REGEX, "(")
    tokenizer = GrammarTokenizer(tiny, 1376)
    stop_ids = tokenizer.eos_token_ids

    async def scenario(client):
        good, bad, plain = await asyncio.gather(
            collect(client.submit(request("good", [5, 6], grammar=choice, stop_token_ids=stop_ids))),
            collect(client.submit(request("bad", [5, 6], grammar=broken))),
            collect(client.submit(request("plain", [5, 6], num_output=4, num_prompt_logprobs=1))),
        )
        assert tokenizer.tokenizer.decode_bytes(tokens_of(good)[:-1]) in (b"yes", b"no")
        assert good[-1].reason is FinishReason.STOP
        assert [event.kind for event in bad] == [FailureKind.INVALID]
        assert len(tokens_of(plain)) == 4
        assert len(plain[0].prompt_logprobs) == 1

    with_engine(scenario, tiny)


def test_pixels_reach_the_engine_through_the_slab(checkpoint, model):
    pixels = Pixels()
    each = with_picture("r", pixels, 1)
    expected = Server(model, pixels=pixels).serve([each])["r"]

    async def scenario_with(slab):
        async def scenario(client):
            (ref,) = await slab.allocate([picture(1).size])
            slab._mapping.view(ref)[:] = picture(1).reshape(-1)
            (item,) = each.media
            released = asyncio.Event()

            def release():
                slab.free(ref)
                released.set()

            def submit(name, pixels_ref, on_end=None):
                media = (MediaItem(MediaKind.IMAGE, item.content_hash, item.grid_thw, item.ranges, pixels_ref),)
                return client.submit(request(name, each.prompt_token_ids, media=media), on_end)

            stale = SlabRef(ref.offset, ref.num_bytes, ref.generation + 1)
            (failure,) = await collect(submit("stale", stale))
            assert failure.kind is FailureKind.INTERNAL
            assert tokens_of(await collect(submit("r", ref, release))) == expected
            assert released.is_set()

        return scenario

    async def run():
        async with asyncio.timeout(TIMEOUT_S):
            slab = MediaSlab(1 << 20)
            client = EngineClient(settings_for(checkpoint), slab.name)
            await client.start()
            try:
                await client.wait_ready()
                await (await scenario_with(slab))(client)
            finally:
                await client.close()
                slab.close()

    asyncio.run(run())


def test_a_killed_engine_fails_every_open_stream_within_two_seconds(checkpoint):
    async def scenario(client):
        streams = [client.submit(request(f"r{i}", [5, i], num_output=8000)) for i in range(10)]
        for stream in streams:
            assert isinstance(await anext(stream), Tokens)
        started_s = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        for events in await asyncio.gather(*map(collect, streams)):
            assert isinstance(events[-1], Failed)
            assert events[-1].kind is FailureKind.ENGINE_DEAD
        assert time.monotonic() - started_s < 2
        assert client.state is EngineState.DEAD
        assert client.exit_code == -signal.SIGKILL

    with_engine(scenario, checkpoint)


def test_the_heartbeat_shows_the_load_and_the_steps(checkpoint):
    async def scenario(client):
        loaded = client.heartbeat.pulse()
        assert loaded.num_loaded_bytes == loaded.num_bytes_to_load > 0
        await collect(client.submit(request("r", [5, 6, 7], num_output=4)))
        pulse = client.heartbeat.pulse()
        assert pulse.is_serving
        assert sum(pulse.steps_by_time) == 4
        assert pulse.num_step_tokens == 6
        assert pulse.step_seconds > 0

    with_engine(scenario, checkpoint)


def test_asked_for_its_stacks_the_engine_prints_them_and_ends(checkpoint, capfd):
    async def scenario(client):
        await asyncio.to_thread(client.end_with_stacks, TIMEOUT_S)
        await client.died.wait()
        await asyncio.to_thread(client.end_with_stacks, TIMEOUT_S)  # nothing is left to end
        assert client.exit_code == -STACKS_SIGNAL
        stacks = capfd.readouterr().err
        assert "Thread 0x" in stacks
        assert " in run\n" in stacks, "the main thread is in the loop"

    with_engine(scenario, checkpoint)


def test_close_lets_the_engine_answer_what_is_open(checkpoint):
    async def scenario(client):
        stream = client.submit(request("r", [5, 6], num_output=8000))
        await anext(stream)
        await client.close()
        (*_, end) = await collect(stream)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.ABORT
        assert not client.died.is_set()
        assert client.exit_code == 0

    with_engine(scenario, checkpoint)


def test_a_checkpoint_that_cannot_be_loaded_is_the_reason_why_the_engine_is_not_ready(tmp_path):
    async def scenario():
        client = EngineClient(settings_for(tmp_path))
        await client.start()
        with pytest.raises(EngineUnavailableError, match=r"config\.json"):
            await client.wait_ready()
        await client.died.wait()
        assert client.exit_code == 1
        await client.close()

    asyncio.run(scenario())


def test_an_engine_leaves_when_its_parent_is_gone(checkpoint):
    launch = EngineLaunch(settings=settings_for(checkpoint), address=make_address())
    process = subprocess.Popen([sys.executable, "-m", "server.engine"], stdin=subprocess.PIPE)
    process.stdin.write(launch.model_dump_json().encode() + b"\n")
    process.stdin.close()
    assert process.wait(timeout=TIMEOUT_S) != 0
    launch.address.rmdir()
