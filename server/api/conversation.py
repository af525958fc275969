"""A conversation as the chat template needs it: typed messages, put in order and completed.

`arrange` turns what clients send into what the template can render without losing anything: leading instructions become
one message, tool results stand in the order of their calls, arguments are mappings, inline reasoning is split off. It
knows nothing of HTTP, of tokens or of the template's text; which spellings of a field the clients may use is decided by
whoever builds a `TemplateMessage`.
"""

import enum
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from server.errors import BadRequestError
from server.messages import MediaKind

if TYPE_CHECKING:
    JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec decodes structs that hold JSON, and cannot resolve a type that refers to itself
JsonObject = dict[str, JsonValue]

# Inline reasoning in an assistant's content: the current pair first, then the legacy pair.
REASONING_MARKERS = (("<mm:think>", "</mm:think>"), ("<think>", "</think>"))


class Role(enum.StrEnum):
    """Who speaks. `root` is the vendor's role: it replaces the identity text of the system turn."""

    ROOT = "root"
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


INSTRUCTION_ROLES = frozenset({Role.SYSTEM, Role.DEVELOPER})


class TextPart(msgspec.Struct, frozen=True):
    """A piece of text inside a message."""

    text: str


class MediaPart(msgspec.Struct, frozen=True):
    """A place for one picture or clip; the parts of a conversation are numbered in the order they are given."""

    kind: MediaKind


