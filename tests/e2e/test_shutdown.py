"""Signals and exit codes of the real server: a drain, its deadline, a second signal, an engine that hangs."""

import contextlib
import os
import signal
import threading

import httpx
import pytest

from tests.e2e.server_process import SERVE, TINY, UVICORN, ServerProcess, is_running, wait_until

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
EXIT_TIMEOUT_S = 40


def body(**fields):
    return {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True, "max_tokens": 100_000, **fields}


class Stream:
    """A stream that has begun; `rest` reads it to its end."""

    def __init__(self, stack, server, **fields):
        client = stack.enter_context(httpx.Client(timeout=60))
        self.response = stack.enter_context(client.stream("POST", server.url + CHAT, json=body(stream=True, **fields)))
        self._lines = self.response.iter_lines()
        assert next(self._lines).startswith("data: ")

    def rest(self):
        return [line for line in self._lines if line and not line.startswith(":")]


@contextlib.contextmanager
def streaming(server, **fields):
    with contextlib.ExitStack() as stack:
        stream = Stream(stack, server, **fields)  # held here: without its iterator the connection would be closed
        yield stream


def wait_for_line(server, text):
    wait_until(lambda: text in server.log, 20)


def assert_ends_at_once_with_code_zero(server, signum):
    """For a server without requests; it has ended."""
    engine = server.engine_pid()
    server.process.send_signal(signum)
    assert server.process.wait(EXIT_TIMEOUT_S) == 0
    wait_until(lambda: not is_running(engine), 5)
    wait_for_line(server, "Application shutdown complete")
    assert "shutting down: 0 requests" in server.log
    assert "Traceback" not in server.log


def test_a_server_that_had_no_request_ends_at_once_with_code_zero():
    with ServerProcess() as server:
        assert_ends_at_once_with_code_zero(server, signal.SIGINT)


def test_a_server_that_still_loads_ends_at_once_with_code_zero():
    with ServerProcess(wait_for="Uvicorn running") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(EXIT_TIMEOUT_S) == 0
    assert "Traceback" not in server.log


def test_open_streams_go_on_new_requests_are_refused_and_the_exit_is_clean():
    with ServerProcess(UVICORN, M3_MODEL=str(TINY)) as server, streaming(server, max_tokens=600) as stream:
        with httpx.Client() as client:
            assert client.get(server.url + "/readyz").json() == {"state": "ready"}
            server.process.send_signal(signal.SIGTERM)
            wait_for_line(server, "shutting down: 1 requests")
            ready = client.get(server.url + "/readyz")
            kept_alive = client.post(server.url + CHAT, json=body())
            fresh = httpx.post(server.url + CHAT, json=body())
            alive = client.get(server.url + "/livez")
        lines = stream.rest()
        assert server.process.wait(EXIT_TIMEOUT_S) == 0
    assert (ready.status_code, ready.json()) == (503, {"state": "draining"})
    assert alive.status_code == 200
    for refused in (kept_alive, fresh):
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"]
    assert lines[-1] == "data: [DONE]"
    assert "Traceback" not in server.log


def test_the_deadline_ends_what_is_left_with_an_error_and_a_code():
    with ServerProcess(M3_DRAIN_TIMEOUT_S="1") as server, streaming(server) as stream:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=body(), timeout=60)))
        thread.start()
        wait_until(lambda: server.metric("m3_sequences_open") == 2, 10)
        server.process.send_signal(signal.SIGTERM)
        lines = stream.rest()
        thread.join(60)
        assert server.process.wait(EXIT_TIMEOUT_S) == 3
    assert '"code":"shutting_down"' in lines[-1]
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    assert "deadline ended 2 requests" in server.log
    assert "Traceback" not in server.log


def test_an_engine_that_dies_while_the_server_drains_ends_it_with_code_one():
    with ServerProcess() as server, streaming(server) as stream:
        server.process.send_signal(signal.SIGTERM)
        wait_for_line(server, "shutting down: 1 requests")
        os.kill(server.engine_pid(), signal.SIGKILL)
        *_, last = stream.rest()
        assert '"error"' in last
        assert server.process.wait(EXIT_TIMEOUT_S) == 1


def test_the_deadline_holds_for_an_engine_that_hangs():
    with ServerProcess(M3_DRAIN_TIMEOUT_S="1") as server, streaming(server) as stream:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        lines = stream.rest()
        assert server.process.wait(EXIT_TIMEOUT_S) == 3
        assert not is_running(engine)
    assert '"code":"shutting_down"' in lines[-1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_and_its_children_at_once(signum):
    with ServerProcess() as server, streaming(server):
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_for_line(server, "shutting down: 1 requests")
        server.process.send_signal(signum)
        assert server.process.wait(5) == 128 + signum
        wait_until(lambda: not is_running(engine), 5)
    assert "a second signal" in server.log


def test_an_engine_that_hangs_fails_the_liveness_probe_and_ends_the_process_with_stacks_and_a_code():
    with ServerProcess(M3_STALL_TIMEOUT_S="4") as server, streaming(server) as stream:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        wait_until(lambda: server.get("/livez").status_code == 500, 20)
        assert server.get("/readyz").json() == {"state": "failed"}
        lines = stream.rest()
        assert server.process.wait(EXIT_TIMEOUT_S) == 1
    assert '"code":"engine_unavailable"' in lines[-1]
    assert "the engine has done nothing for 4 s" in server.log
    assert "Thread 0x" in server.log


def test_neither_a_busy_nor_an_idle_engine_is_taken_to_hang_and_the_idle_server_ends_at_once():
    with ServerProcess([*SERVE, "--stall-timeout-s", "4"]) as server, streaming(server) as stream:
        wait_until(lambda: server.metric("m3_engine_step_seconds_sum") > 5, 60)
        assert server.get("/livez").status_code == 200
        stream.response.close()
        idle_s = server.metric("m3_engine_idle_seconds_total")
        wait_until(lambda: server.metric("m3_engine_idle_seconds_total") > idle_s + 5, 60)
        assert server.get("/livez").status_code == 200
        assert_ends_at_once_with_code_zero(server, signal.SIGTERM)
