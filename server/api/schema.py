"""The body of a chat request as clients send it: names, types and bounds that need no knowledge of the model.

Tags in angle brackets name the branches of a union; they are left out of the paths that errors show.
Unknown fields are ignored; a known field with a wrong value is an error that names it. Numbers are strict: a bool is not an
int, a string is not a number, NaN and Infinity are refused. These models never leave `server/api`; `validate.py` makes the
frozen call out of them.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from server.media.geometry import MAX_LONG_SIDE_CAP, MIN_LONG_SIDE_CAP

# Each choice is a sequence of its own in the engine; more belongs in separate requests, where admission sees it.
MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 16
# A stream holds back up to one stop string; a longer one would stall it and cost a scan of that length per token.
MAX_STOP_LEN: Final = 256
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_MESSAGES: Final = 16_384
MAX_TOOL_CALLS: Final = 1024
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

Number = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]


class Body(BaseModel):
    """Base of all parts of a request body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True, protected_namespaces=())


class TextContent(Body):
    """A text part."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where a picture is, and how large it may be before it is scaled down."""

    url: str
    detail: Literal["auto", "low", "default", "high"] | None = None
    max_long_side_pixel: Annotated[int, Field(ge=MIN_LONG_SIDE_CAP, le=MAX_LONG_SIDE_CAP)] | None = None


class ImageContent(Body):
    """A picture part; clients send the address as an object or as a plain string."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[ImageUrl, Tag("<object>")] | Annotated[str, Tag("<string>")],
        Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
    ]


class VideoContent(Body):
    """A clip part; recognised so that it can be refused by name."""

    type: Literal["video_url"]


def _content_tag(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<string>"


def _part_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in {"text", "image_url", "video_url"} else None


Part = Annotated[
    Annotated[TextContent, Tag("<text>")]
    | Annotated[ImageContent, Tag("<image_url>")]
    | Annotated[VideoContent, Tag("<video_url>")],
    Discriminator(
        _part_tag,
        custom_error_type="unsupported_part",
        custom_error_message="A content part must be an object whose type is text or image_url",
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


class Message(Body):
    """One message of any role; which fields a role needs is checked in `validate.py`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class TemplateKwargs(Body):
    """The template variables that a client may set; anything else in `chat_template_kwargs` is ignored."""

    thinking_mode: Literal["enabled", "disabled", "adaptive"] | None = None
    enable_thinking: bool | None = None


class Thinking(Body):
    """The hosted API's switch."""

    type: Literal["enabled", "disabled", "adaptive"]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)] | None = (
        None
    )
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("<string>")]
            | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<list>")],
            Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    chat_template_kwargs: TemplateKwargs | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    # Accepted by other servers and not here yet: `validate.py` refuses them where ignoring them would change the answer.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    audio: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
