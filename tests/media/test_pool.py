"""Worker processes that are stopped, killed, late, replaced; jobs that end exactly once whatever happens to them."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest
from PIL import Image

from server.errors import EngineUnavailableError, MediaError
from server.media import pool as pool_module
from server.media.geometry import IMAGE_AREA, Size
from server.media.pool import PoolConfig, WorkerPool
from server.media.protocol import Filled, FillTask, PlanTask, Setup
from server.media.slab import MediaSlab
from server.media.spawner import COMMAND, Spawner, WorkerDiedError
from server.media.types import ImagePlan
from server.messages import SlabRef
from tests.media.media_cards import encode, halves, run

PICTURE = encode(halves(), "PNG")
PLAN = PlanTask(rule=IMAGE_AREA, max_pixels=1 << 26)
GREET_AND_DIE = """
import msgspec
from server.media.forkserver import serve
from server.media.protocol import HEADER, Hello

def greet_and_die(connection, parent_pid):
    message_len, _ = HEADER.unpack(connection.recv(HEADER.size))
    connection.recv(message_len)
    hello = msgspec.msgpack.encode(Hello())
    connection.sendall(HEADER.pack(len(hello), 0) + hello)
    connection.recv(1)

serve(greet_and_die)
"""


def submit(pool, task, body, **options):
    return pool.submit(task, body, **{"timeout_s": 30, **options})


@contextlib.asynccontextmanager
async def running(tmp_path, spawner, *, memory_bytes=1 << 30, **options):
    slab = MediaSlab(1 << 20, directories=[tmp_path])
    config = {
        "num_workers": 1,
        "start_timeout_s": 30,
        "recycle_tasks": 1000,
        "recycle_bytes": 1 << 40,
        **options,
    }
    pool = WorkerPool(PoolConfig(**config), Setup(slab_name=slab.name, memory_bytes=memory_bytes), spawner)
    try:
        await pool.start()
        yield pool, slab
    finally:
        await pool.close()
        slab.close()


def in_pool(**options):
    """Run `async def test(pool)` in a pool of its own with these options."""

    def decorate(test):
        def test_in_loop(tmp_path, spawner):
            async def main():
                async with running(tmp_path, spawner, **options) as (pool, _):
                    await test(pool)

            run(main())

        return test_in_loop

    return decorate


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def until_running(job):
    await until(lambda: job.running)


async def stopped_in_a_task(pool):
    """(process id, job) of the only worker, which has stopped with a task in hand."""
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    job = submit(pool, PLAN, PICTURE)
    await until_running(job)
    return pid, job


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@in_pool()
async def test_a_task_is_answered_and_a_bad_picture_is_a_media_error_with_its_field(pool):
    good, bad = submit(pool, PLAN, PICTURE), submit(pool, PLAN, b"junk", param="messages[0]")
    assert isinstance(await good.outcome(), ImagePlan)
    with pytest.raises(MediaError, match="unknown type") as caught:
        await bad.outcome()
    assert caught.value.param == "messages[0]"
    assert pool.totals.num_deaths == 0


@in_pool()
async def test_a_worker_killed_in_the_middle_of_a_task_is_replaced_and_the_task_tried_again(pool):
    pid, job = await stopped_in_a_task(pool)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(await job.outcome(), ImagePlan)
    assert pool.totals.num_deaths == 1
    assert pid not in pool.pids
    await until(lambda: gone(pid))


def test_a_task_that_kills_two_workers_is_refused_and_leaves_the_pool_whole(tmp_path):
    async def main():
        own = Spawner((sys.executable, "-c", GREET_AND_DIE))
        async with running(tmp_path, own) as (pool, _):
            job = submit(pool, PLAN, PICTURE, param="messages[3]")
            with pytest.raises(MediaError, match="cannot be decoded") as caught:
                await job.outcome()
            assert caught.value.param == "messages[3]"
            assert caught.value.status == 400
            assert pool.totals.num_deaths == 2
            with pytest.raises(MediaError):
                await submit(pool, PLAN, PICTURE).outcome()
            assert pool.totals.num_deaths == 4
        await own.close()

    run(main())


@in_pool()
async def test_a_worker_killed_while_idle_costs_nobody_anything(pool):
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
    assert pid not in pool.pids


@in_pool()
async def test_a_task_past_its_deadline_is_refused_and_its_worker_killed(pool):
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    late, next_one = submit(pool, PLAN, PICTURE, timeout_s=0.5), submit(pool, PLAN, PICTURE)
    with pytest.raises(MediaError, match="too long"):
        await late.outcome()
    assert isinstance(await next_one.outcome(), ImagePlan)
    await until(lambda: gone(pid))


@in_pool(recycle_tasks=2)
async def test_workers_are_replaced_after_their_share_of_tasks(pool):
    for _ in range(5):
        assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
    assert pool.totals.num_started == 3
    assert pool.totals.num_deaths == 0


@in_pool(recycle_bytes=1)
async def test_a_worker_that_has_grown_is_replaced(pool):
    for _ in range(3):
        await submit(pool, PLAN, PICTURE).outcome()
    assert pool.totals.num_started >= 3


def test_the_size_of_the_front_is_not_taken_for_the_workers(tmp_path, spawner):
    async def main():
        ballast = bytearray(300 << 20)
        ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])
        async with running(tmp_path, spawner, recycle_bytes=250 << 20) as (pool, _):
            for _ in range(3):
                await submit(pool, PLAN, PICTURE).outcome()
            assert pool.totals.num_started == 1

    run(main())


@in_pool(num_workers=2)
async def test_sending_much_to_a_stuck_worker_holds_up_neither_the_loop_nor_another_worker(pool):
    stuck_pid = pool.pids[0]
    os.kill(stuck_pid, signal.SIGSTOP)
    large = bytes(30 << 20)
    jobs = [submit(pool, PLAN, large)]
    await until_running(jobs[0])
    jobs += [submit(pool, PLAN, PICTURE) for _ in range(5)]
    for job in jobs[1:]:
        assert isinstance(await job.outcome(), ImagePlan)
    os.kill(stuck_pid, signal.SIGCONT)
    with pytest.raises(MediaError, match="unknown type"):
        await jobs[0].outcome()


@in_pool()
async def test_a_cancelled_job_that_is_queued_never_runs(pool):
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    first, second, third = (submit(pool, PLAN, PICTURE) for _ in range(3))
    await until_running(first)
    second.cancel()
    assert second.done
    os.kill(pid, signal.SIGCONT)
    await third.outcome()
    assert not second.running
    with pytest.raises(asyncio.CancelledError):
        await second.outcome()


@in_pool()
async def test_a_cancelled_job_that_runs_ends_by_itself_and_tells(pool):
    pid, job = await stopped_in_a_task(pool)
    ended = asyncio.Event()
    job.cancel()
    job.when_done(ended.set)
    await asyncio.sleep(0)
    assert not ended.is_set()
    os.kill(pid, signal.SIGCONT)
    await ended.wait()
    assert pool.totals.num_deaths == 0


@in_pool()
async def test_an_abandoned_job_is_not_tried_again(pool):
    pid, job = await stopped_in_a_task(pool)
    job.cancel()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MediaError):
        await job.outcome()
    assert pool.totals.num_deaths == 1


def test_a_stale_range_is_not_written(tmp_path, spawner, caplog):
    async def main():
        async with running(tmp_path, spawner) as (pool, slab):
            (ref,) = await slab.allocate([96 * 64 * 3])
            size = Size(84, 56)
            num_bytes = 84 * 56 * 3
            fill = FillTask(size=size, max_pixels=1 << 20, ref=SlabRef(ref.offset, num_bytes, ref.generation))
            assert isinstance(await submit(pool, fill, PICTURE).outcome(), Filled)
            slab.free(ref)
            with pytest.raises(MediaError, match="cannot be decoded"):
                await submit(pool, fill, PICTURE).outcome()
            assert "generation" in caplog.text

    run(main())


def test_a_picture_that_needs_too_much_memory_is_refused_and_the_worker_lives(tmp_path, spawner):
    async def main():
        async with running(tmp_path, spawner, memory_bytes=150 << 20) as (pool, slab):
            large = encode(Image.new("RGBA", (7000, 7000)), "BMP")[:1000]  # its pixels are wanted before they are missed
            (ref,) = await slab.allocate([28 * 28 * 3])
            with pytest.raises(MediaError, match="memory"):
                await submit(pool, FillTask(size=Size(28, 28), max_pixels=1 << 26, ref=ref), large).outcome()
            assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
            assert pool.totals.num_deaths == 0

    run(main())


@in_pool()
async def test_closing_ends_workers_and_jobs(pool):
    pids = pool.pids
    os.kill(pids[0], signal.SIGSTOP)
    jobs = [submit(pool, PLAN, PICTURE) for _ in range(3)]
    await until_running(jobs[0])
    await pool.close()
    for job in (*jobs, submit(pool, PLAN, PICTURE)):
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await job.outcome()
    await until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("command", "error"),
    [(("/does/not/exist",), OSError), ((sys.executable, "-c", "pass"), WorkerDiedError), (("/bin/false",), WorkerDiedError)],
)
def test_a_pool_whose_workers_cannot_start_says_so(tmp_path, command, error):
    async def main():
        own = Spawner(command)
        with pytest.raises(error):
            async with running(tmp_path, own, num_workers=2):
                pass
        assert own.pid is None

    run(main())


def test_a_worker_that_never_greets_is_killed(tmp_path):
    async def main():
        own = Spawner(("/bin/sh", "-c", "exec sleep 600"))
        with pytest.raises(TimeoutError):
            async with running(tmp_path, own, start_timeout_s=0.2):
                pass
        assert own.pid is None

    run(main())


def test_jobs_do_not_wait_for_workers_that_cannot_be_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "RESTART_PAUSE_S", 0.01)
    allowed = tmp_path / "allowed"
    allowed.touch()
    command = ("/bin/sh", "-c", f'test -e {allowed} && exec {" ".join(COMMAND)} "$0"')

    async def main():
        own = Spawner(command)
        async with running(tmp_path, own) as (pool, _):
            allowed.unlink()
            (pid,) = pool.pids
            os.kill(own.pid, signal.SIGKILL)
            await until(lambda: gone(pid))  # workers go with it
            for _ in range(2):
                with pytest.raises(EngineUnavailableError, match="try again later"):
                    await submit(pool, PLAN, PICTURE).outcome()
            allowed.touch()
            await until(lambda: pool.pids)
            assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
        await own.close()
        assert "cannot start" in caplog.text

    run(main())


def test_a_worker_that_cannot_be_forked_does_not_take_the_others_with_it(tmp_path):
    refuse_second = """
