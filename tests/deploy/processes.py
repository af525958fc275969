"""Programs that run beside a test, and what waits for them."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import httpx

from tests.deploy.tools import tool
from tests.e2e.server_process import wait_until

START_TIMEOUT_S = 30


def free_port():
    """A port on which nobody listens; the next to ask may get the same, so use it at once."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(url):
    """Whether somebody answers, with whatever status."""
    try:
        httpx.get(url, timeout=2)
    except httpx.TransportError:
        return False
    return True


@contextlib.contextmanager
def running(program, *arguments, url, log):
    """A program until the end of the block, from the moment at which it answers at `url`; its output goes to the file `log`."""
    with log.open("w") as output:
        process = subprocess.Popen([tool(program), *map(str, arguments)], stdout=output, stderr=output, start_new_session=True)
        try:
            wait_until(lambda: process.poll() is not None or answers(url), START_TIMEOUT_S)
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def chat(**fields):
    """A body that gets an answer of exactly `max_tokens` tokens."""
    return {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True, "max_tokens": 100_000, **fields}


def event_times(client, url, body, headers=None):
    """Seconds from the request to each event of a stream, and the raw events."""
    start_s = time.monotonic()
    times_s, events = [], []
    with client.stream("POST", url + "/v1/chat/completions", json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                times_s.append(time.monotonic() - start_s)
                events.append(line)
    return times_s, events
