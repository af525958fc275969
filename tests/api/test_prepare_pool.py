import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from server.api import prepare_pool
from server.api.content import KindLimit, MediaLimits
from server.api.prepare import CHAT_JOB, Checker
from server.api.prepare_pool import PreparePool
from server.api.prepare_process import WorkerFaultError
from server.api.prepare_protocol import SLICE_LEN, Setup
from server.api.prepare_worker import JOBS
from server.api.sampling import Limits
from server.errors import M3Error, OverloadedError, PayloadTooLargeError, RequestFailedError, ShuttingDownError
from server.settings import ThinkingMode
from tests.api.scripted import TINY, tiny_format, until
from tests.e2e.server_process import is_running, wait_until


def data_uri(data):
    return "data:;base64," + base64.b64encode(data).decode()


LIMITS = Limits("tiny", 100_000, tiny_format().vocab_size, tuple(tiny_format().eos_token_ids), ThinkingMode.ADAPTIVE)
MEDIA_LIMITS = MediaLimits(KindLimit(3, 1 << 20), KindLimit(2, 1 << 20))
SETUP = Setup(str(TINY), LIMITS, MEDIA_LIMITS, niceness=3)
CHECKER = Checker(LIMITS, MEDIA_LIMITS, tiny_format())

WEATHER = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}},
}
PICTURES = [
    {"type": "text", "text": "Look: é 漢 <mm:think>"},
    {"type": "image_url", "image_url": {"url": data_uri(b"one" * 999), "detail": "high", "max_pixels": 99_999}},
    {"type": "video_url", "video_url": {"url": data_uri(b"two"), "fps": 2.5, "max_frames": 9}},
    {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
]
LONG = "word " * 3 * SLICE_LEN
BODIES = {
    "chat": [
        {"messages": [{"role": "user", "content": "hi"}], "seed": 2**63 - 1, "cache_salt": "s", "stop": ["x"], "n": 2},
        {"messages": [{"role": "user", "content": PICTURES}], "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "tool_choice": "required", "temperature": 0.1},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_object"},
            "logit_bias": {"7": -1.5},
        },
        {"messages": [{"role": "user", "content": "hi"}], "bad_words": ["no"], "top_logprobs": 3, "logprobs": True},
        {"messages": [{"role": "user", "content": LONG[: 5 * 90_000]}]},
        {"messages": [{"role": "user", "content": LONG * 9}]},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 9},
        {"messages": [{"role": "user", "content": "hi"}], "model": "other"},
        {"messages": [{"role": "user", "content": [PICTURES[1]] * 4}]},
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
        {"messages": 7},
        b'{"messages": [',
        b"\xff",
    ],
    "completion": [
        {"prompt": ["one", "two", LONG[:500_000]], "echo": True, "logprobs": 2, "max_tokens": 0},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 10**7]]},
        {"prompt": ""},
    ],
    "response": [
        {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": WEATHER["function"]["parameters"]}]},
        {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_uri(b"one")}]}],
            "metadata": {"a": "b"},
        },
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}},
        {"input": "hi", "previous_response_id": "x"},
    ],
    "messages": [
        {"messages": [{"role": "user", "content": "hi"}], "model": "tiny", "max_tokens": 5, "system": "s"},
        {"messages": [{"role": "user", "content": "hi"}], "model": "tiny", "max_tokens": 5, "tool_choice": {"type": "any"}},
        {"messages": [{"role": "user", "content": []}], "model": "tiny", "max_tokens": 5},
        {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"},
    ],
    "count": [
        {"messages": [{"role": "user", "content": LONG}], "model": "tiny"},
        {"messages": [{"role": "assistant", "content": "hi"}], "model": "tiny"},
    ],
    "tokenize": [
        {"prompt": LONG, "return_token_strs": True},
        {"messages": [{"role": "user", "content": PICTURES}], "add_generation_prompt": False},
        {"prompt": 1},
    ],
    "detokenize": [{"tokens": [5, 6, 7]}, {"tokens": [-1]}],
}

# Behaves like the worker, except for bodies that tell it otherwise; every body's first bytes are a line of the log.
SCRIPT = """
import logging, os, resource, sys, time
from server.api import prepare_worker
log, kept = sys.argv.pop(1), []
prepare = prepare_worker.prepare
def scripted(checker, job, raw):
    with open(log, "a") as file:
        print(os.getpid(), raw[:20].decode(), file=file)
    if raw == b"hang":
        time.sleep(600)
    if raw == b"die" or raw == b"die once" and open(log).read().count("die once") == 1:
        os._exit(9)
    if raw == b"spin":
        while True:
            pass
    if raw == b"abort":
        os.abort()
    if raw == b"grow":
        kept.append(bytearray(300 << 20))
    if raw == b"babble":
        return prepare(checker, job, raw)[0], [bytes(8)]
    if raw == b"log":
        logging.getLogger("server.x").error("a line of %s", "log")
    if raw == b"memory":
        job = prepare_worker.Job("", lambda checker, raw: bytearray(8 << 30), None)
    if raw == b"bug":
        job = prepare_worker.Job("", lambda checker, raw: 1 / 0, None)
    return prepare(checker, job, raw)
prepare_worker.prepare = scripted
prepare_worker.CPU_LIMIT_S = 1.0
prepare_worker.confine = lambda num_bytes, _: resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
prepare_worker.main()
"""


