"""How far the loading of weights is: bytes and time left, as a bar on a terminal and as a few lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

_BAR_WIDTH = 30
_REDRAW_INTERVAL_S = 0.1
_LOG_FRACTIONS = 4  # lines when the stream is not a terminal


class Progress(Protocol):
    """Follows one load."""

    def start(self, total_bytes: int) -> None:
        """Loading begins and will read that many bytes."""

    def advance(self, num_bytes: int) -> None:
        """That many more bytes are read."""

    def finish(self) -> None:
        """Everything is read."""


class NoProgress:
    """Follows a load without a word."""

    def start(self, total_bytes: int) -> None:
        """Nothing is shown."""

    def advance(self, num_bytes: int) -> None:
        """Nothing is shown."""

    def finish(self) -> None:
        """Nothing is shown."""


class ProgressBar:
    """Draws on a text stream, stderr by default."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._total_bytes = self._read_bytes = self._lines = 0
        self._started_s = self._drawn_s = 0.0

    def start(self, total_bytes: int) -> None:
        """Begin at zero."""
        self._total_bytes, self._read_bytes, self._lines = total_bytes, 0, 0
        self._started_s = self._drawn_s = self._clock()

    def advance(self, num_bytes: int) -> None:
        """Count and, if it is time, draw."""
        self._read_bytes += num_bytes
        now_s = self._clock()
        if self._is_terminal:
            if now_s - self._drawn_s >= _REDRAW_INTERVAL_S:
                self._drawn_s = now_s
                self._stream.write("\r" + self._render(now_s))
                self._stream.flush()
        elif (
            self._read_bytes * _LOG_FRACTIONS >= self._total_bytes * (self._lines + 1) and self._read_bytes < self._total_bytes
        ):
            self._lines = self._read_bytes * _LOG_FRACTIONS // max(1, self._total_bytes)
            self._stream.write(self._render(now_s) + "\n")

    def finish(self) -> None:
        """Draw the last state and end the line."""
        self._stream.write(("\r" if self._is_terminal else "") + self._render(self._clock()) + "\n")
        self._stream.flush()

    def _render(self, now_s: float) -> str:
        fraction = self._read_bytes / self._total_bytes if self._total_bytes else 1.0
        elapsed_s = now_s - self._started_s
        filled = int(fraction * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        if self._read_bytes >= self._total_bytes:
            timing = f"in {_duration(elapsed_s)}"
        elif self._read_bytes:
            timing = f"{_duration(elapsed_s / fraction - elapsed_s)} left"
        else:
            timing = "estimating"
        return f"loading weights [{bar}] {_size(self._read_bytes)} of {_size(self._total_bytes)}, {timing}   "


def _size(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
