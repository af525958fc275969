"""The part of a request's body that every endpoint that generates has: how to sample, when to stop, what the text must match.

Numbers are strict: a bool is not an int, a string is not a number, NaN and Infinity are refused. Every list and string has a
bound, which holds before anything is made of it. Tags in angle brackets name the branches of a union; they are left out of the
paths that errors show.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

# Each choice is a sequence of its own in the engine; more belongs in separate requests, where admission sees it.
MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 16
# A stream holds back up to one stop string; a longer one would stall it and cost a scan of that length per token.
MAX_STOP_LEN: Final = 256
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 65_536
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_LEN: Final = 256
MAX_LOGPROBS: Final = 20
MAX_SALT_LEN: Final = 256
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1

Number = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
Bias = Annotated[Number, Field(ge=-100, le=100)]


class Body(BaseModel):
    """Base of all parts of a request body. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True, protected_namespaces=())


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format; `strict` changes nothing, the schema is always followed."""

    name: str | None = None
    description: str | None = None
    # Named so because pydantic's models have a `schema` of their own.
    json_schema: Annotated[JsonValue, Field(alias="schema")] = None


class ResponseFormat(Body):
    """OpenAI's field for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """An extension that other servers have too: exactly one of these."""

    json_text: Annotated[JsonValue, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(Body):
    """The common fields."""

    model: str | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LEN)]],
            Field(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LEN)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonValue = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
