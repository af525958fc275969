"""The real engine process on two ranks, driven by the real client: the tokens of one rank, and no rank outlives another."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from server.api.engine_client import ENGINE_COMMAND
from server.engine_launch import EngineLaunch
from server.errors import EngineUnavailableError
from server.media.slab import MediaSlab
from server.messages import Failed, FailureKind, Finished, FinishReason, MediaItem, MediaKind, SlabRef
from server.rank_team import WORKER_COMMAND
from server.transport import make_address
from tests.e2e.server_process import is_running
from tests.engine.real_engine import TIMEOUT_S, collect, drive, tokens_of, workers_of
from tests.engine.serving import Pixels, Server
from tests.engine.test_determinism import PAGE, REQUESTS, picture, prompt_of, request, with_picture
from tests.engine.test_engine_process import settings_for

pytestmark = pytest.mark.e2e


def with_engine(scenario, checkpoint, slab=None, command=ENGINE_COMMAND, **settings):
    """Run `scenario(client)` against an engine of two ranks that starts."""
    drive(scenario, settings_for(checkpoint, **{"tensor_parallel_size": 2, **settings}), slab, command=command)


async def gone(pid):
    while is_running(pid):  # noqa: ASYNC110, another process's end is no event here
        await asyncio.sleep(0.01)


def test_two_ranks_give_the_tokens_of_one(checkpoint, model):
    shared = prompt_of(6 * PAGE + 5, 9)
    scored = request("scored", shared, num_logprobs=2, num_prompt_logprobs=1)
    hit = request("hit", [*shared, 250], num_output=20, bad_words=((7, 8), (9,)))
    pixels = Pixels()
    shown = with_picture("shown", pixels, 1)
    alone = Server(model, pixels=pixels)
    expected = alone.serve([*REQUESTS, scored, hit, shown])
    first = alone.events["scored"][0]
    slab = MediaSlab(1 << 20)

    def show(client, name, ref):
        (item,) = shown.media
        media = (MediaItem(MediaKind.IMAGE, item.content_hash, item.grid_thw, item.ranges, ref),)
        return client.submit(request(name, shown.prompt_token_ids, media=media))

    async def scenario(client):
        await client.wait_ready()
        (ref,) = await slab.allocate([picture(1).size])
        slab._mapping.view(ref)[:] = picture(1).reshape(-1)
        endless = client.submit(request("endless", [5, 6, 7], num_output=8000))
        streams = [client.submit(each) for each in (*REQUESTS, scored)]
        stale = show(client, "stale", SlabRef(ref.offset, ref.num_bytes, ref.generation + 1))
        streams.append(show(client, "shown", ref))
        results = await asyncio.gather(*map(collect, streams))
        names = [*(each.request_id for each in REQUESTS), "scored", "shown"]
        assert {name: tokens_of(events) for name, events in zip(names, results, strict=True)} == {
            name: expected[name] for name in names
        }
        scores = results[names.index("scored")][0]
        assert scores.prompt_logprobs[0].logprob == pytest.approx(first.prompt_logprobs[0].logprob, abs=1e-4)
        assert scores.logprobs[0].top_ids == first.logprobs[0].top_ids
        (failure,) = await collect(stale)
        assert failure.kind is FailureKind.INTERNAL
        endless.abort()
        assert (await collect(endless))[-1].reason is FinishReason.ABORT

        while client.stats.num_running:  # noqa: ASYNC110, idle: the other rank waits for a plan
            await asyncio.sleep(0.01)
        events = await collect(client.submit(hit))
        assert tokens_of(events) == expected["hit"]
        assert events[-1].num_cached_tokens == 6 * PAGE
        assert tokens_of(await collect(show(client, "again", ref))) == expected["shown"]
        (worker,) = workers_of(client)
        await client.close()
        assert client.exit_code == 0
        assert not is_running(worker)

    try:
        with_engine(scenario, checkpoint, slab, overlap_steps=True)
    finally:
        slab.close()


@pytest.mark.parametrize("victim", ["worker", "rank 0"])
def test_when_a_rank_is_killed_all_end_and_requests_fail(checkpoint, victim, capfd):
    async def scenario(client):
        await client.wait_ready()
        (worker,) = workers_of(client)
        stream = client.submit(request("r", [5, 6], num_output=8000))
        await anext(stream)
        os.kill(worker if victim == "worker" else client.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            (*_, end) = await collect(stream)
            await client.died.wait()
            await gone(worker)
        assert isinstance(end, Failed)
        assert end.kind in (FailureKind.ENGINE_DEAD, FailureKind.INTERNAL)
        log = capfd.readouterr().err
        if victim == "worker":
            assert client.exit_code == 1
            assert "rank 1 of 2 left with exit code -9" in log
        else:
            assert " in follow\n" in log, "the other rank says where it was"

    with_engine(scenario, checkpoint)


def test_an_idle_engine_ends_when_a_rank_does(checkpoint):
    async def scenario(client):
        await client.wait_ready()
        (worker,) = workers_of(client)
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(10):
            await client.died.wait()
        assert client.exit_code == 1

    with_engine(scenario, checkpoint)


def test_a_rank_whose_parent_is_gone_already_does_not_start(checkpoint):
    launch = EngineLaunch(settings=settings_for(checkpoint, tensor_parallel_size=2), address=make_address())
    line = launch.model_dump_json().encode() + b"\n"
    # Its parent is this process, not the one that it is told of.
    result = subprocess.run([*WORKER_COMMAND, "1", "1"], input=line, timeout=TIMEOUT_S)
    assert result.returncode == 1
    launch.address.rmdir()


BROKEN_WORKER = """
import sys
from server import rank_worker
from server.engine_setup import StartError

