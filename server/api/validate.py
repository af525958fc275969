"""A well-formed body to a frozen call: defaults, ranges that need the model, and the fields that this version refuses.

After this nothing re-checks a value. What needs the prompt's length is checked in `generate.py`.
"""

import re
from typing import Final

import msgspec

from server.api.generation_config import GenerationDefaults
from server.api.schema import ChatBody
from server.errors import BadRequestError, NotFoundError
from server.messages import SamplingParams
from server.settings import ThinkingMode

TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")

NOT_YET: Final = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "echo",
    "continue_final_message",
    "chat_template",
    "documents",
    "audio",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
# Values of those fields that ask for nothing.
HARMLESS: Final[tuple[object, ...]] = (None, False, "", [], {}, "none", "auto", {"type": "text"})


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


class ChatCall(msgspec.Struct, frozen=True):
    """Everything about a request but its messages.

    Attributes:
        sampling: of every choice; `max_tokens` is the whole window when the client did not set it.
        max_tokens: what the client set.
        seed: of the first choice; the next ones count up from it.
        num_choices: sequences to generate.
        stops: strings that end the content.
        thinking_mode: what the template renders and the reply's parser starts with.
        stream, include_usage: the answer's form.
        priority: lower runs earlier.
    """

    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    num_choices: int
    stops: tuple[str, ...]
    thinking_mode: ThinkingMode
    stream: bool
    include_usage: bool
    priority: int


def make_call(body: ChatBody, limits: Limits, defaults: GenerationDefaults) -> ChatCall:
    """Check what pydantic cannot and fill in the defaults.

    Raises:
        NotFoundError: another model was asked for.
        BadRequestError: everything else; `param` names the field.
    """
    if body.model not in (None, "", limits.model_name):
        raise NotFoundError(f"this server serves {limits.model_name}", param="model", code="model_not_found")
    _refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatCall(
        sampling=_sampling(body, max_tokens, limits, defaults),
        max_tokens=max_tokens,
        seed=body.seed,
        num_choices=body.n or 1,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        thinking_mode=_thinking_mode(body) or limits.thinking_mode,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        priority=body.priority or 0,
    )


def _refuse_unsupported(body: ChatBody) -> None:
    for name in NOT_YET:
        if getattr(body, name) not in HARMLESS:
            raise BadRequestError(f"{name} is not supported yet", param=name, code="unsupported_value")


def _sampling(body: ChatBody, max_tokens: int | None, limits: Limits, defaults: GenerationDefaults) -> SamplingParams:
    min_tokens = body.min_tokens or 0
    if min_tokens > (limits.max_model_len if max_tokens is None else max_tokens):
        raise BadRequestError("min_tokens exceeds max_tokens", param="min_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    top_k = max(defaults.top_k if body.top_k is None else body.top_k, 0)
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
        stop_token_ids=_stop_token_ids(body, limits),
        min_tokens=min_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: ChatBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {}
    for key, bias in (body.logit_bias or {}).items():
        if not TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise BadRequestError(f"the keys of logit_bias must be token ids below {vocab_size}", param="logit_bias")
        biases[int(key)] = bias
    return tuple(biases.items())


def _stop_token_ids(body: ChatBody, limits: Limits) -> tuple[int, ...]:
    given = body.stop_token_ids or ()
    if not all(0 <= token_id < limits.vocab_size for token_id in given):
        raise BadRequestError(f"stop_token_ids must be token ids below {limits.vocab_size}", param="stop_token_ids")
    ends = () if body.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*ends, *given)))


def _thinking_mode(body: ChatBody) -> ThinkingMode | None:
    """What the client chose in any of the spellings in use, the template's own first; None for no choice."""
    kwargs = body.chat_template_kwargs
    if kwargs is not None and kwargs.thinking_mode is not None:
        return ThinkingMode(kwargs.thinking_mode)
    if kwargs is not None and kwargs.enable_thinking is not None:
        return ThinkingMode.ENABLED if kwargs.enable_thinking else ThinkingMode.DISABLED
    if body.thinking is not None:
        return ThinkingMode(body.thinking.type)
    if body.reasoning_effort is not None:
        return ThinkingMode.DISABLED if body.reasoning_effort == "none" else ThinkingMode.ENABLED
    return None
