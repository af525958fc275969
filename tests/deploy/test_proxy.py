"""The proxy samples before the real server: streams pass at once, silence and large bodies too, a client's leaving is seen."""

import os
import re
import signal
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from tests.deploy.processes import chat, event_times, free_port, running
from tests.deploy.tools import DEPLOY
from tests.e2e.server_process import ServerProcess, wait_until

PROXIES = ("nginx", "haproxy")
HEARTBEAT_S = 10


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def start(server):
    """Starts a proxy with its sample; `change` may spoil the text first. Only the two addresses and the paths differ."""

    def started(name, change=lambda text: text):
        folder = Path(tempfile.mkdtemp(prefix="m3-proxy-"))
        folder.chmod(0o755)  # nginx' workers are another user
        port = free_port()
        file = DEPLOY / "proxy" / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]
        text = change(file.read_text()).replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        config = folder / file.name
        config.write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace("/tmp/nginx-", f"{folder}/"))
        arguments = {
            "nginx": ["-c", config, "-e", "stderr", "-g", f"daemon off; pid {folder}/pid;"],
            "haproxy": ["-db", "-f", config],
        }
        url = f"http://127.0.0.1:{port}"
        return running(name, *arguments[name], url=url + "/v1/models", log=folder / "log"), url

    return started


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request, start):
    process, url = start(request.param)
    with process:
        wait_until(lambda: httpx.get(url + "/v1/models").status_code == 200, 10)
        yield url


@pytest.fixture
def client():
    with httpx.Client(timeout=60) as made:
        yield made


def is_spread(times_s):
    """Whether events came one after the other instead of all at the end."""
    return times_s[0] < 0.5 * times_s[-1] and len({round(time_s, 2) for time_s in times_s}) > 5


def test_events_pass_at_once_and_uncompressed(proxy, client):
    body = chat(max_tokens=300, stream=True)
    with client.stream("POST", proxy + "/v1/chat/completions", json=body, headers={"accept-encoding": "gzip"}) as response:
        assert "content-encoding" not in response.headers
        assert response.headers["content-type"].startswith("text/event-stream")
    times_s, events = event_times(client, proxy, chat(max_tokens=300), {"accept-encoding": "gzip"})
    assert events[-1] == "data: [DONE]"
    assert is_spread(times_s)


def test_the_first_event_waits_for_nothing(proxy, client):
    """HAProxy once held it until the system's cork of 200 ms came out; the fastest of three tells that from a busy machine."""
    firsts_s = [event_times(client, proxy, chat(max_tokens=300))[0][0] for _ in range(3)]
    assert min(firsts_s) < 0.15


def test_a_proxy_that_compresses_and_collects_is_noticed(start, client):
    """What the sample avoids: nginx' own defaults for answers, with the server's request not to buffer ignored."""

    def spoil(text):
        text = text.replace("gzip_types application/json;", "gzip_types text/event-stream;")
        return text.replace("proxy_buffering off;", "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;")

    process, url = start("nginx", spoil)
    with process:
        times_s, _ = event_times(client, url, chat(max_tokens=300), {"accept-encoding": "gzip"})
    assert not is_spread(times_s)


def test_a_client_that_leaves_frees_its_sequence(proxy, client, server):
    with client.stream("POST", proxy + "/v1/chat/completions", json=chat(stream=True)) as response:
        lines = response.iter_lines()  # dropped, it would close the response
        next(lines)
        wait_until(lambda: server.metric("m3_sequences_open") == 1, 5)
    wait_until(lambda: server.metric("m3_sequences_open") == 0, 5)


def test_a_large_body_reaches_the_server(proxy, client):
    body = b'{"messages": "' + b"a" * (30 << 20) + b'"}'
    answer = client.post(proxy + "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_probes_and_metrics_stay_inside(proxy, client):
    assert [client.get(proxy + path).status_code for path in ("/metrics", "/readyz", "/")] == [404, 404, 404]


def test_a_silence_longer_than_the_proxy_s_patience_survives(start, client, server):
    """A stream whose engine says nothing: the server's comments keep the connection."""
    patience_s = HEARTBEAT_S + 2
    process, url = start("nginx", lambda text: re.sub(r"proxy_read_timeout \d+s", f"proxy_read_timeout {patience_s}s", text))
    with process:
        engine = server.engine_pid()
        with client.stream("POST", url + "/v1/chat/completions", json=chat(max_tokens=300, stream=True)) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(engine, signal.SIGSTOP)
            timer = threading.Timer(patience_s + 4, os.kill, (engine, signal.SIGCONT))
            timer.start()
            try:
                rest = [line for line in lines if line]
            finally:
                timer.join()
        assert any(line.startswith(":") for line in rest)
        assert rest[-1] == "data: [DONE]"
