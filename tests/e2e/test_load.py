import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.api.chat_format import ChatFormat
from tests.e2e.server_process import TINY, ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

NUM_SHORT = 15
NUM_TOKENS = 24
LONG_PROMPT_LEN = 20_000
PAUSE_S = 0.05
TIMEOUT_S = 250


def long_text():
    """Text of at least `LONG_PROMPT_LEN` tokens, and hardly more."""
    text = "".join(f"w{i % 97} " for i in range(LONG_PROMPT_LEN))
    num_tokens = len(ChatFormat.load(TINY).encode_text(text))
    return text[: len(text) * LONG_PROMPT_LEN // num_tokens + 10]


class HealthPoller:
    """Asks `/health` again and again; `delays_s` is how long each answer took."""

    def __init__(self, url):
        self.delays_s = []
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _poll(self):
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._is_over.wait(PAUSE_S):
                start_s = time.monotonic()
                client.get(self._url + "/health").raise_for_status()
                self.delays_s.append(time.monotonic() - start_s)


class Streamed:
    """One streamed answer, read in a thread. `is_accepted` is set when the stream is open, `is_answering` at its first text."""

    def __init__(self, url, content):
        self.is_accepted = threading.Event()
        self.is_answering = threading.Event()
        self.lines = []
        self.first_text_s = None
        self.end_s = None
        self._url = url
        self._body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self):
        with httpx.stream("POST", self._url + "/v1/chat/completions", json=self._body, timeout=TIMEOUT_S) as response:
            self.is_accepted.set()
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue  # a comment in a silence, or the end of an event
                self.lines.append(line)
                if len(self.lines) == 2:  # the first has only the role
                    self.first_text_s = time.monotonic()
                    self.is_answering.set()
        self.end_s = time.monotonic()
        assert self.lines[-1] == "data: [DONE]"
        assert f'"completion_tokens":{NUM_TOKENS}' in self.lines[-2]


def test_streams_and_health_go_on_beside_a_long_prompt():
    content = long_text()
    with ServerProcess() as server, HealthPoller(server.url) as poller, ThreadPoolExecutor(NUM_SHORT + 1) as threads:
        short = [Streamed(server.url, f"Tell me story {i}.") for i in range(NUM_SHORT)]
        before, after = short[: NUM_SHORT // 2], short[NUM_SHORT // 2 :]
        reads = [threads.submit(answer.read) for answer in before]
        assert all(answer.is_answering.wait(TIMEOUT_S) for answer in before)
        long = Streamed(server.url, content)
        reads.append(threads.submit(long.read))
        assert long.is_accepted.wait(TIMEOUT_S)
        reads += [threads.submit(answer.read) for answer in after]
        for read in reads:
            read.result(TIMEOUT_S)
    assert int(long.lines[-2].split('"prompt_tokens":')[1].split(",")[0]) >= LONG_PROMPT_LEN
    # The long prompt is computed in chunks between the others' tokens: they are done before it has begun to answer, also
    # those that came after it.
    assert max(answer.end_s for answer in short) < long.first_text_s
    # One slow answer may be the machine's; a blocked event loop shows in many, or in seconds.
    assert statistics.quantiles(poller.delays_s, n=20)[-1] < 0.1
    assert max(poller.delays_s) < 0.5
