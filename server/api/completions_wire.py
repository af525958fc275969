"""The JSON objects of the completions endpoint. An answer and a chunk of it have the same shape."""

import msgspec
from msgspec import UNSET, UnsetType

from server.api.wire import Usage


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token; the first token of a prompt has null for what is not known of it.

    Attributes:
        text_offset: where each token begins in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice, whole or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or one chunk of it. `usage` is as in the chat endpoint's chunks."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
