"""Collects what a choice has to say into deltas: neighbours of one kind become one delta, the order is kept."""

import enum
import secrets
from collections.abc import Sequence

from msgspec import UNSET

from server.api.wire import ChoiceLogprobs, ChunkChoice, Delta, FunctionDelta, TokenLogprob, ToolCallDelta


class _Kind(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    ARGUMENTS = enum.auto()


class _Run:
    """A delta in the making; `call_index` says whose the arguments are and is 0 for other kinds."""

    def __init__(self, kind: _Kind, call_index: int) -> None:
        self.kind = kind
        self.call_index = call_index
        self.texts: list[str] = []
        self.entries: list[TokenLogprob] = []


class DeltaWriter:
    """The deltas of one choice that were not taken yet."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._done: list[ChunkChoice] = []
        self._run: _Run | None = None

    def reasoning(self, text: str) -> None:
        """The next piece of reasoning."""
        if text:
            self._continue(_Kind.REASONING).texts.append(text)

    def content(self, text: str, entries: Sequence[TokenLogprob] = ()) -> None:
        """The next piece of content, with the log-probabilities of the tokens that begin in it."""
        if text:
            run = self._continue(_Kind.CONTENT)
            run.texts.append(text)
            run.entries += entries

    def call(self, index: int, name: str) -> None:
        """A call begins: the one delta with its id and name."""
        self._close()
        call = ToolCallDelta(index, f"call_{secrets.token_hex(12)}", "function", FunctionDelta(name))
        self._done.append(ChunkChoice(self._index, Delta(tool_calls=[call])))

    def arguments(self, index: int, fragment: str) -> None:
        """The next piece of a call's arguments."""
        if fragment:
            self._continue(_Kind.ARGUMENTS, index).texts.append(fragment)

    def take(self) -> list[ChunkChoice]:
        """All deltas since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def _continue(self, kind: _Kind, call_index: int = 0) -> _Run:
        if self._run is None or (self._run.kind, self._run.call_index) != (kind, call_index):
            self._close()
            self._run = _Run(kind, call_index)
        return self._run

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        text = "".join(run.texts)
        logprobs = ChoiceLogprobs(run.entries) if run.entries else None
        match run.kind:
            case _Kind.REASONING:
                delta = Delta(reasoning_content=text, reasoning=text)
            case _Kind.CONTENT:
                delta = Delta(content=text)
            case _Kind.ARGUMENTS:
                delta = Delta(tool_calls=[ToolCallDelta(run.call_index, UNSET, UNSET, FunctionDelta(arguments=text))])
        self._done.append(ChunkChoice(self._index, delta, logprobs))
