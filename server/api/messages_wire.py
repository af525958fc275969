"""The JSON objects of an answer in Anthropic's shape, streamed and whole. `msgspec` encodes them, the type first."""

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from server.api.conversation import JsonObject
from server.api.wire import Usage

# Clients hand it back with the block and some insist on one. Nothing is sealed here: reasoning is sent and taken back as text.
SIGNATURE: Final = "bTMtc2VydmVy"


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: JsonObject


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputDetails(msgspec.Struct, frozen=True):
    """Generated tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of a request; those of the prompt that came from the cache are not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputDetails | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An answer; what is not known yet when a stream begins is null."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event: an answer without content."""

    message: Message


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Says that the connection is alive."""


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of reasoning, right before its block ends."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments; all of them joined are one JSON object."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """What a block gets."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class Stop(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """How the answer ended and what it cost, in total."""

    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str


class ErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error, as a body or as a stream's last event."""

    error: ErrorDetail
    request_id: str


class TokenCount(msgspec.Struct, frozen=True):
    """The answer to a request to count."""

    input_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    """The costs in Anthropic's terms."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
        output_tokens_details=OutputDetails(usage.completion_tokens_details.reasoning_tokens),
    )
