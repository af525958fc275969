"""The raw text of a reply to reasoning, content and tool calls: the reasoning's and the calls' state machines in one.

A block of calls that begins inside the reasoning ends it; the closer that may follow is dropped. Without tools no text is
taken for a call. Knows nothing of tokens or of the wire.
"""

from server.api.reasoning import Channel, ReasoningSplitter, Segment
from server.api.reply_events import ContentDelta, ReasoningDelta, ReplyEvent
from server.api.tool_markup import MarkupLexer, Tag, TagKind, Text
from server.api.tool_parser import BLOCK, ToolCallParser
from server.settings import ThinkingMode


class ReplyParser:
    """State machine of one reply. `push` any split of the raw text, then `finish` once."""

    def __init__(self, mode: ThinkingMode, tools: ToolCallParser | None) -> None:
        """Args: tools: a new parser for this reply; None where no call is wanted."""
        self._splitter = ReasoningSplitter(mode)
        self._tools = tools
        self._lexer = MarkupLexer()  # looks for a block inside the reasoning
        self._is_past_reasoning = False
        self._end = 0
        self._reasoning_end = 0  # of what the lexer was given

    @property
    def in_reasoning(self) -> bool:
        """Whether text that arrives now would be reasoning."""
        return self._splitter.in_reasoning and not self._is_past_reasoning

    @property
    def is_done(self) -> bool:
        """Whether all calls that were asked for are whole; nothing that comes later is part of the answer."""
        return self._tools is not None and self._tools.is_done

    @property
    def settled_end(self) -> int:
        """Where calls that were begun have come to in the raw text: content that is still to come begins behind it."""
        return 0 if self._tools is None else self._tools.settled_end

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the raw text; returns what is decided, in order."""
        return self._sort(self._splitter.push(text))

    def finish(self, truncated: bool) -> list[ReplyEvent]:
        """The text ended: release what was held back.

        Args:
            truncated: the token limit ended it.
        """
        events = self._sort(self._splitter.flush())
        events.extend(self._end_reasoning())
        if self._tools is not None:
            events.extend(self._tools.finish(truncated))
        return events

    def _sort(self, segments: list[Segment]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for segment in segments:
            start = self._end
            self._end += len(segment.text)
            if segment.channel is Channel.REASONING and not self._is_past_reasoning:
                events.extend(self._reason(segment.text, start))
            elif segment.channel is not Channel.MARKUP:
                events.extend(self._end_reasoning())
                events.extend(self._answer(segment.text, start))
        return events

    def _reason(self, text: str, start: int) -> list[ReplyEvent]:
        if self._tools is None:
            return [ReasoningDelta(start, text)]
        events: list[ReplyEvent] = []
        self._reasoning_end = start + len(text)
        for piece in self._lexer.push(text, start):
            self._is_past_reasoning = self._is_past_reasoning or _begins_calls(piece)
            if self._is_past_reasoning:
                events.extend(self._answer(piece.raw, piece.start))
            else:
                events.append(ReasoningDelta(piece.start, piece.raw))
        return [*events, *self._end_reasoning()] if self._is_past_reasoning else events

    def _end_reasoning(self) -> list[ReplyEvent]:
        """Release what the search for a block held back."""
        was_past, self._is_past_reasoning = self._is_past_reasoning, True
        events: list[ReplyEvent] = []
        for piece in self._lexer.flush(self._reasoning_end):
            events.extend(self._answer(piece.raw, piece.start) if was_past else [ReasoningDelta(piece.start, piece.raw)])
        return events

    def _answer(self, text: str, start: int) -> list[ReplyEvent]:
        if self._tools is None:
            return [ContentDelta(start, text)]
        return list(self._tools.push(text, start))


def _begins_calls(piece: Text | Tag) -> bool:
    if isinstance(piece, Text):
        return False
    return (piece.kind is TagKind.OPEN and piece.name == BLOCK) or (piece.kind is TagKind.INVOKE and bool(piece.name))
