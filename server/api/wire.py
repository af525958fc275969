"""The JSON objects of a chat answer, in the order and spelling of OpenAI's API.

`msgspec` encodes them; a field that is `UNSET` is left out, one that is None is sent as null.
"""

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

# JSON has no infinity; OpenAI's own API sends this value for a token that cannot occur.
LOWEST_LOGPROB: Final = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position; `bytes` are the token's true bytes, also where they are no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token at a position and its best alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """One entry for every token whose first character is in the content it is sent with."""

    content: list[TokenLogprob]


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a call's function; the name comes whole, with the call's first chunk."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a call; `id` and `type` are there in its first chunk only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta = FunctionDelta()


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message: one kind of thing. `reasoning` is another name of `reasoning_content`."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one choice."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: the prompt once, the output summed over choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` is absent unless asked for; then it is null on all chunks but the last, or on none."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct, frozen=True):
    """A whole call's function; `arguments` is JSON, unless the token limit cut it off."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call."""

    id: str
    type: str = "function"
    function: FunctionCall


class Message(msgspec.Struct, frozen=True):
    """A whole reply. `content` is null when there is nothing but calls; `reasoning` is another name of `reasoning_content`."""

    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a place of the prompt; `rank` counts from 1 and is null for a token that is not among the best."""

    logprob: float
    rank: int | None
    decoded_token: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed.

    `prompt_logprobs` is absent unless asked for; its first entry is null, the others map token ids to a `PromptLogprob`. Each
    comes encoded, because all at once would hold up everything else.
    """

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[msgspec.Raw] | UnsetType = UNSET
