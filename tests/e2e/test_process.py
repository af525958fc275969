import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server_process import ROOT, TINY, UVICORN, ServerProcess, wait_until

pytestmark = pytest.mark.e2e

ENDLESS = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 100_000, "ignore_eos": True}


def test_when_the_engine_is_killed_requests_fail_and_the_process_ends_with_a_code():
    with ServerProcess() as server, httpx.Client(timeout=30) as client:
        with client.stream("POST", server.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(httpx.post, server.url + "/v1/chat/completions", json=ENDLESS, timeout=30)
                wait_until(lambda: server.metric("m3_sequences_open") == 2, 10)
                os.kill(server.engine_pid(), signal.SIGKILL)
                killed_s = time.monotonic()
                rest = [line for line in lines if line]
                answer = waiting.result()
                assert time.monotonic() - killed_s < 2
        assert '"code":"engine_unavailable"' in rest[-1]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert server.process.wait(20) == 1
        assert "the engine died" in server.log


def test_a_checkpoint_that_cannot_be_used_ends_the_process_with_a_short_message(tmp_path):
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--model", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "config.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_several_workers_are_refused():
    command = [*UVICORN, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "M3_MODEL": str(TINY)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert "--workers" in result.stderr
    assert "Traceback" not in result.stderr