ContentPart = TextPart | MediaPart


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant's history.

    Attributes:
        name: the function's name.
        arguments: the client's JSON text or an object; "", "null" and None mean no arguments.
        id: what tool results refer to; the template does not print it.
    """

    name: str
    arguments: str | JsonObject | None = None
    id: str | None = None


class TemplateMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, before or after `arrange`.

    Attributes:
        role: who speaks.
        content: text, or parts that are joined without separators; None and "" are the same.
        reasoning: an assistant's earlier reasoning (`reasoning_content` or `reasoning` of the wire); None when not sent.
        tool_calls: an assistant's calls; empty for none.
        tool_call_id: on a `tool` message, the call that it answers.
    """

    role: Role
    content: str | tuple[ContentPart, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ArrangedMessage(msgspec.Struct, frozen=True):
    """A message that the template can render as it is.

    Attributes:
        role: who speaks.
        content: adjacent text is one part; a `NumberedMedia` is a picture or clip.
        reasoning: "" for none.
        calls: names with arguments as objects.
    """

    role: Role
    content: tuple["TextPart | NumberedMedia", ...] = ()
    reasoning: str = ""
    calls: tuple["ArrangedCall", ...] = ()


class NumberedMedia(msgspec.Struct, frozen=True):
    """A picture or clip with its number among all media parts of the conversation, in the order the client gave them."""

    kind: MediaKind
    index: int


class ArrangedCall(msgspec.Struct, frozen=True):
    """A call whose arguments were parsed; `id` is kept for templates that print it."""

    name: str
    arguments: JsonObject
    id: str | None


def arrange(messages: Sequence[TemplateMessage]) -> list[ArrangedMessage]:
    """Complete and order a conversation.

    * Leading system and developer messages become one, separated by a blank line. The template prints instructions only at
      the head and would drop later ones silently, so a later one is kept in place as a user turn.
    * The results after an assistant's calls are put in the order of the calls, because the template prints no ids. When an
      id is missing or unknown the client's order stands.
    * An assistant's inline reasoning is split off its content, unless reasoning was sent beside it.

    Raises:
        BadRequestError: no messages, arguments that are not a JSON object, a tool result that follows no call.
    """
    if not messages:
        raise BadRequestError("messages must not be empty", param="messages")
    media_index = 0
    arranged: list[ArrangedMessage] = []
    for position, message in enumerate(messages):
        content, media_index = _numbered(message.content, media_index)
        arranged.append(_completed(message, content, position))
    order = _result_order(messages)
    ordered = [arranged[position] for position in order]
    return list(_merged_instructions(ordered))


def _numbered(
    content: str | tuple[ContentPart, ...] | None, media_index: int
) -> tuple[tuple[TextPart | NumberedMedia, ...], int]:
    """Join adjacent text and number the media from `media_index` on; returns the next free number too."""
    if content is None or isinstance(content, str):
        return ((TextPart(content),) if content else ()), media_index
    parts: list[TextPart | NumberedMedia] = []
    texts: list[str] = []
    for part in content:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        if text := "".join(texts):
            parts.append(TextPart(text))
        texts.clear()
        parts.append(NumberedMedia(part.kind, media_index))
        media_index += 1
    if text := "".join(texts):
        parts.append(TextPart(text))
    return tuple(parts), media_index


def _completed(message: TemplateMessage, content: tuple[TextPart | NumberedMedia, ...], position: int) -> ArrangedMessage:
    """Parse an assistant's arguments and reasoning; other roles carry neither."""
    if message.role is not Role.ASSISTANT:
        return ArrangedMessage(message.role, content)
    calls = tuple(
        ArrangedCall(call.name, parse_arguments(call.arguments, f"messages[{position}].tool_calls[{number}]"), call.id)
        for number, call in enumerate(message.tool_calls)
    )
    if message.reasoning is not None or not content or not isinstance(content[0], TextPart):
        return ArrangedMessage(message.role, content, message.reasoning or "", calls)
    reasoning, text = split_reasoning(content[0].text)
    head = (TextPart(text),) if text else ()
    return ArrangedMessage(message.role, head + content[1:], reasoning, calls)


def split_reasoning(text: str) -> tuple[str, str]:
    """Split inline reasoning off an assistant's text: (reasoning, rest).

    The text before the first closer, after its opener if there is one, is reasoning; newlines around it are dropped, and
    so are those before the rest. The legacy pair counts only where the current closer does not occur.
    """
    for opener, closer in REASONING_MARKERS:
        before, found, after = text.partition(closer)
        if found:
            return before.rpartition(opener)[2].strip("\n"), after.lstrip("\n")
    return "", text


def parse_arguments(arguments: str | JsonObject | None, param: str) -> JsonObject:
    """A call's arguments as an object; "", "null" and None are the empty object.

    Raises:
        BadRequestError: `arguments` is not JSON or not an object; `param` names the call.
    """
    param = f"{param}.function.arguments"
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    try:
        value: JsonValue = json.loads(arguments) if arguments.strip() else None
        if value == "null":
            value = None
    except (ValueError, RecursionError):
        raise BadRequestError("a tool call's arguments must be JSON", param=param) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError("a tool call's arguments must be a JSON object", param=param)
    return value


def _result_order(messages: Sequence[TemplateMessage]) -> list[int]:
    """Positions of the messages with every run of tool results in the order of the calls that it answers."""
    order: list[int] = []
    position = 0
    while position < len(messages):
        if messages[position].role is not Role.TOOL:
            order.append(position)
            position += 1
            continue
        calls = messages[position - 1].tool_calls if position else ()
        if not calls:
            raise BadRequestError(
                "a tool message must follow an assistant message with tool_calls", param=f"messages[{position}].role"
            )
        end = position
        while end < len(messages) and messages[end].role is Role.TOOL:
            end += 1
        rank: dict[str | None, int] = {}
        for number, call in enumerate(calls):
            rank.setdefault(call.id, number)
        run = range(position, end)
        known = all(messages[i].tool_call_id is not None and messages[i].tool_call_id in rank for i in run)
        order.extend(sorted(run, key=lambda i: rank[messages[i].tool_call_id]) if known else run)
        position = end
    return order


def _merged_instructions(messages: Sequence[ArrangedMessage]) -> Iterator[ArrangedMessage]:
    """Yield the messages with the leading instructions in one and later ones as user turns."""
    position = 0
    if messages[0].role is Role.ROOT:
        yield messages[0]
        position = 1
    end = position
    while end < len(messages) and messages[end].role in INSTRUCTION_ROLES:
        end += 1
    leading = [message for message in messages[position:end] if message.content]
    if leading:
        parts = list(leading[0].content)
        for message in leading[1:]:
            parts += [TextPart("\n\n"), *message.content]
        yield ArrangedMessage(leading[0].role, tuple(_joined(parts)))
    for message in messages[end:]:
        later = message.role in INSTRUCTION_ROLES or message.role is Role.ROOT
        yield msgspec.structs.replace(message, role=Role.USER) if later else message


def _joined(parts: Sequence[TextPart | NumberedMedia]) -> Iterator[TextPart | NumberedMedia]:
    """Join adjacent text parts."""
    text = ""
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
            continue
        if text:
            yield TextPart(text)
        text = ""
        yield part
    if text:
        yield TextPart(text)
