import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from server.api.engine_client import EngineClient, EngineState
from server.errors import EngineUnavailableError, OverloadedError, PayloadTooLargeError
from server.messages import Failed, FailureKind, Finished, FinishReason, SamplingParams, Submit, Tokens
from server.settings import load_settings

SCRIPT = Path(__file__).parents[1] / "engine" / "scripted_engine.py"
TOKENS, HANG, DIE, REFUSE, END_TWICE = range(5)


def client_of(behaviour="serves", **settings):
    settings = load_settings({"model": Path("unused"), **settings}, environ={})
    return EngineClient(settings, command=(sys.executable, str(SCRIPT), behaviour))


def with_client(scenario, behaviour="serves", **settings):
    """Run `scenario(client)` against a ready engine; close it whatever happens."""

    async def bounded():
        async with asyncio.timeout(60):
            client = client_of(behaviour, **settings)
            await client.start()
            try:
                await client.wait_ready()
                await scenario(client)
            finally:
                await client.close()

    asyncio.run(bounded())


def submit_to(client, request_id, *prompt, on_end=None):
    return client.submit(Submit(request_id, list(prompt), SamplingParams(max_tokens=5)), on_end)


async def collect(stream):
    return [event async for event in stream]


def test_a_request_streams_its_tokens_and_ends_once():
    async def scenario(client):
        ends = []
        events = await collect(submit_to(client, "r", TOKENS, 40, on_end=lambda: ends.append("r")))
        assert [i for event in events[:-1] for i in event.token_ids] == list(range(40))
        assert events[-1] == Finished("r", FinishReason.LENGTH, 1, 0, 40)
        assert ends == ["r"]
        assert client.num_open == 0
        assert client.ready.max_model_len == 160

    with_client(scenario)


def test_a_refusal_is_an_event_of_that_request_only():
    async def scenario(client):
        refused, served = submit_to(client, "no", REFUSE), submit_to(client, "yes", TOKENS, 1)
        assert await collect(refused) == [Failed("no", FailureKind.NO_FIT, "too long")]
        assert await collect(served) == [Tokens("yes", [0]), Finished("yes", FinishReason.LENGTH, 1, 0, 1)]

    with_client(scenario)


def test_an_aborted_request_stays_open_until_the_engine_confirms():
    async def scenario(client):
        ended = asyncio.Event()
        stream = submit_to(client, "r", HANG, on_end=ended.set)
        assert await anext(stream) == Tokens("r", [7])
        stream.abort()
        stream.abort()
        assert client.num_open == 1
        await ended.wait()
        assert client.num_open == 0
        assert await collect(stream) == [Finished("r", FinishReason.ABORT, 1, 0, 0)]
        stream.abort()

    with_client(scenario)


def test_a_second_terminal_event_changes_nothing():
    async def scenario(client):
        ends = []
        stream = submit_to(client, "r", END_TWICE, on_end=lambda: ends.append("r"))
        await anext(stream)
        stream.abort()
        assert len(await collect(stream)) == 1
        await collect(submit_to(client, "after", TOKENS, 1))
        assert ends == ["r"]

    with_client(scenario)


def test_a_consumer_that_does_not_read_does_not_delay_the_others():
    async def scenario(client):
        slow = submit_to(client, "slow", TOKENS, 5000)
        await collect(submit_to(client, "fast", TOKENS, 3))
        tokens, end = await collect(slow)
        assert tokens.token_ids == list(range(5000))
        assert end.num_output_tokens == 5000

    with_client(scenario)


def test_too_many_open_requests_are_refused_at_the_door():
    async def scenario(client):
        streams = [submit_to(client, f"r{i}", HANG) for i in range(3)]
        with pytest.raises(OverloadedError):
            submit_to(client, "one more", HANG)
        streams[0].abort()
        async for _ in streams[0]:
            pass
        submit_to(client, "one more", HANG)

    with_client(scenario, max_num_seqs=1, max_queued_requests=2)


@pytest.mark.parametrize("how", ["killed", "crashed"])
def test_when_the_engine_dies_every_open_request_fails_within_two_seconds(how):
    async def scenario(client):
        ends = []
        streams = [submit_to(client, f"r{i}", HANG, on_end=lambda i=i: ends.append(i)) for i in range(20)]
        for stream in streams:
            await anext(stream)
        started_s = time.monotonic()
        if how == "killed":
            os.kill(client.pid, signal.SIGKILL)
        else:
            streams.append(submit_to(client, "killer", DIE))
        for stream in streams:
            (event,) = await collect(stream)
            assert isinstance(event, Failed)
            assert event.kind is FailureKind.ENGINE_DEAD
        assert time.monotonic() - started_s < 2
        await client.died.wait()
        assert client.state is EngineState.DEAD
        assert sorted(ends) == list(range(20))
        assert client.num_open == 0
        with pytest.raises(EngineUnavailableError):
            submit_to(client, "late", TOKENS, 1)
        streams[0].abort()

    with_client(scenario)


