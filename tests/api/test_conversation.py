import json

import pytest

from server.api.conversation import (
    ArrangedMessage,
    JsonObject,
    MediaPart,
    NumberedMedia,
    Role,
    TemplateMessage,
    TextPart,
    ToolCall,
    arrange,
    parse_arguments,
    split_reasoning,
)
from server.errors import BadRequestError
from server.messages import MediaKind

IMAGE = MediaPart(MediaKind.IMAGE)
CALLS = TemplateMessage(Role.ASSISTANT, None, tool_calls=(ToolCall("f", None, "a"), ToolCall("g", None, "b")))


def message(role: str, content: str | None = None) -> TemplateMessage:
    return TemplateMessage(Role(role), content)


def result(text: str, call_id: str | None) -> TemplateMessage:
    return TemplateMessage(Role.TOOL, text, tool_call_id=call_id)


def words(arranged: list[ArrangedMessage]) -> list[str]:
    texts = [[part.text if isinstance(part, TextPart) else "*" for part in turn.content] for turn in arranged]
    return [f"{turn.role}:{'|'.join(parts)}" for turn, parts in zip(arranged, texts, strict=True)]


def test_leading_instructions_become_one_message() -> None:
    given = [message("system", "s1"), message("developer", "d"), message("system", None), message("user", "u")]
    assert words(arrange(given)) == ["system:s1\n\nd", "user:u"]


def test_root_stays_in_front_of_the_instructions() -> None:
    given = [message("root", "r"), message("developer", "d"), message("system", "s"), message("user", "u")]
    assert words(arrange(given)) == ["root:r", "developer:d\n\ns", "user:u"]


def test_later_instructions_are_not_lost() -> None:
    given = [message("user", "u1"), message("system", "s"), message("root", "r"), message("user", "u2")]
    assert words(arrange(given)) == ["user:u1", "user:s", "user:r", "user:u2"]


def test_empty_instructions_leave_the_defaults_to_the_template() -> None:
    assert words(arrange([message("system", ""), message("user", "u")])) == ["user:u"]


def test_adjacent_text_is_joined_and_media_are_numbered() -> None:
    parts = (TextPart("a"), TextPart("b"), IMAGE, TextPart(""), IMAGE, TextPart("c"))
    first, second = arrange([TemplateMessage(Role.USER, parts), TemplateMessage(Role.USER, (IMAGE,))])
    assert first.content == (
        TextPart("ab"),
        NumberedMedia(MediaKind.IMAGE, 0),
        NumberedMedia(MediaKind.IMAGE, 1),
        TextPart("c"),
    )
    assert second.content == (NumberedMedia(MediaKind.IMAGE, 2),)


@pytest.mark.parametrize(
    ("ids", "order"),
    [
        (("b", "a"), ["A", "B"]),
        (("a", "b"), ["A", "B"]),
        (("b", None), ["B", "None"]),
        (("b", "unknown"), ["B", "Unknown"]),
        (("b", "a", "a"), ["A", "A", "B"]),
    ],
)
def test_results_stand_in_the_order_of_their_calls(ids: tuple[str | None, ...], order: list[str]) -> None:
    arranged = arrange([message("user", "u"), CALLS, *[result(str(name).title(), name) for name in ids]])
    assert words(arranged)[2:] == [f"tool:{text}" for text in order]


def test_each_round_of_calls_has_its_own_order() -> None:
    given = [CALLS, result("B1", "b"), result("A1", "a"), CALLS, result("A2", "a"), result("B2", "b")]
    assert words(arrange(given)) == ["assistant:", "tool:A1", "tool:B1", "assistant:", "tool:A2", "tool:B2"]


@pytest.mark.parametrize("before", [[], [message("user", "u")], [message("assistant", "a")]])
def test_result_without_a_call_is_refused(before: list[TemplateMessage]) -> None:
    with pytest.raises(BadRequestError, match="must follow") as raised:
        arrange([*before, result("r", "a")])
    assert raised.value.param == f"messages[{len(before)}].role"


def test_no_messages_are_refused() -> None:
    with pytest.raises(BadRequestError, match="empty"):
        arrange([])


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("plain", "", "plain"),
        ("<mm:think>r</mm:think>c", "r", "c"),
        ("<mm:think>\n r \n</mm:think>\n\nc\n", " r ", "c\n"),
        ("r</mm:think>c", "r", "c"),
        ("</mm:think>c", "", "c"),
        ("<think>r</think>c", "r", "c"),
        ("<think>x</think><mm:think>r</mm:think>c</mm:think>", "r", "c</mm:think>"),
        ("<mm:think>unclosed", "", "<mm:think>unclosed"),
    ],
)
def test_inline_reasoning_is_split_off(text: str, reasoning: str, rest: str) -> None:
    assert split_reasoning(text) == (reasoning, rest)


def test_reasoning_beside_the_content_leaves_the_content_alone() -> None:
    given = TemplateMessage(Role.ASSISTANT, "say </mm:think>", reasoning="r")
    assert arrange([given]) == [ArrangedMessage(Role.ASSISTANT, (TextPart("say </mm:think>"),), "r")]


def test_only_assistants_have_reasoning() -> None:
    assert words(arrange([message("user", "a</think>b")])) == ["user:a</think>b"]


@pytest.mark.parametrize("arguments", ["", "  ", "null", '"null"', "{}", None, {}])
def test_missing_arguments_are_empty(arguments: str | JsonObject | None) -> None:
    assert parse_arguments(arguments, "p") == {}


def test_arguments_keep_order_and_types() -> None:
    parsed = parse_arguments('{"b": 1, "a": [true, null, 2.5, "é"]}', "p")
    assert json.dumps(parsed) == '{"b": 1, "a": [true, null, 2.5, "\\u00e9"]}'


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", '"text"', "nil", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    given = TemplateMessage(Role.ASSISTANT, None, tool_calls=(ToolCall("f"), ToolCall("f", arguments)))
    with pytest.raises(BadRequestError, match="JSON") as raised:
        arrange([given])
    assert raised.value.param == "messages[0].tool_calls[1].function.arguments"