class Log:
    def __init__(self, path):
        self._path = path

    @property
    def lines(self):
        return self._path.read_text().splitlines() if self._path.exists() else []

    @property
    def pids(self):
        return [int(line.split()[0]) for line in self.lines]


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


@pytest.fixture
def scripted(tmp_path):
    return (sys.executable, "-c", SCRIPT, str(tmp_path / "log"))


@contextlib.asynccontextmanager
async def pool_with(**options):
    async with asyncio.timeout(120):
        pool = PreparePool(SETUP, **options)
        try:
            yield pool
        finally:
            await pool.close()


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


async def outcome(work):
    try:
        return msgspec.json.encode(await work)
    except M3Error as error:
        return type(error), error.body(), error.status


async def said(pool, *bodies):
    """What becomes of bodies that are no JSON."""
    return [await outcome(pool.run(CHAT_JOB, [body])) for body in bodies]


def test_a_process_makes_the_same_of_every_body_as_a_thread():
    async def scenario():
        different = []
        async with pool_with() as pool:
            for name, bodies in BODIES.items():
                for body in bodies:
                    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                    pieces = [raw[start : start + 70_000] for start in range(0, len(raw), 70_000)]
                    there = await outcome(pool.run(JOBS[name], pieces))
                    here = await outcome(asyncio.to_thread(JOBS[name].run, CHECKER, raw))
                    if there != here:
                        different.append((name, raw[:100]))
            assert len(pool.pids) == 1
        assert different == []

    assert set(BODIES) == set(JOBS)
    asyncio.run(scenario())


