"""One request's events, from the engine client's reader to one slow or fast consumer.

The mailbox holds at most one merged `Tokens` and the terminal event, so a consumer that does not read costs its own tokens
and nothing else. It knows neither sockets nor HTTP.
"""

import asyncio
import time
from collections.abc import Callable

from server.messages import Failed, Finished, RequestEvent, TerminalEvent, TokenLogprobs, Tokens


class RequestStream:
    """Async iterator over the events of one request; it ends after `Finished` or `Failed`. For one consumer.

    Attributes:
        started_s: `time.monotonic()` when the engine began to compute it; None before.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        """`abort` is called at most once, with the request's id, while the engine has not ended it."""
        self.request_id = request_id
        self.started_s: float | None = None
        self._abort = abort
        self._aborted = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._terminal: TerminalEvent | None = None
        self._exhausted = False
        self._arrival = asyncio.Event()

    def started(self) -> None:
        """The engine begins to compute the request; again after a preemption, which changes nothing here."""
        if self.started_s is None:
            self.started_s = time.monotonic()

    def put(self, event: RequestEvent) -> None:
        """Take the next event from the engine: tokens are merged with tokens that nobody has read yet."""
        if isinstance(event, Finished | Failed):
            self._terminal = event
        else:
            self._token_ids += event.token_ids
            self._logprobs += event.logprobs
            self._prompt_logprobs += event.prompt_logprobs
        self._arrival.set()

    def abort(self) -> None:
        """Ask the engine to stop. Synchronous, may be called again and after the end; the terminal event still comes."""
        if self._terminal is None and not self._aborted:
            self._aborted = True
            self._abort(self.request_id)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestEvent:
        while True:
            if self._token_ids:
                event = Tokens(self.request_id, self._token_ids, self._logprobs, self._prompt_logprobs)
                self._token_ids, self._logprobs, self._prompt_logprobs = [], [], []
                return event
            if self._exhausted:
                raise StopAsyncIteration
            if self._terminal is not None:
                self._exhausted = True
                return self._terminal
            self._arrival.clear()
            await self._arrival.wait()
