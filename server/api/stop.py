"""Stop strings in streamed text.

A match ends the text before it. Of several matches the one that is complete first wins, whatever the cuts between the
pieces; of those that end at the same character the longest. Text that may still become a stop string is held back.
"""

from collections.abc import Sequence


class _Automaton:
    """Knuth-Morris-Pratt: how much of one pattern the text read so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_len = 0
        # borders[n]: length of the longest proper prefix of pattern[:n] that is also its suffix
        self._borders = [0] * (len(pattern) + 1)
        length = 0
        for end in range(1, len(pattern)):
            while length and pattern[end] != pattern[length]:
                length = self._borders[length]
            length += pattern[end] == pattern[length]
            self._borders[end + 1] = length

    def step(self, char: str) -> bool:
        """Read one character; True when the pattern is complete."""
        while self.matched_len and self.pattern[self.matched_len] != char:
            self.matched_len = self._borders[self.matched_len]
        self.matched_len += self.pattern[self.matched_len] == char
        return self.matched_len == len(self.pattern)


class StopMatcher:
    """Holds back and cuts the text of one sequence; amortised constant work per character and stop string.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Args: stops: non-empty strings; none at all lets everything through."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        # Longest first, so that the longest of those that end together is found first.
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Read more text.

        Returns:
            What may be shown now, and whether a stop string was found. After that everything further is dropped.
        """
        if self.matched is not None:
            return "", True
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                if automaton.step(char) and self.matched is None:
                    self.matched = automaton.pattern
            if self.matched is not None:
                self._held = ""
                return held[: position - len(self.matched)], True
        safe_len = len(held) - max(automaton.matched_len for automaton in self._automata)
        self._held = held[safe_len:]
        return held[:safe_len], False

    def flush(self) -> str:
        """What was held back and did not become a stop string; call it once, at the end."""
        held, self._held = self._held, ""
        return held
