"""The server on two ranks answers like the server on one."""

import os
import signal

import httpx
import pytest

from tests.e2e.server_process import SERVE, ServerProcess, is_running, wait_until
from tests.e2e.test_chat import picture

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city"],
}
SEEDED = {"temperature": 1.1, "seed": 7, "top_p": 0.9, "max_tokens": 24}


def say(*content):
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "Tell me a story."}
CALLS = [
    {"messages": say(TEXT), **GREEDY},
    {"messages": say(TEXT), **SEEDED},
    {"messages": say(picture("PNG"), TEXT), **GREEDY},
    {
        "messages": say(TEXT),
        "temperature": 0,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
    },
]


def answers(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        replies = [client.post("/v1/chat/completions", json=call) for call in CALLS]
    assert [reply.status_code for reply in replies] == [200] * len(CALLS)
    choices = [reply.json()["choices"][0] for reply in replies]
    return [(choice["message"], choice["finish_reason"]) for choice in choices]


def rank_pids(engine_pid):
    with open(f"/proc/{engine_pid}/task/{engine_pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.xdist_group("server")
def test_two_ranks_answer_like_one_and_leave_together(server):
    with ServerProcess((*SERVE, "--tensor-parallel-size", "2")) as two:
        assert answers(two) == answers(server)
        engine_pid = two.engine_pid()
        (worker_pid,) = rank_pids(engine_pid)
        two.process.send_signal(signal.SIGTERM)
        assert two.process.wait(20) == 0
        assert not is_running(engine_pid)
        assert not is_running(worker_pid)


def test_no_rank_outlives_the_front():
    with ServerProcess((*SERVE, "--tensor-parallel-size", "2")) as server:
        engine_pid = server.engine_pid()
        (worker_pid,) = rank_pids(engine_pid)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(engine_pid) and not is_running(worker_pid), 10)
