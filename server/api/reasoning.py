"""Tells reasoning from content in a reply's text, as the text arrives.

The mode decides where a reply starts: `enabled` inside the reasoning (the prompt ends with the opener), `disabled` in the
content, `adaptive` before either, where the first thing that is not blank decides. The first closer ends the reasoning for
good; whatever looks like a marker after that is content. Markers are never part of either text, so the longest suffix that
may still become one is held back until it is decided. Text in, segments out: no tokens, no I/O.
"""

import enum
from typing import Final

import msgspec

from server.settings import ThinkingMode

OPENER: Final = "<mm:think>"
CLOSER: Final = "</mm:think>"


class Channel(enum.Enum):
    """Where a piece of a reply belongs; `MARKUP` belongs to nobody."""

    REASONING = "reasoning"
    CONTENT = "content"
    MARKUP = "markup"


class Segment(msgspec.Struct, frozen=True):
    """Consecutive text of one channel. All segments of a reply, joined, are the reply's text."""

    channel: Channel
    text: str


class _Phase(enum.Enum):
    START = enum.auto()  # blanks and at most one marker before the reply proper
    REASONING = enum.auto()
    CONTENT = enum.auto()


class ReasoningSplitter:
    """State machine of one reply. `push` any split of the text, then `flush` once."""

    def __init__(self, mode: ThinkingMode) -> None:
        self._mode = mode
        self._phase = _Phase.REASONING if mode is ThinkingMode.ENABLED else _Phase.START
        self._at_reasoning_start = True
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether text that arrives now would be reasoning."""
        return self._phase is _Phase.REASONING

    def push(self, text: str) -> list[Segment]:
        """Take the next piece of text; returns what is decided, in order."""
        self._held += text
        segments: list[Segment] = []
        while self._held and self._step(segments):
            pass
        return segments

    def flush(self) -> list[Segment]:
        """The text ended: what was held back is no marker."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Segment(Channel.REASONING if self._phase is _Phase.REASONING else Channel.CONTENT, held)]

    def _step(self, segments: list[Segment]) -> bool:
        """Decide some of the held text; whether there may be more to decide."""
        match self._phase:
            case _Phase.START:
                return self._start(segments)
            case _Phase.REASONING:
                return self._reason(segments)
            case _Phase.CONTENT:
                self._take(segments, Channel.CONTENT, len(self._held))
                return False

    def _start(self, segments: list[Segment]) -> bool:
        num_blank = len(self._held) - len(self._held.lstrip())
        rest = self._held[num_blank:]
        # Without thinking an opener is ordinary text; a repeated closer is dropped in either mode.
        markers = {CLOSER: _Phase.CONTENT}
        if self._mode is ThinkingMode.ADAPTIVE:
            markers[OPENER] = _Phase.REASONING
        for marker, phase in markers.items():
            if rest.startswith(marker):
                self._take(segments, Channel.MARKUP, num_blank + len(marker))
                self._phase = phase
                return True
        if any(marker.startswith(rest) for marker in markers):
            return False
        self._phase = _Phase.CONTENT
        return True

    def _reason(self, segments: list[Segment]) -> bool:
        if self._at_reasoning_start and (self._held.startswith(OPENER) or OPENER.startswith(self._held)):
            if len(self._held) < len(OPENER):
                return False
            self._take(segments, Channel.MARKUP, len(OPENER))
            return True
        self._at_reasoning_start = False
        end = self._held.find(CLOSER)
        if end < 0:
            num_decided = len(self._held) - num_held_back(self._held, CLOSER)
            self._take(segments, Channel.REASONING, num_decided)
            return False
        self._take(segments, Channel.REASONING, end)
        self._take(segments, Channel.MARKUP, len(CLOSER))
        self._phase = _Phase.CONTENT
        return True

    def _take(self, segments: list[Segment], channel: Channel, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            segments.append(Segment(channel, text))


def num_held_back(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
