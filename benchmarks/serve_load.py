"""An OpenAI client's load: streamed chat completions, a fixed number open at a time, timed as their bytes arrive.

While requests run, the client only notes when which bytes came; it reads them afterwards, so that it takes little of the
processor from the server beside it.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = (
    *("river", "stone", "light", "window", "garden", "music", "paper", "silver", "mountain", "letter", "winter", "table"),
    *("morning", "market", "bridge", "forest", "number", "circle", "engine", "harbor", "island", "corner", "pocket"),
    *("shadow", "summer", "thunder", "valley", "yellow", "basket", "candle", "doctor", "flower"),
)
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class LoadError(Exception):
    """The server cannot be measured."""


@dataclass(frozen=True)
class Target:
    """Where and how to ask.

    Attributes:
        url: up to and without `/v1`.
        model: name in requests.
        extra: fields of the body that not every server knows, such as `ignore_eos`.
        api_key: sent as a bearer token when there is one.
    """

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """A streamed request."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def client(self) -> httpx.AsyncClient:
        """A client without limits of its own."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=httpx.Timeout(600.0))


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        start_s: when it was asked for.
        text_s: when each piece of text came.
        num_prompt_tokens: as the server counts them; None when it does not say.
        num_output_tokens: likewise; the number of pieces when it does not say.
    """

    start_s: float
    text_s: tuple[float, ...]
    num_prompt_tokens: int | None
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Until the first text."""
        return self.text_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Per token behind the first; None when there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces of text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.text_s)]


def read_stream(start_s: float, reads: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse what came, (when, bytes) per read.

    Raises:
        LoadError: the stream holds an error, or no text.
    """
    text_s: list[float] = []
    usage: Mapping[str, Any] = {}
    pending = b""
    for read_s, data in reads:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or payload == b"[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                raise LoadError(str(event["error"]))
            usage = event.get("usage") or usage
            deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
            if any(delta.get(name) for delta in deltas for name in _TEXT_FIELDS):
                text_s.append(read_s)
    if not text_s:
        raise LoadError("an answer without text")
    return Answer(start_s, tuple(text_s), usage.get("prompt_tokens"), usage.get("completion_tokens") or len(text_s))


async def ask(client: httpx.AsyncClient, target: Target, prompt: str, max_tokens: int) -> Answer:
    """Stream one answer to its end.

    Raises:
        LoadError: the server refused, or answered with an error or nothing.
    """
    reads = []
    start_s = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=target.body(prompt, max_tokens)) as response:
        if response.status_code != 200:
            raise LoadError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for data in response.aiter_raw():
            reads.append((time.perf_counter(), data))
    return read_stream(start_s, reads)


class Prompts:
    """Texts of about `num_tokens` tokens, each different, so that no prefix cache knows more than the template's head."""

    def __init__(self, num_words: int, seed: int) -> None:
        self._num_words = num_words
        self._random = random.Random(seed)

    def next(self) -> str:
        """One more text."""
        return " ".join(self._random.choices(WORDS, k=self._num_words))

    @classmethod
    async def calibrated(cls, client: httpx.AsyncClient, target: Target, num_tokens: int, seed: int = 0) -> "Prompts":
        """Find the number of words by asking the server how long two texts are.

        Raises:
            LoadError: it does not say, or the template alone is longer.
        """
        counts = []
        for num_words in (16, 80):
            answer = await ask(client, target, cls(num_words, seed).next(), 1)
            if answer.num_prompt_tokens is None:
                raise LoadError("the server does not say how many tokens a prompt has")
            counts.append(answer.num_prompt_tokens)
        per_word = (counts[1] - counts[0]) / 64
        num_words = round((num_tokens - counts[0]) / per_word) + 16
        if num_words < 1:
            raise LoadError(f"the template alone has about {counts[0] - 16 * per_word:.0f} tokens")
        return cls(num_words, seed + 1)


@dataclass(frozen=True)
class Level:
    """What came of one concurrency.

    Attributes:
        answers: complete ones.
        errors: of the requests that failed.
        seconds: from the first request to the last byte.
        client_cpu: share of one core that this client took.
    """

    answers: tuple[Answer, ...]
    errors: tuple[str, ...]
    seconds: float
    client_cpu: float


async def run_level(
    client: httpx.AsyncClient, target: Target, prompts: Prompts, concurrency: int, num_requests: int, max_tokens: int
) -> Level:
    """Keep `concurrency` requests open until `num_requests` are done."""
    texts = iter([prompts.next() for _ in range(num_requests)])
    answers: list[Answer] = []
    errors: list[str] = []

    async def worker() -> None:
        for text in texts:
            try:
                answers.append(await ask(client, target, text, max_tokens))
            except (LoadError, httpx.HTTPError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - start_s
    return Level(tuple(answers), tuple(errors), seconds, (time.process_time() - start_cpu_s) / seconds)
