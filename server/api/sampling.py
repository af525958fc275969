"""The common fields of a body to the engine's parameters: defaults, and ranges that need the model.

Encodes the bad words, so it runs off the event loop. After this nothing re-checks a value.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from server.api.chat_format import ChatFormat
from server.api.sampling_schema import SamplingBody
from server.errors import BadRequestError, NotFoundError
from server.messages import SamplingParams
from server.settings import ThinkingMode

TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")


class Limits(msgspec.Struct, frozen=True):
    """What the model and its end-of-turn tokens allow.

    Attributes:
        model_name: the served name.
        max_model_len: longest sequence in tokens.
        vocab_size: width of the logits; ids at or above it cannot be sampled, whatever the tokenizer knows.
        eos_token_ids: ids that end a turn.
        thinking_mode: when the request does not choose.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    thinking_mode: ThinkingMode


def check_model(name: str | None, limits: Limits) -> None:
    """Raise `NotFoundError` when a request names another model."""
    if name not in (None, "", limits.model_name):
        raise NotFoundError(f"this server serves {limits.model_name}", param="model", code="model_not_found")


def make_sampling(
    body: SamplingBody,
    limits: Limits,
    chat_format: ChatFormat,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> SamplingParams:
    """How to sample every choice, without a grammar.

    Args:
        body: its common fields are read.
        limits: of the model.
        chat_format: for the checkpoint's defaults and for the tokens of bad words.
        max_tokens: what the client set, in whatever field; the whole window when it did not.
        num_logprobs: as in `SamplingParams`.

    Raises:
        BadRequestError: `param` names the field.
    """
    defaults = chat_format.defaults
    min_tokens = body.min_tokens or 0
    if min_tokens > (limits.max_model_len if max_tokens is None else max_tokens):
        raise BadRequestError("min_tokens exceeds max_tokens", param="min_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    top_k = max(defaults.top_k if body.top_k is None else body.top_k, 0)
    ends = () if body.ignore_eos else limits.eos_token_ids
    given = _token_ids(body.stop_token_ids, "stop_token_ids", limits.vocab_size)
    return SamplingParams(
        max_tokens=limits.max_model_len if max_tokens is None else min(max_tokens, limits.max_model_len),
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=top_k if top_k < limits.vocab_size else 0,
        min_p=_given(body.min_p, 0.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        seed=body.seed,
        logit_bias=_logit_bias(body, limits.vocab_size),
        stop_token_ids=tuple(dict.fromkeys((*ends, *given))),
        min_tokens=min_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        allowed_token_ids=_token_ids(body.allowed_token_ids, "allowed_token_ids", limits.vocab_size),
        bad_words=_bad_words(body, limits.vocab_size, chat_format),
    )


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """The strings that end the content."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: SamplingBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {}
    for key, bias in (body.logit_bias or {}).items():
        if not TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise BadRequestError(f"the keys of logit_bias must be token ids below {vocab_size}", param="logit_bias")
        biases[int(key)] = bias
    return tuple(biases.items())


def _token_ids(given: Sequence[int] | None, param: str, vocab_size: int) -> tuple[int, ...]:
    if not all(0 <= token_id < vocab_size for token_id in given or ()):
        raise BadRequestError(f"{param} must be token ids below {vocab_size}", param=param)
    return tuple(dict.fromkeys(given or ()))


def _bad_words(body: SamplingBody, vocab_size: int, chat_format: ChatFormat) -> tuple[tuple[int, ...], ...]:
    """The tokens of every word, as it is spelled at the start of a text and behind a blank."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(body.bad_words or ()):
        for spelled in (word, " " + word.lstrip()):
            token_ids = tuple(chat_format.encode_text(spelled))
            if any(token_id >= vocab_size for token_id in token_ids):
                raise BadRequestError("the word has tokens that the model cannot say", param=f"bad_words[{index}]")
            if token_ids:
                found[token_ids] = None
    return tuple(found)
