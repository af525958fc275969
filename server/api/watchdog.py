"""Tells a part of the server that hangs from one that is busy, in a thread of its own.

A part beats whenever it gets something done; one that has been silent for longer than any honest step can take hangs. Load
is no silence: a full engine ends steps, a busy event loop takes turns. Time in which this thread did not run either, as in a
suspended machine, does not count.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

MAX_PERIOD_S: Final = 1.0


@dataclass
class _Part:
    read: Callable[[], int]
    last_beat: int = 0
    silent_s: float = 0.0


class Watchdog:
    """`start` and `stop` frame its life.

    Attributes:
        stalled: name of the part that hangs; None while all are well.
    """

    def __init__(self, beats: Mapping[str, Callable[[], int]], limit_s: float, on_stall: Callable[[str], None]) -> None:
        """Set up, without a thread.

        Args:
            beats: for each part, by name, what changes whenever it beats; 0 while it need not.
            limit_s: silence that is taken for a hang.
            on_stall: called once, in the watchdog's thread, with the first part's name.
        """
        self.stalled: str | None = None
        self._parts = {name: _Part(read) for name, read in beats.items()}
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._period_s = min(MAX_PERIOD_S, limit_s / 4)
        self._looked_s: float | None = None
        self._is_over = threading.Event()

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more; does not wait."""
        self._is_over.set()

    def look(self, now_s: float) -> None:
        """One look at all parts."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, 2 * self._period_s)
        self._looked_s = now_s
        for name, part in self._parts.items():
            beat = part.read()
            part.silent_s = part.silent_s + passed_s if beat and beat == part.last_beat else 0.0
            part.last_beat = beat
            if part.silent_s >= self._limit_s and self.stalled is None:
                self.stalled = name
                self._on_stall(name)

    def _run(self) -> None:
        while not self._is_over.wait(self._period_s):
            self.look(time.monotonic())
