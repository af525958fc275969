"""The added tokens: texts that stand for one id, and how client text is kept from becoming one.

The template writes added tokens as text (`]~b]`, `<mm:think>`), next to text that clients wrote. `guard` breaks every added
token that client text contains or could complete together with its surroundings, by a mark that no client can know; what
`split` finds in the rendered text afterwards was written by the template. Knows nothing of byte pairs.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

# A regular expression search holds the interpreter lock, so long texts are searched in windows of this many characters.
WINDOW = 1 << 20


class AddedToken(msgspec.Struct, frozen=True):
    """A text with an id of its own; special ones are never shown to clients."""

    id: int
    text: str
    special: bool


def search(pattern: re.Pattern[str], text: str, start: int, overlap: int) -> re.Match[str] | None:
    """The first match at or after `start`; no match may be longer than `overlap` characters."""
    while start < len(text):
        end = start + WINDOW
        match = pattern.search(text, start, end + overlap)
        if match is not None and match.start() < end:
            return match
        start = end
    return None


class AddedTokens:
    """The added tokens of one tokenizer. Immutable, so it may be used by several threads."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        """Args: tokens: each with a text of at least two characters."""
        self.by_text = {token.text: token for token in tokens}
        texts = sorted(self.by_text, key=lambda text: (-len(text), text))  # the longest match wins
        if not texts or len(texts[-1]) < 2:
            raise ValueError("added tokens must have two characters or more")
        self._texts = texts
        self._longest = len(texts[0])
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        # The first character of a token only, so that overlapping tokens ("]~b]~b]") are all found.
        firsts = sorted({text[0] for text in texts})
        rests = ["|".join(re.escape(text[1:]) for text in texts if text[0] == first) for first in firsts]
        self._beginning = re.compile(
            "|".join(f"{re.escape(first)}(?={rest})" for first, rest in zip(firsts, rests, strict=True))
        )
        self._heads = {text[:length] for text in texts for length in range(1, len(text))}
        self._tails = {text[-length:] for text in texts for length in range(1, len(text))}

    def split(self, text: str) -> Iterator[str | AddedToken]:
        """Cut rendered text into ordinary text (never empty) and added tokens; leftmost and longest match first."""
        start = 0
        while (match := search(self._pattern, text, start, self._longest)) is not None:
            if match.start() > start:
                yield text[start : match.start()]
            yield self.by_text[match.group()]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def guard(self, text: str, mark: str, *, edges: bool = True) -> str:
        """`text` with `mark` inside every added token, and at its ends where its surroundings could complete one.

        Args:
            text: what a client wrote.
            mark: not part of any client text; `text` is what remains when all marks are removed.
            edges: False where the template puts quotes around the text, which occur in no added token.
        """
        windows: list[str] = []
        for begin in range(0, len(text), WINDOW):
            end = begin + WINDOW
            done = begin
            pieces: list[str] = []
            for match in self._beginning.finditer(text, begin, end + self._longest):
                if match.start() >= end:
                    break
                pieces.append(text[done : match.end()])
                done = match.end()
            pieces.append(text[done:end])
            windows.append(mark.join(pieces))
        guarded = "".join(windows)
        if not edges:
            return guarded
        before = mark if self._completes_left(text) else ""
        after = mark if self._completes_right(text) else ""
        return before + guarded + after

    @staticmethod
    def unguard(text: str, mark: str) -> str:
        """`text` without marks."""
        windows: list[str] = []
        begin = 0
        while begin < len(text):
            end = begin + WINDOW
            across = text.find(mark, max(begin, end - len(mark) + 1), end + len(mark) - 1)
            if across >= 0:
                end = across + len(mark)
            windows.append(text[begin:end].replace(mark, ""))
            begin = end
        return "".join(windows)

    def _completes_left(self, text: str) -> bool:
        """Whether a token could begin before `text` and end in it, or behind it."""
        if 0 < len(text) < self._longest and any(text in token for token in self._texts):
            return True
        return any(text[:length] in self._tails for length in range(1, min(self._longest, len(text) + 1)))

    def _completes_right(self, text: str) -> bool:
        """Whether a token could begin in `text` and end behind it."""
        return any(text[-length:] in self._heads for length in range(1, min(self._longest, len(text) + 1)))
