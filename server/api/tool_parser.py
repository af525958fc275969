"""The text of a reply, behind its reasoning, to content and tool calls, as the text arrives.

Three states: content, a block of calls, a call. Whatever goes wrong inside a call ends at the next call's header: parameters
read before it are kept, and no error is remembered. Text inside a block but outside its calls is dropped. Names of functions
are passed through, known or not. The result does not depend on how the text was cut. Knows nothing of tokens, of call ids or
of the wire.
"""

import enum
from collections.abc import Sequence
from typing import Final

from server.api.reply_events import ContentDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart, ToolEvent
from server.api.tool_arguments import ArgumentsStream
from server.api.tool_content import ContentGate
from server.api.tool_markup import MarkupLexer, Tag, TagKind, Text
from server.api.tool_schema import ToolSchemas

BLOCK: Final = "tool_call"
CALL: Final = "invoke"


class _State(enum.Enum):
    CONTENT = enum.auto()
    BLOCK = enum.auto()  # between the calls of a block
    CALL = enum.auto()
    DONE = enum.auto()  # as many calls as asked for


class ToolCallParser:
    """State machine of one reply. `push` any split of the text, then `finish` once.

    Attributes:
        num_calls: calls begun so far.
        settled_end: content that is still to come begins behind this place in the reply's raw text.
    """

    def __init__(self, schemas: ToolSchemas, max_calls: int | None = None) -> None:
        """Args: max_calls: everything behind the end of that many calls is dropped; None for no limit."""
        self.num_calls = 0
        self.settled_end = 0
        self._schemas = schemas
        self._max_calls = max_calls
        self._lexer = MarkupLexer()
        self._gate = ContentGate()
        self._state = _State.CONTENT
        self._state_after_call = _State.BLOCK
        self._arguments: ArgumentsStream | None = None  # of the open call
        self._events: list[ToolEvent] = []
        self._end = 0

    @property
    def is_done(self) -> bool:
        """Whether `max_calls` calls are whole; the rest of the reply need not be generated."""
        return self._state is _State.DONE

    def push(self, text: str, start: int | None = None) -> list[ToolEvent]:
        """Take the next piece of text; returns what is decided, in order.

        Args:
            text: any piece, also empty.
            start: its place in the reply's raw text; None when all of that is pushed.
        """
        start = self._end if start is None else start
        self._end = start + len(text)
        for piece in self._lexer.push(text, start):
            self._take(piece)
        return self._decided()

    def finish(self, truncated: bool) -> list[ToolEvent]:
        """The text ended: release what was held back.

        Args:
            truncated: the token limit ended it. A call that is still open then stays without an end.
        """
        for piece in self._lexer.flush(self._end):
            self._take(piece)
        if self._arguments is not None and truncated:
            self._give(self._arguments.cut())
        else:
            self._end_call()
        self._events.extend(self._gate.finish())
        return self._decided()

    def _take(self, piece: Text | Tag) -> None:
        match self._state:
            case _State.CONTENT:
                self._take_outside(piece)
            case _State.BLOCK:
                self._take_between(piece)
            case _State.CALL if self._arguments is not None:
                self._take_inside(piece, self._arguments)
        if self.num_calls and self._state is not _State.CONTENT:
            self.settled_end = piece.start + len(piece.raw)  # behind a call, what stands around it is no content any more

    def _take_outside(self, piece: Text | Tag) -> None:
        if isinstance(piece, Text):
            self._events.extend(self._gate.text(piece.start, piece.raw))
        elif _is_header(piece):
            self._begin_call(piece.name, _State.CONTENT)  # the block's opener was lost
        else:
            self._gate.markup(piece.start, piece.raw)
            if piece.kind is TagKind.INVOKE or _opens(piece, BLOCK):
                self._state = _State.BLOCK

    def _take_between(self, piece: Text | Tag) -> None:
        if isinstance(piece, Tag) and _is_header(piece):
            self._begin_call(piece.name, _State.BLOCK)
            return
        self._gate.markup(piece.start, piece.raw)
        if isinstance(piece, Tag) and _closes(piece, BLOCK):
            self._state = _State.CONTENT

    def _take_inside(self, piece: Text | Tag, arguments: ArgumentsStream) -> None:
        if isinstance(piece, Text):
            self._give(arguments.text(piece.raw))
        elif piece.kind is TagKind.INVOKE or (_opens(piece, BLOCK) and not arguments.may_open(BLOCK)):
            self._end_call()
            self._take(piece)
        elif _closes(piece, BLOCK) and not arguments.is_open(BLOCK):
            self._end_call()
            self._state = self._state if self.is_done else _State.CONTENT
        elif _closes(piece, CALL) and not arguments.is_open(CALL):
            self._end_call()
        else:
            self._give(_argument_tag(arguments, piece))

    def _begin_call(self, name: str, state_after: _State) -> None:
        self._events.extend(self._gate.call())
        self._events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1
        self._arguments = ArgumentsStream(self._schemas.of(name))
        self._state = _State.CALL
        self._state_after_call = state_after

    def _end_call(self) -> None:
        if self._arguments is None:
            return
        self._give(self._arguments.end())
        self._events.append(ToolCallEnd(self.num_calls - 1))
        self._arguments = None
        self._state = _State.DONE if self.num_calls == self._max_calls else self._state_after_call

    def _give(self, fragment: str) -> None:
        if fragment:
            self._events.append(ToolArgumentsDelta(self.num_calls - 1, fragment))

    def _decided(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events


def merged(events: Sequence[ToolEvent]) -> list[ToolEvent]:
    """Join neighbours that continue each other."""
    runs: list[list[ToolEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_joined(run) for run in runs]


def _continues(last: ToolEvent, event: ToolEvent) -> bool:
    match last, event:
        case ContentDelta(), ContentDelta():
            return last.start + len(last.text) == event.start
        case ToolArgumentsDelta(), ToolArgumentsDelta():
            return last.index == event.index
    return False


def _joined(run: Sequence[ToolEvent]) -> ToolEvent:
    match run[0]:
        case ContentDelta(start=start):
            return ContentDelta(start, "".join(event.text for event in run if isinstance(event, ContentDelta)))
        case ToolArgumentsDelta(index=index):
            return ToolArgumentsDelta(index, "".join(event.fragment for event in run if isinstance(event, ToolArgumentsDelta)))
    return run[0]


def _is_header(tag: Tag) -> bool:
    return tag.kind is TagKind.INVOKE and bool(tag.name)


def _opens(tag: Tag, name: str) -> bool:
    return tag.kind is TagKind.OPEN and tag.name == name


def _closes(tag: Tag, name: str) -> bool:
    return tag.kind is TagKind.CLOSE and tag.name == name


def _argument_tag(arguments: ArgumentsStream, tag: Tag) -> str:
    match tag.kind:
        case TagKind.OPEN:
            return arguments.open(tag.name)
        case TagKind.CLOSE:
            return arguments.close(tag.name)
        case TagKind.BARE:
            return arguments.bare(tag.raw)
    return ""  # a tag that the end of the text cut off
