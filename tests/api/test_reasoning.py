import itertools

import pytest

from server.api.reasoning import Channel, ReasoningSplitter
from server.settings import ThinkingMode

ADAPTIVE, ENABLED, DISABLED = ThinkingMode.ADAPTIVE, ThinkingMode.ENABLED, ThinkingMode.DISABLED

CASES = [
    (ADAPTIVE, "hello", "", "hello"),
    (ADAPTIVE, "<mm:think>why</mm:think>because", "why", "because"),
    (ADAPTIVE, "</mm:think>plain", "", "plain"),
    (ADAPTIVE, " \n<mm:think>a</mm:think>b", "a", "b"),
    (ADAPTIVE, "  spaces stay", "", "  spaces stay"),
    (ADAPTIVE, " \n</mm:think>x", "", "x"),
    (ADAPTIVE, "<mm:think><mm:think>a</mm:think>b", "a", "b"),
    (ADAPTIVE, "<mm:think>never closed", "never closed", ""),
    (ADAPTIVE, "<mm:think>a</mm:think>b<mm:think>c</mm:think>", "a", "b<mm:think>c</mm:think>"),
    (ADAPTIVE, "x</mm:think>y", "", "x</mm:think>y"),
    (ADAPTIVE, "</mm:think></mm:think>x", "", "</mm:think>x"),
    (ADAPTIVE, "<mm:thin", "", "<mm:thin"),
    (ADAPTIVE, "<mm:think>a</mm:th", "a</mm:th", ""),
    (ADAPTIVE, "<mm:think></mm:think>", "", ""),
    (ADAPTIVE, "<mm:thought>", "", "<mm:thought>"),
    (ADAPTIVE, "", "", ""),
    (ADAPTIVE, " \n", "", " \n"),
    (ENABLED, "why</mm:think>because", "why", "because"),
    (ENABLED, "<mm:think>why</mm:think>because", "why", "because"),
    (ENABLED, "</mm:think>because", "", "because"),
    (ENABLED, "a < b and </mm: and a</mm:think>", "a < b and </mm: and a", ""),
    (ENABLED, "<mm:", "<mm:", ""),
    (ENABLED, "only thoughts", "only thoughts", ""),
    (DISABLED, "</mm:think>x", "", "x"),
    (DISABLED, "<mm:think>x", "", "<mm:think>x"),
    (DISABLED, "[SILENCE]", "", "[SILENCE]"),
]


def split(mode, pieces):
    splitter = ReasoningSplitter(mode)
    segments = [segment for piece in pieces for segment in splitter.push(piece)]
    return segments + splitter.flush()


def text_of(segments, channel):
    return "".join(segment.text for segment in segments if segment.channel is channel)


def cuts(text):
    """The text whole, in characters, and cut at every one and every two places."""
    yield [text]
    yield list(text)
    for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:a], text[a:b], text[b:]]


@pytest.mark.parametrize(("mode", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_do_not_depend_on_the_cuts(mode, text, reasoning, content):
    for pieces in cuts(text):
        segments = split(mode, pieces)
        assert text_of(segments, Channel.REASONING) == reasoning, pieces
        assert text_of(segments, Channel.CONTENT) == content, pieces
        assert "".join(segment.text for segment in segments) == text


def test_text_that_cannot_become_a_marker_is_not_held_back():
    splitter = ReasoningSplitter(ENABLED)
    assert [s.text for s in splitter.push("abc<")] == ["abc"]
    assert [s.text for s in splitter.push("d")] == ["<d"]
    assert splitter.in_reasoning
    splitter.push("</mm:think>")
    assert not splitter.in_reasoning
    assert [s.text for s in splitter.push("</mm")] == ["</mm"]
