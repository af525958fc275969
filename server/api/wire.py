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


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
    """One event of a stream. `usage` is null on all but the last chunk of a stream that asked for it, else absent."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Message(msgspec.Struct, frozen=True):
    """A whole reply."""

    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
