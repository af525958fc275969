"""The JSON objects of the Responses API, streamed and whole. `msgspec` encodes them, the type first; None is sent as null."""

from typing import Final

import msgspec

from server.api.conversation import JsonValue
from server.api.wire import TokenLogprob, Usage

COMPLETED: Final = "completed"
IN_PROGRESS: Final = "in_progress"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Reasoning, in full."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """The answer's text."""

    id: str
    status: str
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The reasoning before the answer."""

    id: str
    status: str
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call; `call_id` is what its result refers to."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that came from the prefix cache; nobody is charged for writing it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is not complete."""

    reason: str


class Echo(msgspec.Struct, frozen=True):
    """What a response repeats of its request, or of the defaults that held instead."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, JsonValue]
    temperature: float
    text: dict[str, JsonValue]
    tool_choice: JsonValue
    tools: list[dict[str, JsonValue]]
    top_logprobs: int
    top_p: float
    user: str | None


class Response(Echo, frozen=True, kw_only=True):
    """A response, at any point of its life."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: tuple[OutputItem, ...] = ()
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


class _ResponseEvent(msgspec.Struct, frozen=True):
    """The response as it is now. Events are numbered from 0."""

    sequence_number: int
    response: Response


class _PartEvent(msgspec.Struct, frozen=True):
    """What happens to a part; its item is number `output_index` of the response, and has one part."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int


class Created(_ResponseEvent, frozen=True, tag_field="type", tag="response.created"):
    """The first event."""


class InProgress(_ResponseEvent, frozen=True, tag_field="type", tag="response.in_progress"):
    """The work has begun."""


class ItemAdded(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    """An item begins, empty."""

    sequence_number: int
    output_index: int
    item: OutputItem


class PartAdded(_PartEvent, frozen=True, tag_field="type", tag="response.content_part.added"):
    """A part of an item begins, empty."""

    part: OutputText | ReasoningText


class TextDelta(_PartEvent, frozen=True, tag_field="type", tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: tuple[TokenLogprob, ...]


class TextDone(_PartEvent, frozen=True, tag_field="type", tag="response.output_text.done"):
    """The text is whole."""

    text: str
    logprobs: tuple[TokenLogprob, ...]


class ReasoningDelta(_PartEvent, frozen=True, tag_field="type", tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_PartEvent, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    """The reasoning is whole."""

    text: str


class ArgumentsDelta(msgspec.Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    """The arguments are whole."""

    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class PartDone(_PartEvent, frozen=True, tag_field="type", tag="response.content_part.done"):
    """A part is whole."""

    part: OutputText | ReasoningText


class ItemDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    """An item is whole."""

    sequence_number: int
    output_index: int
    item: OutputItem


class Completed(_ResponseEvent, frozen=True, tag_field="type", tag="response.completed"):
    """The last event of a whole response."""


class Incomplete(_ResponseEvent, frozen=True, tag_field="type", tag="response.incomplete"):
    """The last event of a response that the token limit cut off."""


class Failed(_ResponseEvent, frozen=True, tag_field="type", tag="response.failed"):
    """The response failed."""


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """What went wrong: flat, as documented, and as OpenAI's error object, which clients raise as an exception."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None
    error: dict[str, str | None]


Event = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
    | ErrorEvent
)


def response_usage(usage: Usage) -> ResponseUsage:
    """The costs in the Responses API's terms."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )
