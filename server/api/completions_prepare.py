"""A body of the completions endpoint to a prepared request: prompts go to the engine as they are, without a template.

Client text never becomes a special token; a client that wants special tokens sends token ids.
"""

from typing import Final

import msgspec

from server.api.choice import ReplyRules
from server.api.completions_schema import MAX_SEQUENCES, CompletionBody
from server.api.output_format import requested_format
from server.api.prepare import Checker, Job, Prepared, fit, parse
from server.api.prompt import EncodedPrompt
from server.api.sampling import check_model, make_sampling, stop_strings
from server.api.validate import make_call
from server.errors import BadRequestError, ContextLengthError

# OpenAI's, when the client does not say.
DEFAULT_MAX_TOKENS: Final = 16


class CompletionPlan(msgspec.Struct, frozen=True):
    """What becomes of the answers.

    Attributes:
        num_choices: of each prompt.
        echo: begin every text with its prompt.
        hides_output: nothing was to be generated; the one token that the engine insists on is not shown.
        with_logprobs: say how likely every token was.
    """

    num_choices: int
    echo: bool
    hides_output: bool
    with_logprobs: bool


class PreparedCompletion(Prepared, frozen=True, kw_only=True):
    """A request, and what becomes of its answers."""

    plan: CompletionPlan


def prepare_completion(checker: Checker, raw: bytes) -> PreparedCompletion:
    """Parse, check and encode a body.

    Raises:
        NotFoundError: another model was asked for.
        ContextLengthError: a prompt does not fit.
        BadRequestError: everything else; `param` names the field.
    """
    body = parse(CompletionBody, raw)
    check_model(body.model, checker.limits)
    max_tokens = _check(body)
    prompts = _prompts(body, checker)
    num_choices = body.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise BadRequestError(f"prompts times n may be at most {MAX_SEQUENCES}", param="n")
    plan = CompletionPlan(num_choices, bool(body.echo), max_tokens == 0, body.logprobs is not None)
    num_tokens = max(max_tokens, 1)
    sampling = make_sampling(body, checker.limits, checker.chat_format, max_tokens=num_tokens, num_logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=body.logprobs)
    wanted = requested_format(body)
    if wanted is not None:
        sampling = msgspec.structs.replace(sampling, grammar=wanted.grammar)
    call = make_call(body, sampling, num_tokens, ReplyRules(stops=stop_strings(body)))
    if wanted is not None:
        call = msgspec.structs.replace(call, format_param=wanted.param)
    for number, prompt in enumerate(prompts):
        try:
            fit(call, len(prompt), checker.limits.max_model_len)
        except ContextLengthError as error:
            error.param = _place(body, number) if error.param == "messages" else error.param
            raise
    return PreparedCompletion(EncodedPrompt(prompts[0]), more_prompts=tuple(prompts[1:]), call=call, plan=plan)


COMPLETION_JOB: Final = Job("completion", prepare_completion, PreparedCompletion)


def _check(body: CompletionBody) -> int:
    """The number of tokens to generate, which may be 0 where the prompt is what the client is after."""
    if body.suffix not in (None, ""):
        raise BadRequestError("suffix is not supported", param="suffix", code="unsupported_value")
    if body.best_of not in (None, body.n or 1):
        raise BadRequestError("best_of is not supported beyond n", param="best_of", code="unsupported_value")
    if body.prompt_logprobs is not None:
        text = "prompt_logprobs is not supported here; use echo with logprobs"
        raise BadRequestError(text, param="prompt_logprobs", code="unsupported_value")
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0 and not body.echo:
        raise BadRequestError(f"{param} may be 0 only with echo", param=param)
    return DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens


def _place(body: CompletionBody, number: int) -> str:
    is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    return f"prompt[{number}]" if is_list else "prompt"


def _prompts(body: CompletionBody, checker: Checker) -> list[list[int]]:
    """The ids of every prompt.

    Raises:
        BadRequestError: a prompt is empty, or an id is not one that the model knows as text.
        ContextLengthError: a prompt does not fit.
    """
    given = body.prompt if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else [body.prompt]
    prompts: list[list[int]] = []
    for number, prompt in enumerate(given):
        try:
            token_ids = _encoded(prompt, checker)
        except BadRequestError as error:
            error.param = _place(body, number)
            raise
        prompts.append(token_ids)
    return prompts


def _encoded(prompt: object, checker: Checker) -> list[int]:
    chat_format, limits = checker.chat_format, checker.limits
    if isinstance(prompt, str):
        token_ids = chat_format.encode_text(prompt, limits.max_model_len - 1)
    else:
        assert isinstance(prompt, list)
        token_ids = prompt
        if not all(0 <= token_id < limits.vocab_size for token_id in token_ids):
            raise BadRequestError(f"a prompt's ids must be token ids below {limits.vocab_size}")
        if not chat_format.media_ids.isdisjoint(token_ids):
            raise BadRequestError("a prompt of token ids must not hold placeholders of pictures or clips")
    if not token_ids:
        raise BadRequestError("the prompt is empty")
    return token_ids
