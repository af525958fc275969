"""The body of `POST /v1/responses` as clients send it: names, types and bounds.

The conventions are those of `sampling_schema.py`: unknown fields are ignored, known ones are strict, union branches are tagged
in angle brackets.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from server.api.sampling_schema import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, MAX_LOGPROBS, MAX_SALT_LEN, Body, Number
from server.api.schema import MAX_MESSAGES, MAX_TOOLS, TemplateKwargs, Thinking

MAX_PARTS: Final = 16_384
MAX_METADATA: Final = 16
MAX_METADATA_KEY_LEN: Final = 64
MAX_METADATA_VALUE_LEN: Final = 512

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Body):
    """Text, the client's or an earlier answer's."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    """An earlier answer that refused."""

    type: Literal["refusal"]
    refusal: str


class MediaPart(Body):
    """How large a picture or the frames of a clip may be; the bounds are those of the chat endpoint."""

    detail: Literal["auto", "low", "default", "high"] | None = None
    max_long_side_pixel: int | None = None
    max_pixels: int | None = None


class ImagePart(MediaPart):
    """A picture."""

    type: Literal["input_image"]
    image_url: str


class VideoPart(MediaPart):
    """A clip. OpenAI's API has none; its shape here is that of a picture."""

    type: Literal["input_video"]
    video_url: str
    fps: Number | None = None
    max_frames: int | None = None


PART_TAGS = {
    "input_text": "<text>",
    "output_text": "<text>",
    "text": "<text>",
    "refusal": "<refusal>",
    "input_image": "<image>",
    "input_video": "<video>",
}


def _part_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return PART_TAGS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[VideoPart, Tag("<video>")],
    Discriminator(
        _part_tag,
        custom_error_type="unsupported_part",
        custom_error_message="A content part must be an object whose type is input_text, input_image, input_video,"
        " output_text or refusal",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<string>"),
]


class MessageItem(Body):
    """A message; clients leave the type out."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Body):
    """A call in the history."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class FunctionCallOutputItem(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content


class ReasoningText(Body):
    """A piece of reasoning, or of its summary."""

    text: str


class ReasoningItem(Body):
    """Earlier reasoning. What other servers sealed in `encrypted_content` cannot be read."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None


def _item_tag(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type") or "message"
    return f"<{kind}>" if kind in ("message", "function_call", "function_call_output", "reasoning") else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_tag,
        custom_error_type="unsupported_item",
        custom_error_message="An input item must be an object whose type is message, function_call, function_call_output or"
        " reasoning; nothing is stored, so items cannot be referred to",
    ),
]


class Reasoning(Body):
    """Whether to reason; there are no depths, and summaries are not made."""

    effort: Effort | None = None


class TextFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: Annotated[JsonValue, Field(alias="schema")] = None


class TextConfig(Body):
    """How the text is written; `verbosity` is ignored."""

    format: TextFormat | None = None


class ToolName(Body):
    """A function by its name."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


class AllowedTools(Body):
    """Only some of the functions may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(min_length=1, max_length=MAX_TOOLS)]


def _choice_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[ToolName, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    Discriminator(
        _choice_tag,
        custom_error_type="unsupported_tool_choice",
        custom_error_message="tool_choice must be none, auto, required, or an object whose type is function or allowed_tools",
    ),
]
MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_LEN)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE_LEN)]


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), Tag("<items>")],
        Discriminator(lambda value: "<items>" if isinstance(value, list) else "<string>"),
    ]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    user: str | None = None

    # They ask for a memory that this server does not have; `store` itself may be asked for and is answered with false.
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    # Not OpenAI's; the same as in the chat endpoint.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LEN)] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None
