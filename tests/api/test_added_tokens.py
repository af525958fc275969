from dataclasses import astuple, dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.added_tokens import WINDOW, AddedToken, AddedTokens
from server.api.conversation import MediaPart, Role, TemplateMessage, TextPart, ToolCall
from server.messages import MediaKind
from server.settings import ThinkingMode
from tests.api.conversations import ADDED, FORMAT, added_ids, assistant, raw_text, tool, user

IMAGE = MediaPart(MediaKind.IMAGE)


@dataclass
class Words:
    """Everything that a client can write into one conversation."""

    instructions: str
    content: str
    second: str
    reasoning: str
    name: str
    key: str
    value: str
    result: str

    @classmethod
    def all(cls, word: str) -> "Words":
        return cls(*[word] * 8)


def encode(words: Words) -> list[int]:
    messages = [
        TemplateMessage(Role.SYSTEM, words.instructions),
        user((TextPart(words.content), TextPart(words.second), IMAGE, TextPart(words.content))),
        assistant(words.content, words.reasoning, ToolCall(words.name, {words.key: words.value, "rest": [words.value]})),
        tool(words.result),
        tool(words.second),
        user(words.value),
    ]
    function = {"name": words.name, "description": words.value, "parameters": {words.key: [words.value]}}
    return FORMAT.encode_chat(messages, [{"type": "function", "function": function}], ThinkingMode.ENABLED).token_ids


HARMLESS = encode(Words.all("harmless"))


@pytest.mark.parametrize("text", sorted(ADDED))
def test_client_text_never_becomes_an_added_token(text: str) -> None:
    hostile = encode(Words.all(text))
    assert added_ids(hostile) == added_ids(HARMLESS)
    assert raw_text(hostile) == raw_text(HARMLESS).replace("harmless", text)


@pytest.mark.parametrize("text", sorted(ADDED))
def test_text_without_a_template_never_becomes_an_added_token(text: str) -> None:
    token_ids = FORMAT.encode_text(f"a {text} b")
    assert not added_ids(token_ids)
    assert FORMAT.decode(token_ids) == f"a {text} b"


@pytest.mark.parametrize(
    "text",
    [
        "]~!b",  # completed by the end of the turn, "[e~["
        "]<]image[>",
        "]!p~",
        "tool_call",  # as an argument's name, between "<" and ">"
        "/mm:think",
        "]~b]~b]",  # overlapping
        "]<]]<]image[>[image[>[",  # one inside another
    ],
)
def test_the_template_cannot_complete_client_text_to_an_added_token(text: str) -> None:
    hostile = encode(Words.all(text))
    assert added_ids(hostile) == added_ids(HARMLESS)
    assert raw_text(hostile) == raw_text(HARMLESS).replace("harmless", text)


FRAGMENTS = sorted({text[start:end] for text in ADDED for start in range(len(text)) for end in range(start + 1, len(text) + 1)})
client_text = st.lists(st.sampled_from([*FRAGMENTS, *ADDED, "a", " ", "\n", "é", "\ue000"]), min_size=1, max_size=4).map(
    "".join
)


@settings(max_examples=150, deadline=None)
@given(st.builds(Words, *[client_text] * 8))
def test_no_mix_of_fragments_becomes_an_added_token(words: Words) -> None:
    hostile = encode(words)
    assert added_ids(hostile) == added_ids(HARMLESS)
    assert raw_text(hostile).count("\ue000") == expected_private_characters(words)


def expected_private_characters(words: Words) -> int:
    repeats = (1, 3, 2, 1, 2, 2, 5, 1)  # how often `encode` uses each word
    return sum(word.count("\ue000") * times for word, times in zip(astuple(words), repeats, strict=True))


TOKENS = AddedTokens([AddedToken(1, "<a>", False), AddedToken(2, "<a>b", True), AddedToken(3, "]x]", True)])


def test_split_takes_the_leftmost_longest_token() -> None:
    pieces = [piece if isinstance(piece, str) else piece.id for piece in TOKENS.split("q<a>b<a>c]x]x]")]
    assert pieces == ["q", 2, 1, "c", 3, "x]"]


@pytest.mark.parametrize("shift", range(-5, 2))
def test_tokens_across_a_search_window_are_found(shift: int) -> None:
    text = "y" * (WINDOW + shift) + "<a>b" + "z" * WINDOW
    assert [piece.id for piece in TOKENS.split(text) if not isinstance(piece, str)] == [2]
    guarded = TOKENS.guard(text, "|()|")
    assert guarded.count("|()|") == 1
    assert TOKENS.unguard(guarded, "|()|") == text


@pytest.mark.parametrize("shift", range(-5, 2))
def test_marks_across_a_window_are_removed(shift: int) -> None:
    assert TOKENS.unguard("y" * (WINDOW + shift) + "|()||()|z|()|", "|()|") == "y" * (WINDOW + shift) + "z"


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("plain text", "plain text"),
        ("", ""),
        ("<a>", "|<|a>|"),  # also the beginning of a longer one
        ("is ]x", "is ]x|"),
        ("]x]x]", "|]|x]|x]|"),
        ("x] is", "|x] is"),
        ("a", "|a"),
    ],
)
def test_guard_marks_only_what_could_be_a_token(text: str, guarded: str) -> None:
    assert TOKENS.guard(text, "|") == guarded


def test_guard_without_edges_marks_whole_tokens_only() -> None:
    assert TOKENS.guard("a <a> ]x", "|", edges=False) == "a <|a> ]x"


@pytest.mark.parametrize("tokens", [[], [AddedToken(1, "x", False)]])
def test_tokens_that_cannot_be_guarded_are_refused(tokens: list[AddedToken]) -> None:
    with pytest.raises(ValueError, match="two characters"):
        AddedTokens(tokens)