import os
from server.media import forkserver
fork, num_calls = os.fork, 0

def scarce():
    global num_calls
    num_calls += 1
    if num_calls == 2:
        raise BlockingIOError
    return fork()

os.fork = scarce
forkserver.main()
"""

    async def main():
        own = Spawner((sys.executable, "-c", refuse_second))
        async with running(tmp_path, own) as (pool, _):
            pids, fork_server = pool.pids, own.pid
            with pytest.raises(WorkerDiedError, match="could not be forked"):
                await own.fork()
            later = await own.fork()
            later.connection.close()
            os.close(later.pidfd)
            assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
            assert (pool.pids, own.pid) == (pids, fork_server)
        await own.close()

    run(main())


def test_workers_die_with_their_parent(tmp_path):
    script = """
import asyncio, os, pathlib, signal, sys
from server.media.pool import PoolConfig, WorkerPool
from server.media.protocol import Setup
from server.media.slab import MediaSlab
from server.media.spawner import COMMAND, Spawner, WorkerDiedError

async def main():
    slab = MediaSlab(1, directories=[pathlib.Path(sys.argv[1])])
    config = PoolConfig(num_workers=2, start_timeout_s=30, recycle_tasks=9, recycle_bytes=1 << 40)
    pool = WorkerPool(config, Setup(slab_name=slab.name, memory_bytes=1 << 30))
    await pool.start()
    os.kill(pool.pids[0], signal.SIGSTOP)  # one cannot notice that its socket is closed
    print(*pool.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        ends = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
        for end in ends:
            assert select.select([end], [], [], 20)[0]
            os.close(end)
    assert len(ends) == 2


def test_a_fault_of_the_pools_own_costs_no_worker_its_place(tmp_path, spawner, monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "RESTART_PAUSE_S", 0.01)

    async def main():
        async with running(tmp_path, spawner) as (pool, _):
            start = pool._start_worker
            faults = [ValueError("a bug")] * 3

            async def faulty_start():
                if faults:
                    raise faults.pop()
                return await start()

            monkeypatch.setattr(pool, "_start_worker", faulty_start)
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid))
            with pytest.raises(EngineUnavailableError):
                await submit(pool, PLAN, PICTURE).outcome()
            await until(lambda: pool.pids)
            assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)

    run(main())
    assert "a bug" in caplog.text


def test_a_signal_to_all_processes_leaves_the_workers_to_the_front_while_it_drains(tmp_path):
    async def main():
        own = Spawner()
        async with running(tmp_path, own) as (pool, _):
            pids, fork_server = pool.pids, own.pid
            for signum in (signal.SIGTERM, signal.SIGINT):
                for pid in (fork_server, *pids):
                    os.kill(pid, signum)
            assert isinstance(await submit(pool, PLAN, PICTURE).outcome(), ImagePlan)
            assert (pool.pids, own.pid) == (pids, fork_server)
            assert pool.totals.num_deaths == 0
        await own.close()

    run(main())