def test_a_worker_that_dies_once_costs_nothing_but_time(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            (answer,) = await said(pool, b"die once")
        assert answer[1]["error"]["code"] == "invalid_json"  # as the second worker says

    asyncio.run(scenario())
    assert len(set(log.pids)) == 2


def test_a_worker_that_dies_twice_costs_its_request_and_no_other(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            dead, fine = await asyncio.gather(*(said(pool, body) for body in (b"die", b"fine")))
            assert dead[0][0] is RequestFailedError
            assert dead[0][2] == 500
            assert fine[0][1]["error"]["code"] == "invalid_json"

    asyncio.run(scenario())
    assert len(set(log.pids)) == 3


def test_a_body_that_takes_too_long_is_given_up_and_its_worker_replaced(log, scripted):
    async def scenario():
        async with pool_with(command=scripted, timeout_s=0.5) as pool:
            pool.start()
            (slow,) = await said(pool, b"hang")
            assert slow[0] is RequestFailedError
            assert not is_running(log.pids[0])
            await until(lambda: pool.pids)  # the next one is on its way before there is a request
            (fine,) = await said(pool, b"fine")
            assert fine[1]["error"]["code"] == "invalid_json"

    asyncio.run(scenario())
    assert len(log.lines) == 2


def test_a_body_that_takes_too_much_processor_time_is_refused_like_one_that_is_too_large(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            slow, fine = await said(pool, b"spin", b"fine")
            assert slow[0] is PayloadTooLargeError, "a client tries again after a 500"
            assert "processor time" in slow[1]["error"]["message"]
            assert fine[1]["error"]["code"] == "invalid_json"

    asyncio.run(scenario())
    assert [line.split()[1] for line in log.lines] == ["spin", "fine"]


def test_a_worker_that_does_not_keep_to_the_protocol_never_answers_the_next_body(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            with pytest.raises(msgspec.DecodeError):
                await pool.run(CHAT_JOB, [b"babble"])
            return await said(pool, b"fine")

    (fine,) = asyncio.run(scenario())
    assert fine[1]["error"]["code"] == "invalid_json"
    babbled, following = log.pids
    assert babbled != following


def test_a_body_that_waits_for_too_long_is_refused(log, scripted):
    async def scenario():
        async with pool_with(command=scripted, wait_timeout_s=0.1) as pool:
            runs = asyncio.create_task(pool.run(CHAT_JOB, [b"hang"]))
            await until(lambda: log.lines)
            with pytest.raises(OverloadedError):
                await pool.run(CHAT_JOB, [b"waits"])
            assert not runs.done()

    asyncio.run(scenario())
    assert [line.split()[1] for line in log.lines] == ["hang"]


def test_a_body_that_waits_when_the_pool_is_closed_starts_no_worker(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            runs = asyncio.create_task(pool.run(CHAT_JOB, [b"hang"]))
            await until(lambda: log.lines)
            waits = asyncio.create_task(pool.run(CHAT_JOB, [b"waits"]))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await runs
        with pytest.raises(ShuttingDownError):
            await waits
        assert pool.pids == []

    asyncio.run(scenario())
    assert [line.split()[1] for line in log.lines] == ["hang"]


def test_a_client_that_leaves_does_not_keep_the_worker(log, scripted):
    async def scenario():
        async with pool_with(command=scripted, timeout_s=1) as pool:
            left = asyncio.create_task(pool.run(CHAT_JOB, [b"hang"]))
            await until(lambda: log.lines)
            waits = asyncio.create_task(pool.run(CHAT_JOB, [b"waits"]))
            await asyncio.sleep(0)
            for task in (left, waits):
                task.cancel()
            assert (await said(pool, b"fine"))[0][1]["error"]["code"] == "invalid_json"

    asyncio.run(scenario())
    assert [line.split()[1] for line in log.lines] == ["hang", "fine"]


def test_only_so_many_bodies_wait(log, scripted, monkeypatch):
    monkeypatch.setattr(prepare_pool, "MAX_WAITING", 1)

    async def scenario():
        async with pool_with(command=scripted) as pool:
            tasks = [asyncio.create_task(pool.run(CHAT_JOB, [b"hang"])) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await pool.run(CHAT_JOB, [b"fine"])
            for task in tasks:
                task.cancel()

    asyncio.run(scenario())


def test_several_workers_take_bodies_at_the_same_time(log, scripted):
    async def scenario():
        async with pool_with(command=scripted, num_workers=2) as pool:
            tasks = [asyncio.create_task(pool.run(CHAT_JOB, [b"hang"])) for _ in range(2)]
            await until(lambda: len(log.lines) == 2)
            assert len(pool.pids) == 2
            for task in tasks:
                task.cancel()

    asyncio.run(scenario())
    assert not any(map(is_running, log.pids))


def test_memory_is_bounded_bugs_stay_inside_and_the_log_is_the_fronts(scripted, caplog):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            (large,) = await said(pool, b"memory")
            assert large[1]["error"]["code"] == "payload_too_large"
            with pytest.raises(WorkerFaultError, match="ZeroDivisionError"):
                await pool.run(CHAT_JOB, [b"bug"])
            await said(pool, b"log")
            assert len(pool.pids) == 1

    asyncio.run(scenario())
    assert "a line of log" in [record.getMessage() for record in caplog.records if record.name == "server.x"]
    assert any("ZeroDivisionError" in record.getMessage() for record in caplog.records)


def test_a_body_that_exhausts_a_workers_memory_is_refused_and_not_tried_again(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            return await said(pool, b"abort", b"fine")

    large, fine = asyncio.run(scenario())
    assert large[1]["error"]["code"] == "payload_too_large"
    assert fine[1]["error"]["code"] == "invalid_json"
    assert [line.split()[1] for line in log.lines] == ["abort", "fine"]


def test_a_worker_that_keeps_much_memory_is_replaced(log, scripted):
    async def scenario():
        async with pool_with(command=scripted) as pool:
            await said(pool, b"first", b"grow", b"next")

    asyncio.run(scenario())
    first, grown, following = log.pids
    assert first == grown != following


def test_parsed_bodies_may_take_forty_times_their_length_but_not_more():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "LISTS"}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]

    def body(num_lists):
        return json.dumps({"messages": messages}).encode().replace(b'"LISTS"', b"[" + b"[]," * num_lists + b"[]]")

    async def scenario():
        script = "from server.api import prepare_worker; prepare_worker.MEMORY_BYTES //= 4; prepare_worker.main()"
        async with pool_with(command=(sys.executable, "-c", script)) as pool:
            small, large = await said(pool, body(10_000), body(5_000_000))
            assert b"token_ids" in small
            assert large[1]["error"]["code"] == "payload_too_large"
            assert len(pool.pids) == 1

    asyncio.run(scenario())


def test_a_worker_that_cannot_start_is_said_to_the_operator_and_the_client(caplog):
    async def scenario():
        async with pool_with(command=(sys.executable, "-c", "raise SystemExit(3)")) as pool:
            pool.start()
            (answer,) = await said(pool, b"x")
            assert answer[0] is RequestFailedError

    asyncio.run(scenario())
    assert "cannot start" in caplog.text


def test_workers_give_way_hold_no_secret_and_end_with_the_front(monkeypatch):
    monkeypatch.setenv("M3_API_KEYS", "secret-key")

    async def scenario():
        async with pool_with() as pool:
            await said(pool, b"x")
            (pid,) = pool.pids
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
            assert b"secret-key" not in environment_of(pid)
            os.kill(pid, signal.SIGSTOP)  # even one that does nothing any more
        return pid

    pid = asyncio.run(scenario())
    wait_until(lambda: not is_running(pid), 5)


def test_a_signal_to_all_processes_leaves_the_workers_to_the_front_while_it_drains():
    async def scenario():
        async with pool_with() as pool:
            await said(pool, b"x")
            (pid,) = pool.pids
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, signum)
            await said(pool, b"y")
            assert pool.pids == [pid]

    asyncio.run(scenario())
