"""What a reply's text turns out to be, piece by piece. Events in, deltas out is another module's work: no wire format here."""

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of the reasoning.

    Attributes:
        start: place of the piece's first character in the reply's raw text; the piece is a verbatim part of that text.
        text: never empty.
    """

    start: int
    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """The next piece of the content; the attributes are those of a piece of the reasoning."""

    start: int
    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins; `index` counts the calls of the reply from 0, `name` is never empty and need not be a known function."""

    index: int
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments; all pieces of a call that has ended, joined, are one JSON object."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """A call is whole. A call that the token limit cut off has no end, and its arguments are no whole JSON."""

    index: int


ToolEvent = ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
ReplyEvent = ReasoningDelta | ToolEvent
