"""A well-formed chat body to a frozen call: the fields that only chat has, and those that are refused.

After this nothing re-checks a value. What needs the prompt's length is checked in `prepare.py`.
"""

from typing import Final

import msgspec

from server.api.chat_format import ChatFormat
from server.api.choice import ReplyRules
from server.api.output_format import OutputFormat, reply_format, requested_format
from server.api.sampling import Limits, check_model, make_sampling, stop_strings
from server.api.sampling_schema import SamplingBody
from server.api.schema import ChatBody
from server.api.tools import CallMode, ToolUse, requested_tools
from server.errors import BadRequestError
from server.messages import SamplingParams
from server.settings import ThinkingMode

# Refused with a reason of their own; a value that asks for nothing is fine.
REFUSED: Final = {
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "echo": "echo is not supported for chats",
    "continue_final_message": "continue_final_message is not supported",
    "chat_template": "a request cannot bring a chat template",
    "documents": "documents is not supported; put them into a message",
    "audio": "audio is not supported",
    "mm_processor_kwargs": "mm_processor_kwargs is not supported; options of a picture belong into its image_url",
    "media_io_kwargs": "media_io_kwargs is not supported",
}
HARMLESS: Final[tuple[object, ...]] = (None, False, "", [], {}, "none", "auto")


class StreamForm(msgspec.Struct, frozen=True):
    """How an answer is sent.

    Attributes:
        stream: as events.
        include_usage: the last event tells what the request cost.
        continuous_usage: so does every other event.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class Call(msgspec.Struct, frozen=True):
    """Everything about a request but its prompt.

    Attributes:
        sampling: of every choice; `max_tokens` is the whole window when the client did not set it.
        rules: what the replies are made into.
        max_tokens: what the client set.
        ends_with_window: a `max_tokens` beyond the window's end means its end; otherwise it is an error.
        seed: of a prompt's first choice; the next ones count up from it.
        num_choices: sequences to generate for each prompt.
        priority: lower runs earlier.
        cache_salt: separates prefix-cache tenants.
        format_param: the field that the grammar in `sampling` came from.
        form: how the answer is sent.
    """

    sampling: SamplingParams
    rules: ReplyRules
    max_tokens: int | None = None
    ends_with_window: bool = False
    seed: int | None = None
    num_choices: int = 1
    priority: int = 0
    cache_salt: bytes = b""
    format_param: str = ""
    form: StreamForm = StreamForm()


class ChatCall(msgspec.Struct, frozen=True):
    """A chat request without its messages: the call, the mode that the template renders, and the tools that it shows."""

    call: Call
    thinking_mode: ThinkingMode
    tools: ToolUse


def make_chat_call(body: ChatBody, limits: Limits, chat_format: ChatFormat) -> ChatCall:
    """Check what pydantic cannot and fill in the defaults.

    Raises:
        NotFoundError: another model was asked for.
        BadRequestError: everything else; `param` names the field.
    """
    check_model(body.model, limits)
    for name, reason in REFUSED.items():
        if getattr(body, name) not in HARMLESS:
            raise BadRequestError(reason, param=name, code="unsupported_value")
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    mode = _thinking_mode(body) or limits.thinking_mode
    tools = requested_tools(body)
    wanted = requested_format(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = make_sampling(body, limits, chat_format, max_tokens=max_tokens, num_logprobs=num_logprobs)
    call = make_call(body, sampling, max_tokens, ReplyRules(thinking_mode=mode, stops=stop_strings(body)))
    return ChatCall(shape_reply(call, mode, tools, wanted, chat_format), mode, tools)


def make_call(body: SamplingBody, sampling: SamplingParams, max_tokens: int | None, rules: ReplyRules) -> Call:
    """A call from the common fields of a body.

    Args:
        body: what the client sent.
        sampling: made from it.
        max_tokens: what the client set, in whatever field.
        rules: the thinking mode and the stop strings; options of the text are filled in here.

    Raises:
        BadRequestError: stream options without a stream.
    """
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options")
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    continuous_usage = include_usage and bool(body.stream_options and body.stream_options.continuous_usage_stats)
    return Call(
        sampling=sampling,
        rules=msgspec.structs.replace(
            rules, keeps_stop=bool(body.include_stop_str_in_output), shows_special=body.skip_special_tokens is False
        ),
        max_tokens=max_tokens,
        seed=body.seed,
        num_choices=body.n or 1,
        priority=body.priority or 0,
        cache_salt=(body.cache_salt or "").encode(),
        form=StreamForm(bool(body.stream), include_usage, continuous_usage),
    )


def shape_reply(call: Call, mode: ThinkingMode, tools: ToolUse, wanted: OutputFormat | None, chat_format: ChatFormat) -> Call:
    """The call with what its replies must match, and with the calls that are read from them.

    Args:
        call: without either.
        mode: what the prompt is rendered with; a format holds behind the reasoning.
        tools: the request's functions.
        wanted: the structured output that was asked for.
        chat_format: knows the markers.

    Raises:
        BadRequestError: tools and format cannot be combined.
    """
    sampling = call.sampling
    if tools.definitions and tools.mode is CallMode.NONE:
        # The prompt teaches the format of calls; without this token none can be written.
        sampling = msgspec.structs.replace(sampling, bad_words=(*sampling.bad_words, (chat_format.markers.namespace,)))
    found = reply_format(wanted, tools, chat_format)
    if found is not None:
        sampling = msgspec.structs.replace(sampling, grammar=found.grammar, thinking=chat_format.thinking(mode))
    rules = msgspec.structs.replace(call.rules, schemas=tools.schemas, max_calls=tools.max_calls)
    param = "" if found is None else found.param
    return msgspec.structs.replace(call, sampling=sampling, rules=rules, format_param=param)


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