def test_a_failing_release_does_not_stop_the_other_requests():
    async def scenario(client):
        def broken():
            raise RuntimeError("broken")

        await collect(submit_to(client, "r", TOKENS, 1, on_end=broken))
        assert len(await collect(submit_to(client, "s", TOKENS, 1))) == 2

    with_client(scenario)


@pytest.mark.parametrize(("behaviour", "reason"), [("fails", "config.json: no such file"), ("crashes", "exit code 9")])
def test_an_engine_that_cannot_start_says_why(behaviour, reason):
    async def scenario():
        client = client_of(behaviour)
        await client.start()
        with pytest.raises(EngineUnavailableError, match=reason):
            await client.wait_ready()
        with pytest.raises(EngineUnavailableError):
            submit_to(client, "r", TOKENS, 1)
        await client.died.wait()
        await client.close()

    asyncio.run(scenario())


def test_a_start_that_takes_too_long_is_given_up():
    async def scenario():
        client = client_of("hangs", engine_start_timeout_s=0.01)
        await client.start()
        with pytest.raises(EngineUnavailableError, match=r"0\.01 s"):
            await client.wait_ready()
        await client.close()
        assert client.state is EngineState.CLOSED

    asyncio.run(scenario())


def test_nothing_can_be_submitted_before_the_engine_is_ready():
    async def scenario():
        client = client_of()
        await client.start()
        with pytest.raises(EngineUnavailableError):
            submit_to(client, "r", TOKENS, 1)
        await client.close()

    asyncio.run(scenario())


def test_close_leaves_no_process_no_socket_and_no_open_request():
    async def scenario():
        client = client_of()
        await client.start()
        await client.wait_ready()
        ends = []
        stream = submit_to(client, "r", HANG, on_end=lambda: ends.append("r"))
        await anext(stream)
        await client.close()
        await client.close()
        assert ends == ["r"]
        assert isinstance((await collect(stream))[-1], Failed)
        assert not client.died.is_set()
        assert client.exit_code == 0
        assert not client._address.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(scenario())


def test_an_engine_that_does_not_leave_is_killed(monkeypatch):
    monkeypatch.setattr("server.api.engine_client.CLOSE_TIMEOUT_S", 0.2)

    async def scenario():
        client = client_of("stays")
        await client.start()
        await client.wait_ready()
        await client.close()
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(scenario())


def test_a_flood_of_events_leaves_the_loop_to_other_tasks():
    class Flood:
        """Always has another frame, so receiving never suspends."""

        num_frames = 0

        async def receive(self):
            self.num_frames += 1
            return [Tokens("nobody", [1])]

    async def scenario():
        client, flood = client_of(), Flood()
        reader = asyncio.create_task(client._read(flood))
        for _ in range(10):
            await asyncio.sleep(0)
        assert 1 <= flood.num_frames <= 11
        reader.cancel()

    asyncio.run(scenario())


def test_an_engine_whose_messages_cannot_be_read_ends_every_request_and_can_be_closed():
    class Garbage:
        """Every frame is broken, those that an ended engine left behind too."""

        async def receive(self):
            raise ValueError("broken")

        async def receive_within(self, timeout_s):
            raise ValueError("broken")

        def close(self):
            pass

    async def scenario():
        async with asyncio.timeout(60):
            client = client_of()
            await client.start()
            await client.wait_ready()
            stream = submit_to(client, "r", HANG)
            reader = asyncio.create_task(client._read(Garbage()))
            await client._watch(Garbage(), client._process, reader)
            assert client.died.is_set()
            assert (await collect(stream))[-1].kind is FailureKind.ENGINE_DEAD
            await client.close()

    asyncio.run(scenario())


def test_a_request_that_is_too_large_for_the_channel_is_refused_and_not_open(monkeypatch):
    async def scenario(client):
        monkeypatch.setattr("server.transport.MAX_MESSAGE_BYTES", 1000)
        with pytest.raises(PayloadTooLargeError):
            submit_to(client, "r", *range(2000))
        assert client.num_open == 0

    with_client(scenario)
