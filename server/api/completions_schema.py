"""The body of `POST /v1/completions`: the common fields, and a prompt that is text or token ids."""

from typing import Annotated, Any, Final

from pydantic import Discriminator, Field, Tag

from server.api.sampling_schema import MAX_LOGPROBS, SamplingBody

# Prompts times choices: each is a sequence of its own in the engine.
MAX_SEQUENCES: Final = 128
MAX_PROMPT_TOKENS: Final = 1 << 22

TokenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]


def _prompt_tag(value: object) -> str:
    if not isinstance(value, list):
        return "<string>"
    first = value[0] if value else None
    if isinstance(first, list):
        return "<token lists>"
    return "<strings>" if isinstance(first, str) or not value else "<tokens>"


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_SEQUENCES), Tag("<strings>")]
        | Annotated[TokenIds, Tag("<tokens>")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_SEQUENCES), Tag("<token lists>")],
        Discriminator(_prompt_tag),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: Any = None
