"""A prompt as large as a body may be holds up nobody. Bounds are generous: the machine may be busy with other things."""

import asyncio
import base64
import json
import os
import threading
import tracemalloc
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from benchmarks.long_prompt import chat_body, measure, percentile_ms
from server.api import prepare, service
from tests.api.scripted import CHAT, LiveServer, Say, ScriptedEngine, ScriptedMedia, chat, http_client
from tests.e2e.server_process import ServerProcess, wait_until

NUM_BYTES = 27_000_000
HEALTH_LIMIT_MS = 500
MIN_WORKER_S = 0.1  # of processor time for one prompt: parsing alone takes longer


def cpu_s(pid):
    """Processor time that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.slow
def test_health_and_streams_go_on_while_a_process_of_their_own_prepares_prompts_of_27_megabytes():
    body = chat_body("The quick brown fox. " * (NUM_BYTES // 21))
    with ServerProcess(M3_PREPARE_WORKERS="1") as server:
        worker = server.child_pid("server.api.prepare_worker")
        before_s = cpu_s(worker)
        url = urlsplit(server.url)
        phases = asyncio.run(measure((url.hostname, url.port), 4, body, num_rounds=1, phase_s=3))
        assert server.child_pid("server.api.prepare_worker") == worker
        worker_s = cpu_s(worker) - before_s
    quiet, large, burner = phases
    assert worker_s > MIN_WORKER_S * len(large.prompts_s)
    assert percentile_ms(large.health_s, 90) < HEALTH_LIMIT_MS
    assert len(large.gaps_s) > 50
    slowest_ms = max(percentile_ms(phase.gaps_s, 90) for phase in (quiet, burner))
    assert percentile_ms(large.gaps_s, 90) < 2 * slowest_ms + 50


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_body_is_never_parsed_here_and_not_kept_while_its_answer_is_generated(stream, monkeypatch):
    body = msgspec.json.encode(chat(stream=stream, metadata={"ignored": "x" * 20_000_000}))
    parse, parsed = prepare.parse, []
    monkeypatch.setattr(prepare, "parse", lambda model, raw: parsed.append(len(raw)) or parse(model, raw))
    engine = ScriptedEngine(Say("", end=None))
    with LiveServer(engine) as server:
        small = threading.Thread(target=lambda: httpx.post(server.url + CHAT, json=chat(), timeout=60))
        small.start()
        wait_until(lambda: engine.submitted, 30)
        sender = threading.Thread(target=lambda: httpx.post(server.url + CHAT, content=body, timeout=60))
        tracemalloc.start()
        try:
            sender.start()
            wait_until(lambda: len(engine.submitted) == 2, 60)
            assert tracemalloc.get_traced_memory()[1] > len(body)
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < len(body) // 4, 10)
        finally:
            tracemalloc.stop()
        for message in engine.submitted:
            server.call(lambda request_id=message.request_id: engine.end(request_id))
        for thread in (small, sender):
            thread.join()
        assert server._app.state.service.bodies.num_bytes == 0
    assert parsed == [len(json.dumps(chat(), separators=(",", ":")))]


def test_bodies_that_are_being_read_share_a_budget(monkeypatch):
    monkeypatch.setattr(service, "MAX_THREAD_BYTES", 1 << 30)
    picture = {"type": "image_url", "image_url": {"url": "data:;base64," + "aGVsbG8h" * 200}}
    body = json.dumps({"messages": [{"role": "user", "content": [picture]}]}).encode()
    media = ScriptedMedia(hang=True)

    async def scenario():
        async with asyncio.timeout(30):
            engine = ScriptedEngine(Say("x"))
            async with http_client(engine, media, max_bodies_bytes=2 * len(body) - 1, max_body_bytes=len(body)) as client:
                loading = asyncio.create_task(client.post(CHAT, content=body))
                await asyncio.to_thread(media.loading.wait, 20)  # its pictures are decoded: as good as being read
                refused = await client.post(CHAT, content=body)
                assert (await client.post(CHAT, json=chat())).status_code == 200
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                media._hang = False
                return refused, await client.post(CHAT, content=body)

    refused, taken = asyncio.run(scenario())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) > 0
    assert taken.status_code == 200


def test_pictures_of_a_large_body_arrive_whole():
    pictures = [bytes([number]) * 1_000_001 for number in range(3)]
    urls = ["data:;base64," + base64.b64encode(data).decode() for data in pictures]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = chat([*content, {"type": "text", "text": "word " * 100_000}])

    async def answer(media, max_model_len):
        engine = ScriptedEngine(Say("ok"), max_model_len=max_model_len)
        async with asyncio.timeout(60), http_client(engine, media) as client:
            response = await client.post(CHAT, json=body)
            assert len(client._transport.app.state.service._large_bodies.pids) == 1
            return response

    media = ScriptedMedia()
    refused = asyncio.run(answer(media, 4096))
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert media.planned == []
    taken = asyncio.run(answer(media, 500_000))
    assert taken.json()["choices"][0]["message"]["content"] == "ok"
    assert [source.data for source in media.planned] == pictures
