"""A body in Anthropic's shape to a body in the chat endpoint's: pure, and told apart from the chat's own by nothing later on.

Adjacent messages of one role are one turn, as Anthropic's API has it. The results in a user's turn become tool messages ahead
of the rest of the turn. Reasoning comes back as it was: from `thinking` blocks, whoever signed them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from server.api.conversation import JsonObject, JsonValue
from server.api.messages_schema import (
    AssistantMessage,
    Base64Source,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    VideoBlock,
)
from server.api.places import Places
from server.errors import BadRequestError
from server.settings import ThinkingMode

# Without the field Anthropic's API does not reason, and its clients do not expect blocks that they did not ask for.
THINKING_MODES = {
    None: ThinkingMode.DISABLED,
    "disabled": ThinkingMode.DISABLED,
    "enabled": ThinkingMode.ENABLED,
    "adaptive": ThinkingMode.ADAPTIVE,
    "between_tools": ThinkingMode.ADAPTIVE,
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
RENAMED = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


class Placed(NamedTuple):
    """A block and where the client put it."""

    block: object
    place: str


class Turn(NamedTuple):
    """Adjacent messages of one role."""

    role: str
    blocks: list[Placed]


class Translation(NamedTuple):
    """A chat body as plain JSON, and where its parts came from."""

    body: JsonObject
    places: Places


def chat_body(body: CountTokensBody) -> Translation:
    """Translate a body; one for counting has no sampling fields.

    Raises:
        BadRequestError: what Anthropic's shape allows and this server does not, or a result without its call.
    """
    places = Places()
    for field, origin in RENAMED.items():
        places.add(field, origin)
    messages: list[JsonValue] = list(_system(body, places))
    calls: set[str] = set()
    turns = _turns(body.messages)
    if turns[-1].role == "assistant":
        raise BadRequestError(
            "the last message must be the user's: an answer cannot be begun for the model", param=turns[-1].blocks[0].place
        )
    for turn in turns:
        for message in _messages_of(turn, calls, places, len(messages)):
            messages.append(message)
        calls = {placed.block.id for placed in turn.blocks if isinstance(placed.block, ToolUseBlock)}
    chat: JsonObject = {
        "model": body.model,
        "messages": messages,
        "thinking": {"type": THINKING_MODES[None if body.thinking is None else body.thinking.type].value},
    }
    if body.tools:
        chat["tools"] = [_tool(tool, position, places) for position, tool in enumerate(body.tools)]
    chat.update(_tool_choice(body.tool_choice))
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if isinstance(body, MessagesBody):
        chat.update(_sampling(body))
    return Translation({key: value for key, value in chat.items() if value is not None}, places)


def _sampling(body: MessagesBody) -> JsonObject:
    return {
        "max_tokens": body.max_tokens,
        "stop": list(body.stop_sequences) if body.stop_sequences else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "priority": body.priority,
        "stream": body.stream,
    }


def _system(body: CountTokensBody, places: Places) -> Iterator[JsonObject]:
    """The top-level instructions as a message."""
    text = body.system if isinstance(body.system, str) else "\n\n".join(block.text for block in body.system or ())
    if text:
        places.add("messages[0]", "system")
        places.add("messages[0].content", "system")
        yield {"role": "system", "content": text}


def _turns(messages: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> list[Turn]:
    turns: list[Turn] = []
    for position, message in enumerate(messages):
        place = f"messages[{position}].content"
        if isinstance(message.content, str):
            blocks = [Placed(TextBlock(type="text", text=message.content), place)]
        else:
            blocks = [Placed(block, f"{place}[{number}]") for number, block in enumerate(message.content)]
        if turns and turns[-1].role == message.role:
            turns[-1].blocks.extend(blocks)
        else:
            turns.append(Turn(message.role, blocks))
    return turns


def _messages_of(turn: Turn, calls: set[str], places: Places, position: int) -> Iterator[JsonObject]:
    """The chat messages of one turn, the first of which is number `position`; `calls` are the turn before's."""
    if not turn.blocks:
        return
    if turn.role == "system":
        yield _message("system", turn.blocks, places, position)
        return
    if turn.role == "assistant":
        yield _assistant(turn, places, position)
        return
    rest: list[Placed] = []
    for block, place in turn.blocks:
        if not isinstance(block, ToolResultBlock):
            rest.append(Placed(block, place))
            continue
        if block.tool_use_id not in calls:
            raise BadRequestError(
                f"{place}: no tool_use of the message before has this tool_use_id", param=f"{place}.tool_use_id"
            )
        message = _result(block, place, places, position)
        position += 1
        yield message
    if rest:
        yield _message("user", rest, places, position)


def _message(role: str, blocks: Sequence[Placed], places: Places, position: int) -> JsonObject:
    places.add(f"messages[{position}]", blocks[0].place)
    if len(blocks) == 1 and isinstance(block := blocks[0].block, TextBlock):
        return {"role": role, "content": block.text}
    parts: list[JsonValue] = []
    for block, place in blocks:
        parts.append(_part(block, place, places, f"messages[{position}].content[{len(parts)}]"))
    return {"role": role, "content": parts}


def _part(block: object, place: str, places: Places, chat_place: str) -> JsonObject:
    """A block of text, a picture or a clip as a content part."""
    places.add(chat_place, place)
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    assert isinstance(block, ImageBlock | VideoBlock)
    kind, source = f"{block.type}_url", block.source
    places.add(f"{chat_place}.{kind}", f"{place}.source")
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return {"type": kind, kind: {"url": url}}


def _result(block: ToolResultBlock, place: str, places: Places, position: int) -> JsonObject:
    places.add(f"messages[{position}]", place)
    content: JsonValue = block.content if isinstance(block.content, str) else None
    if isinstance(block.content, list):
        content = [
            _part(inner, f"{place}.content[{number}]", places, f"messages[{position}].content[{number}]")
            for number, inner in enumerate(block.content)
        ]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant(turn: Turn, places: Places, position: int) -> JsonObject:
    places.add(f"messages[{position}]", turn.blocks[0].place)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonValue] = []
    for block, place in turn.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            places.add(f"messages[{position}].tool_calls[{len(calls)}]", place)
            function: JsonObject = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    # The reasoning is given even where it is empty: the text is then taken as it is, whatever it looks like.
    message: JsonObject = {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts)}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: Tool, position: int, places: Places) -> JsonObject:
    place = f"tools[{position}]"
    if tool.type not in (None, "custom"):
        raise BadRequestError(
            f"{place}.type: this server has no tools of its own; only custom tools are supported", param=f"{place}.type"
        )
    if tool.input_schema is None:
        raise BadRequestError(f"{place}.input_schema is required", param=f"{place}.input_schema")
    places.add(f"{place}.function.parameters", f"{place}.input_schema")
    places.add(f"{place}.function", place)
    function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> JsonObject:
    if choice is None:
        return {}
    fields: JsonObject = {}
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequestError("tool_choice.name is required when its type is tool", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = TOOL_CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
