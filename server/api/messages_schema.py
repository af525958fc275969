"""The body of `POST /v1/messages` as clients of Anthropic's API send it: names, types and bounds.

The conventions are those of `sampling_schema.py`: unknown fields are ignored, known ones are strict, union branches are tagged
in angle brackets.
"""

from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from server.api.sampling_schema import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    MAX_STOP_STRINGS,
    Body,
    Number,
    StopString,
)
from server.api.schema import MAX_MESSAGES, MAX_TOOLS

MAX_BLOCKS: Final = 16_384


class TextBlock(Body):
    """Text; `cache_control` and `citations` are ignored."""

    type: Literal["text"]
    text: str


class Base64Source(Body):
    """A picture's bytes."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Body):
    """A picture's address."""

    type: Literal["url"]
    url: str


def _source_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("base64", "url") else None


class MediaBlock(Body):
    """A picture or clip."""

    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(
            _source_tag,
            custom_error_type="unsupported_source",
            custom_error_message="A source must be an object whose type is base64 or url",
        ),
    ]


class ImageBlock(MediaBlock):
    """A picture."""

    type: Literal["image"]


class VideoBlock(MediaBlock):
    """A clip. Anthropic's API has none; its shape here is that of a picture."""

    type: Literal["video"]


class ThinkingBlock(Body):
    """An assistant's earlier reasoning. The signature is accepted whatever it is: nothing depends on it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Reasoning that another server sealed; it cannot be read and is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call in an assistant's history."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, JsonValue]


def _tag_among(*kinds: str) -> Discriminator:
    def tag(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        return f"<{kind}>" if kind in kinds else None

    return Discriminator(
        tag,
        custom_error_type="unsupported_block",
        custom_error_message=f"A content block here must be an object whose type is one of {', '.join(kinds)}",
    )


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")] | Annotated[VideoBlock, Tag("<video>")],
    _tag_among("text", "image", "video"),
]


def _content_tag(value: object) -> str:
    return "<blocks>" if isinstance(value, list) else "<string>"


class ToolResultBlock(Body):
    """What a call returned. `is_error` is accepted; the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[ResultBlock], Tag("<blocks>")],
            Discriminator(_content_tag),
        ]
        | None
    ) = None
    is_error: bool | None = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[VideoBlock, Tag("<video>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    _tag_among("text", "image", "video", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    _tag_among("text", "thinking", "redacted_thinking", "tool_use"),
]
Blocks = Field(min_length=1, max_length=MAX_BLOCKS)


class UserMessage(Body):
    """A user's turn, results of calls included."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[UserBlock], Blocks, Tag("<blocks>")], Discriminator(_content_tag)
    ]


class AssistantMessage(Body):
    """An assistant's turn."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[AssistantBlock], Blocks, Tag("<blocks>")], Discriminator(_content_tag)
    ]


SystemContent = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Tag("<blocks>")],
    Discriminator(_content_tag),
]


class SystemMessage(Body):
    """Instructions among the messages."""

    role: Literal["system"]
    content: SystemContent


def _role_tag(value: object) -> str | None:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("user", "assistant", "system") else None


TurnMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(
        _role_tag,
        custom_error_type="unsupported_role",
        custom_error_message="A message must be an object whose role is user, assistant or system",
    ),
]


class Tool(Body):
    """A tool of the client's own; `type` names the vendor's tools, which this server does not have."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class ToolChoice(Body):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1)] | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """The switch for reasoning; there are no depths, so a budget is checked in form and has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class JsonFormat(Body):
    """A schema for the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is written; `effort` is ignored."""

    format: JsonFormat | None = None


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`: what becomes a prompt."""

    messages: Annotated[list[TurnMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: SystemContent | None = None
    thinking: ThinkingConfig | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

    # Not Anthropic's; the same as in the chat endpoint.
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
