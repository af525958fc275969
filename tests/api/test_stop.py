import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.stop import StopMatcher

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 30), max_size=8)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first match to be complete, and the match; by trying every end."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        emitted, stopped = matcher.push(piece)
        shown += emitted
        assert stopped == (matcher.matched is not None)
    return shown + matcher.flush(), matcher.matched


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@given(TEXTS, STOPS, CUTS)
def test_any_cuts_give_what_trying_every_end_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(cut(text, cuts), stops) == reference(text, stops)


@given(TEXTS, STOPS)
def test_exactly_what_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        emitted, stopped = matcher.push(char)
        shown += emitted
        if stopped:
            break
        suffixes = [text[start:end] for start in range(end) if any(stop.startswith(text[start:end]) for stop in stops)]
        assert shown + max(suffixes, key=len, default="") == text[:end]


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["HI", "DE"], "ABC", "DE"),
        (["CDEF", "DE"], "ABC", "DE"),  # complete first
        (["E", "CDE"], "AB", "CDE"),  # complete together: the longest
        (["XYZ"], "ABCDEFGHIJKL", None),
        ([], "ABCDEFGHIJKL", None),
    ],
)
def test_first_complete_match_wins(stops: list[str], shown: str, matched: str | None) -> None:
    assert run(["ABCDEFGHIJKL"], stops) == (shown, matched)
    assert run(list("ABCDEFGHIJKL"), stops) == (shown, matched)


def test_nothing_of_a_stop_is_shown_before_it_is_known() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("Hello ST") == ("Hello ", False)
    assert matcher.push("O") == ("", False)
    assert matcher.push("RM") == ("STORM", False)
    assert matcher.push("!ST") == ("!", False)
    assert matcher.flush() == "ST"


def test_everything_behind_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("a\nb") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
