"""The body of a chat request as clients send it: names, types and bounds that need no knowledge of the model.

Unknown fields are ignored; a known field with a wrong value is an error that names it. These models never leave `server/api`;
`validate.py` makes the frozen call out of them.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from server.api.sampling_schema import MAX_LOGPROBS, Body, Number, SamplingBody
from server.media.geometry import IMAGE_AREA, MAX_AREA_CAP, MAX_LONG_SIDE_CAP, MIN_LONG_SIDE_CAP
from server.media.sampling import MAX_FPS, MIN_FPS

MAX_MESSAGES: Final = 16_384
MAX_TOOL_CALLS: Final = 1024
MAX_TOOLS: Final = 1024
MAX_REASONING_DETAILS: Final = 1024


class TextContent(Body):
    """A text part."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where a picture is, and how large it may be before it is scaled down."""

    url: str
    detail: Literal["auto", "low", "default", "high"] | None = None
    max_long_side_pixel: Annotated[int, Field(ge=MIN_LONG_SIDE_CAP, le=MAX_LONG_SIDE_CAP)] | None = None
    max_pixels: Annotated[int, Field(ge=IMAGE_AREA.min_pixels, le=MAX_AREA_CAP)] | None = None


class VideoUrl(ImageUrl):
    """Where a clip is, how large its frames may be, and which of them are taken."""

    fps: Annotated[Number, Field(ge=MIN_FPS, le=MAX_FPS)] | None = None
    max_frames: Annotated[int, Field(ge=1)] | None = None


class ImageContent(Body):
    """A picture part; clients send the address as an object or as a plain string."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[ImageUrl, Tag("<object>")] | Annotated[str, Tag("<string>")],
        Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
    ]


class VideoContent(Body):
    """A clip part; clients send the address as an object or as a plain string, and some send `fps` beside it."""

    type: Literal["video_url"]
    video_url: Annotated[
        Annotated[VideoUrl, Tag("<object>")] | Annotated[str, Tag("<string>")],
        Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
    ]
    fps: Annotated[Number, Field(ge=MIN_FPS, le=MAX_FPS)] | None = None


def _content_tag(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<string>"


def _part_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "image_url", "video_url") else None


Part = Annotated[
    Annotated[TextContent, Tag("<text>")]
    | Annotated[ImageContent, Tag("<image_url>")]
    | Annotated[VideoContent, Tag("<video_url>")],
    Discriminator(
        _part_tag,
        custom_error_type="unsupported_part",
        custom_error_message="A content part must be an object whose type is text, image_url or video_url",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Tag("<parts>")],
    Discriminator(_content_tag),
]


class FunctionCall(Body):
    """A call's function in an assistant's history."""

    name: Annotated[str, Field(min_length=1)]
    arguments: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[dict[str, JsonValue], Tag("<object>")],
            Discriminator(lambda value: "<object>" if isinstance(value, dict) else "<string>"),
        ]
        | None
    ) = None


class ToolCallBody(Body):
    """A call in an assistant's history."""

    id: str | None = None
    function: FunctionCall


class ReasoningDetail(Body):
    """One piece of an assistant's earlier reasoning in a list, a spelling of some gateways."""

    text: str | None = None


class Message(Body):
    """One message of any role; which fields a role needs is checked in `content.py`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Annotated[list[ReasoningDetail], Field(max_length=MAX_REASONING_DETAILS)] | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


class TemplateKwargs(Body):
    """The template variables that a client may set; anything else in `chat_template_kwargs` is ignored."""

    thinking_mode: Literal["enabled", "disabled", "adaptive"] | None = None
    enable_thinking: bool | None = None


class Thinking(Body):
    """The hosted API's switch."""

    type: Literal["enabled", "disabled", "adaptive"]


class NamedFunction(Body):
    """Which function to call."""

    name: str


class NamedTool(Body):
    """The tool choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # Kept as they came: the prompt shows the functions in the client's own words and order.
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<function>")],
            Discriminator(lambda value: "<function>" if isinstance(value, dict) else "<mode>"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: TemplateKwargs | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    # Accepted by other servers and not here: `validate.py` refuses them where ignoring them would change the answer.
    functions: Any = None
    function_call: Any = None
    echo: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    audio: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