def build(*args, ranks, **options):
    raise StartError("a GPU is missing")

rank_worker.build = build
sys.exit(rank_worker.main(sys.argv[1:]))
"""


def engine_with(worker):
    """The command of an engine whose other rank runs the script `worker`."""
    script = f"""
import os, sys
from server import engine, rank_team

rank_team.WORKER_COMMAND = (sys.executable, "-c", {worker!r})
os._exit(engine.main())
"""
    return sys.executable, "-c", script


def test_a_rank_that_cannot_start_is_the_reason_why_the_engine_is_not_ready(checkpoint):
    async def scenario(client):
        with pytest.raises(EngineUnavailableError, match="rank 1 of 2 left with exit code 1: a GPU is missing"):
            await client.wait_ready()
        await client.died.wait()
        assert client.exit_code == 1

    with_engine(scenario, checkpoint, command=engine_with(BROKEN_WORKER))


LOST_WORKER = """
import sys
import threading
import weakref
from server import rank_worker

def follow(runner, group):
    weakref.finalize(runner, threading.Event().wait)  # as CUDA's, behind a sum that never ends
    raise ConnectionError("rank 0 is lost")

rank_worker.follow = follow
sys.exit(rank_worker.main(sys.argv[1:]))
"""


def test_a_rank_that_is_lost_leaves_with_what_it_holds(checkpoint):
    """It once gave up its pinned memory first, which waited for a sum that waited for the other rank."""

    async def scenario(client):
        async with asyncio.timeout(TIMEOUT_S):
            await client.died.wait()
        assert client.exit_code == 1

    with_engine(scenario, checkpoint, command=engine_with(LOST_WORKER))


def test_a_model_that_cannot_be_cut_is_refused_by_name(checkpoint):
    async def scenario(client):
        with pytest.raises(EngineUnavailableError, match=r"tensor_parallel_size is 3: num_attention_heads: 4 cannot be cut"):
            await client.wait_ready()
        assert workers_of(client) == []

    with_engine(scenario, checkpoint, tensor_parallel_size=3)


def test_ranks_close_while_a_request_runs(checkpoint):
    async def scenario(client):
        await client.wait_ready()
        (worker,) = workers_of(client)
        stream = client.submit(request("r", [5, 6], num_output=8000))
        await anext(stream)
        await client.close()
        (*_, end) = await collect(stream)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.ABORT
        assert not is_running(worker)

    with_engine(scenario, checkpoint, overlap_steps=True)
