import asyncio
import contextlib
import json
import random
import socket
import time

import pytest

from server.api import generate
from server.api.disconnect import ClientGoneError, unless_client_gone
from server.messages import FailureKind
from tests.api.scripted import CHAT, LiveServer, Say, ScriptedEngine, ScriptedMedia, chat
from tests.e2e.server_process import wait_until

DEADLINE_S = 10
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}


def send(server, body):
    """A connection on which the request was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def read_until(connection, text):
    received = b""
    while text not in received:
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "some tokens"], ids=["mid-prefill", "mid-decode"])
def test_a_client_that_leaves_ends_the_engines_work_within_a_second(stream, text):
    engine, media = ScriptedEngine(Say(text, end=None)), ScriptedMedia()
    body = {"messages": [{"role": "user", "content": [PICTURE]}], "stream": stream, "n": 2}
    with LiveServer(engine, media) as server:
        connection = send(server, body)
        if stream:
            read_until(connection, b"tokens" if text else b"assistant")
        wait_until(lambda: len(engine.submitted) == 2, DEADLINE_S)
        left_s = time.monotonic()
        connection.close()
        wait_until(lambda: engine.num_open == 0, DEADLINE_S)
        assert time.monotonic() - left_s < 1
        assert sorted(engine.aborted) == sorted(submit.request_id for submit in engine.submitted)
        wait_until(lambda: media.num_leases == 0, DEADLINE_S)


def test_a_client_that_leaves_while_its_pictures_are_decoded_never_reaches_the_engine():
    engine, media = ScriptedEngine(Say("x")), ScriptedMedia(hang=True)
    with LiveServer(engine, media) as server:
        connection = send(server, {"messages": [{"role": "user", "content": [PICTURE]}], "stream": True})
        assert media.loading.wait(DEADLINE_S)
        connection.close()
        assert media.load_ended.wait(DEADLINE_S)
        assert not engine.submitted


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing():
    engine = ScriptedEngine(Say("x"))
    with LiveServer(engine) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        with send(server, chat()) as connection:
            assert b"200 OK" in read_until(connection, b"completion_tokens")
        assert len(engine.submitted) == 1


def test_a_body_that_is_sent_too_slowly_is_a_408_and_gives_its_place_back():
    with LiveServer(ScriptedEngine(Say("x")), body_timeout_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
            answer = read_until(connection, b"request_timeout")
        assert b"408" in answer.splitlines()[0]
        wait_until(lambda: server.num_requests == 0, DEADLINE_S)


def test_clients_that_leave_at_any_moment_leave_nothing_behind():
    rng = random.Random(0)
    scripts = [Say("x"), Say("y", end=None), Say("some tokens " * 20), Say("z", end=FailureKind.INTERNAL)]
    engine, media = ScriptedEngine(Say("x")), ScriptedMedia()
    with LiveServer(engine, media) as server:
        for _ in range(60):
            engine.scripts = [rng.choice(scripts)]
            content = [PICTURE] * rng.randint(0, 2) + [{"type": "text", "text": "hi"}]
            body = {"messages": [{"role": "user", "content": content}], "stream": rng.random() < 0.5, "n": rng.randint(1, 3)}
            with send(server, body) as connection:
                connection.settimeout(rng.choice([0.001, 0.01, 0.05]))
                with contextlib.suppress(TimeoutError):
                    connection.recv(rng.choice([1, 65536]))
        wait_until(lambda: server.num_requests == 0, DEADLINE_S)
        assert engine.num_open == 0
        assert media.num_leases == media.num_held == 0


def test_a_finished_request_is_not_aborted():
    engine = ScriptedEngine(Say("x"))
    with LiveServer(engine) as server:
        for stream in (False, True):
            with send(server, chat(stream=stream)) as connection:
                read_until(connection, b"[DONE]" if stream else b"completion_tokens")
    assert not engine.aborted


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(generate, "HEARTBEAT_S", 0.05)
    engine = ScriptedEngine(Say("", end=None))
    with LiveServer(engine) as server:
        connection = send(server, chat(stream=True))
        received = read_until(connection, b": waiting\n\n")
        connection.close()
        assert received.index(b"assistant") < received.index(b": waiting")
        assert engine.abort_seen.wait(DEADLINE_S)


def test_when_the_engine_dies_streams_end_within_two_seconds():
    engine = ScriptedEngine(Say("some tokens", end=None))
    with LiveServer(engine) as server:
        connections = [send(server, chat(stream=True)) for _ in range(4)]
        for connection in connections:
            read_until(connection, b"tokens")
        died_s = time.monotonic()
        server.call(engine.die)
        for connection in connections:
            assert b"engine_unavailable" in read_until(connection, b'"error"')
            connection.close()
        assert time.monotonic() - died_s < 2


def test_work_is_cancelled_when_the_client_is_gone():
    cleaned = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        asyncio.run(unless_client_gone(receive, work()))
    assert cleaned


def test_work_is_cancelled_with_its_caller():
    async def run():
        started, cleaned = asyncio.Event(), asyncio.Event()

        async def work():
            try:
                started.set()
                await asyncio.Event().wait()
            finally:
                cleaned.set()

        task = asyncio.create_task(unless_client_gone(asyncio.Event().wait, work()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return cleaned.is_set()

    assert asyncio.run(run())


def test_a_failure_of_the_work_is_the_callers():
    async def work():
        raise ValueError("mine")

    async def run():
        with pytest.raises(ValueError, match="mine"):
            await unless_client_gone(asyncio.Event().wait, work())

    asyncio.run(run())
