"""A prompt as large as a body may be holds up nobody. Times are generous: the machine may be busy with other things."""

import threading
import time
import tracemalloc

import httpx
import msgspec
import pytest

from tests.api.scripted import CHAT, LiveServer, Say, ScriptedEngine, chat
from tests.e2e.server_process import wait_until

NUM_BYTES = 27_000_000
MAX_MODEL_LEN = 300_000
HEALTH_LIMIT_S = 0.5
MEDIAN_LIMIT_S = 0.1


def test_health_and_streams_go_on_while_a_prompt_of_27_megabytes_is_read():
    body = msgspec.json.encode(chat("The quick brown fox. " * (NUM_BYTES // 21)))
    refused, delays_s, num_answers = [], [], 0
    with LiveServer(ScriptedEngine(Say("hello"), max_model_len=MAX_MODEL_LEN), admin_port=0) as server:
        admin_url = f"http://127.0.0.1:{server._app.state.admin.port}"
        sender = threading.Thread(target=lambda: refused.append(httpx.post(server.url + CHAT, content=body, timeout=60)))
        with httpx.Client(timeout=60) as client:
            sender.start()
            while sender.is_alive():
                for url in (server.url, admin_url):
                    start_s = time.monotonic()
                    assert client.get(url + "/health").status_code == 200
                    delays_s.append(time.monotonic() - start_s)
                assert client.post(server.url + CHAT, json=chat(stream=True)).text.endswith("data: [DONE]\n\n")
                num_answers += 1
            sender.join()
    (response,) = refused
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert num_answers > 5
    delays_s.sort()
    assert delays_s[len(delays_s) // 2] < MEDIAN_LIMIT_S
    assert delays_s[len(delays_s) * 9 // 10] < HEALTH_LIMIT_S


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_body_is_not_kept_while_its_answer_is_generated(stream):
    body = msgspec.json.encode(chat(stream=stream, metadata={"ignored": "x" * 20_000_000}))
    engine = ScriptedEngine(Say("", end=None))
    with LiveServer(engine) as server:
        sender = threading.Thread(target=lambda: httpx.post(server.url + CHAT, content=body, timeout=60))
        tracemalloc.start()
        try:
            sender.start()
            wait_until(lambda: engine.submitted, 30)
            num_kept_bytes, num_peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        server.call(lambda: engine.end(engine.submitted[0].request_id))
        sender.join()
    assert num_peak_bytes > len(body)
    assert num_kept_bytes < len(body) // 4
