"""When what happened to one request, told to the metrics once each: from its arrival over its first token to its last."""

import time

from server.metrics.front import FrontMetrics


class Timeline:
    """The times of one request, which begins now.

    Attributes:
        first_token_s: arrival to first token; None before.
    """

    def __init__(self, metrics: FrontMetrics) -> None:
        self.first_token_s: float | None = None
        self._metrics = metrics
        self._arrival_s = self._submitted_s = self._started_s = self._first_s = time.monotonic()
        self._last_s: dict[int, float] = {}

    def submitted(self) -> None:
        """The engine has the request."""
        self._submitted_s = time.monotonic()

    def tokens(self, index: int, num_tokens: int, started_s: float | None) -> None:
        """Tokens of a choice arrived, which the engine began to compute at `started_s` (None: when it got it)."""
        now_s = time.monotonic()
        if self.first_token_s is None:
            self._first_s = now_s
            self._started_s = max(self._submitted_s, started_s or 0.0)
            self.first_token_s = round(now_s - self._arrival_s, 4)
            self._metrics.first_token(
                self._submitted_s - self._arrival_s, self._started_s - self._submitted_s, now_s - self._started_s
            )
        elif index in self._last_s:
            self._metrics.next_tokens(now_s - self._last_s[index], num_tokens)
        self._last_s[index] = now_s

    def answered(self, num_tokens: int, num_choices: int) -> None:
        """The whole answer is out; it has `num_tokens` in all its choices."""
        last_s = max(self._last_s.values(), default=self._first_s)
        self._metrics.answered(
            time.monotonic() - self._arrival_s, last_s - self._started_s, last_s - self._first_s, num_tokens, num_choices
        )
