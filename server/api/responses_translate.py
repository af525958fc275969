"""A body of the Responses API to a body of the chat endpoint: pure, and told apart from the chat's own by nothing later on.

Adjacent items of the assistant's (reasoning, messages, calls) are one turn. Nothing is kept between requests, so whatever
refers to an earlier response is refused.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from server.api.conversation import JsonObject, JsonValue
from server.api.places import Places
from server.api.responses_schema import (
    AllowedTools,
    FunctionCallItem,
    FunctionCallOutputItem,
    ImagePart,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    TextPart,
    ToolName,
    VideoPart,
)
from server.errors import BadRequestError

LOGPROBS = "message.output_text.logprobs"
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}
MEDIA_OPTIONS = ("detail", "max_long_side_pixel", "max_pixels", "fps", "max_frames")
# They carry over as they are.
SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "priority",
    "cache_salt",
    "parallel_tool_calls",
)


class Translation(NamedTuple):
    """A chat body as plain JSON, and where its parts came from."""

    body: JsonObject
    places: Places


class Placed(NamedTuple):
    """An item and where the client put it."""

    item: Item
    place: str


def chat_body(body: ResponsesBody) -> Translation:
    """Translate a body.

    Raises:
        BadRequestError: what the Responses API allows and this server does not, or a result without its call.
    """
    _refuse_memory(body)
    places = Places()
    for field, origin in RENAMED.items():
        places.add(field, origin)
    chat: JsonObject = {name: getattr(body, name) for name in SAME}
    chat["max_tokens"] = body.max_output_tokens
    chat["messages"] = list(_messages(body, places))
    if body.tools:
        chat["tools"] = _tools(body, places)
    choice = body.tool_choice
    if isinstance(choice, ToolName):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chat["tool_choice"] = choice.mode if isinstance(choice, AllowedTools) else choice
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat.update(logprobs=True, top_logprobs=body.top_logprobs or 0)
    chat.update(_thinking(body))
    if body.text is not None and (text_format := body.text.format) is not None:
        schema: JsonObject = {"name": text_format.name, "schema": text_format.json_schema}
        with_schema: JsonObject = {"json_schema": schema} if text_format.type == "json_schema" else {}
        chat["response_format"] = {"type": text_format.type, **with_schema}
    return Translation({key: value for key, value in chat.items() if value is not None}, places)


def _refuse_memory(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise BadRequestError(
                f"{name} is not supported: this server keeps no responses; send the whole conversation in input",
                param=name,
                code="unsupported_value",
            )
    if body.background:
        raise BadRequestError("background is not supported: nothing is kept", param="background", code="unsupported_value")
    if body.prompt is not None:
        raise BadRequestError("prompt is not supported: no prompts are stored", param="prompt", code="unsupported_value")


def _thinking(body: ResponsesBody) -> JsonObject:
    """The switch in whatever spelling; without one the operator's setting decides."""
    fields: JsonObject = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.thinking is not None:
        fields["thinking"] = {"type": body.thinking.type}
    if body.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = body.chat_template_kwargs.model_dump(exclude_none=True)
    return fields


def _tools(body: ResponsesBody, places: Places) -> list[JsonValue]:
    """The functions in the chat's shape; those that may not be called are not shown."""
    allowed = {tool.name for tool in body.tool_choice.tools} if isinstance(body.tool_choice, AllowedTools) else None
    tools: list[JsonValue] = []
    for position, tool in enumerate(body.tools or ()):
        place = f"tools[{position}]"
        if tool.get("type") != "function":
            raise BadRequestError(f"{place}.type must be function: this server has no tools of its own", param=f"{place}.type")
        if allowed is not None and tool.get("name") not in allowed:
            continue
        places.add(f"tools[{len(tools)}].function", place)
        places.add(f"tools[{len(tools)}]", place)
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _messages(body: ResponsesBody, places: Places) -> Iterator[JsonObject]:
    """The conversation as chat messages."""
    position = 0
    if body.instructions:
        places.add("messages[0]", "instructions")
        places.add("messages[0].content", "instructions")
        yield {"role": "system", "content": body.instructions}
        position = 1
    if isinstance(body.input, str):
        places.add(f"messages[{position}]", "input")
        places.add(f"messages[{position}].content", "input")
        yield {"role": "user", "content": body.input}
        return
    known_calls: set[str] = set()
    for group in _groups(body.input):
        item, place = group[0]
        chat_place = f"messages[{position}]"
        places.add(chat_place, place)
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in known_calls:
                raise BadRequestError(f"{place}: no function_call before it has this call_id", param=f"{place}.call_id")
            content = _content(item.output, f"{place}.output", places, chat_place)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif _is_assistants(item):
            known_calls |= {call.call_id for call, _ in group if isinstance(call, FunctionCallItem)}
            yield _assistant(group, places, chat_place)
        else:
            assert isinstance(item, MessageItem)
            yield {"role": item.role, "content": _content(item.content, f"{place}.content", places, chat_place)}
        position += 1


def _is_assistants(item: Item) -> bool:
    return isinstance(item, FunctionCallItem | ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant")


def _groups(items: Sequence[Item]) -> Iterator[list[Placed]]:
    """The items, with adjacent ones of the assistant's together."""
    group: list[Placed] = []
    for position, item in enumerate(items):
        placed = Placed(item, f"input[{position}]")
        if _is_assistants(item):
            group.append(placed)
            continue
        if group:
            yield group
            group = []
        yield [placed]
    if group:
        yield group


def _content(content: str | list[Part], place: str, places: Places, chat_place: str) -> JsonValue:
    if isinstance(content, str):
        return content
    parts: list[JsonValue] = []
    for number, part in enumerate(content):
        chat_part = f"{chat_place}.content[{number}]"
        places.add(chat_part, f"{place}[{number}]")
        for option in MEDIA_OPTIONS if isinstance(part, ImagePart | VideoPart) else ():
            places.add(f"{chat_part}.{_address_field(part)}.{option}", f"{place}[{number}].{option}")
        parts.append(_part(part))
    return parts


def _address_field(part: Part) -> str:
    return "image_url" if isinstance(part, ImagePart) else "video_url"


def _part(part: Part) -> JsonObject:
    if isinstance(part, ImagePart | VideoPart):
        kind = _address_field(part)
        options = part.model_dump(include=set(MEDIA_OPTIONS), exclude_none=True)
        return {"type": kind, kind: {"url": getattr(part, kind), **options}}
    return {"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text}


def _assistant(group: Sequence[Placed], places: Places, chat_place: str) -> JsonObject:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonValue] = []
    for item, place in group:
        if isinstance(item, ReasoningItem):
            thoughts += [piece.text for piece in item.content or item.summary or ()]
        elif isinstance(item, FunctionCallItem):
            chat_call = f"{chat_place}.tool_calls[{len(calls)}]"
            places.add(chat_call, place)
            places.add(f"{chat_call}.function.arguments", f"{place}.arguments")
            function: JsonObject = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            assert isinstance(item, MessageItem)
            texts += [item.content] if isinstance(item.content, str) else _texts(item.content, place)
    # The reasoning is given even where it is empty: the text is then taken as it is, whatever it looks like.
    message: JsonObject = {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts)}
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(parts: Sequence[Part], place: str) -> Iterator[str]:
    for number, part in enumerate(parts):
        if isinstance(part, ImagePart | VideoPart):
            raise BadRequestError("an assistant's message has no pictures or clips", param=f"{place}.content[{number}]")
        yield part.text if isinstance(part, TextPart) else part.refusal
