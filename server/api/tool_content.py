"""Decides which text around tool calls a client sees.

Text outside blocks is content, verbatim, but for blanks before, between and behind blocks. Markup is content only when the
whole reply has no call: then the reply is shown as it is, so from the first markup on everything waits for the first call or
for the end. Knows nothing of how calls are written.
"""

import msgspec

from server.api.reply_events import ContentDelta


class _Withheld(msgspec.Struct, frozen=True):
    delta: ContentDelta
    is_markup: bool


class ContentGate:
    """The content of one reply. Every method returns what is decided, in order."""

    def __init__(self) -> None:
        self._has_calls = False
        self._blanks: list[ContentDelta] | None = []  # blanks with no content since the start, or since the last block
        self._withheld: list[_Withheld] = []

    def text(self, start: int, text: str) -> list[ContentDelta]:
        """Text outside blocks that stands at `start`; not empty."""
        delta = ContentDelta(start, text)
        if self._withheld:
            self._withheld.append(_Withheld(delta, is_markup=False))
            return []
        if self._blanks is None:
            return [delta]
        if text.isspace():
            self._blanks.append(delta)
            return []
        return [*self._take_blanks(), delta]

    def markup(self, start: int, text: str) -> None:
        """A tag, or text inside a block but outside its calls."""
        if not self._has_calls:
            self._withheld.append(_Withheld(ContentDelta(start, text), is_markup=True))

    def call(self) -> list[ContentDelta]:
        """A call begins."""
        self._has_calls = True
        withheld, self._withheld = self._withheld, []
        deltas: list[ContentDelta] = []
        for piece in withheld:
            if not piece.is_markup:
                deltas.extend(self.text(piece.delta.start, piece.delta.text))
        self._blanks = []
        return deltas

    def finish(self) -> list[ContentDelta]:
        """The reply ended."""
        if self._has_calls:
            return []
        return [*self._take_blanks(), *(piece.delta for piece in self._withheld)]

    def _take_blanks(self) -> list[ContentDelta]:
        blanks, self._blanks = self._blanks, None
        return blanks or []
