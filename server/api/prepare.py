"""What becomes of a body before anything else happens: bytes to a checked call, an encoded prompt and undecoded pictures.

Everything here costs time in proportion to the body (JSON, base64, template, tokenizer), so it never runs on the event loop:
small bodies are prepared in a thread, large ones in a process of their own (`prepare_pool`). A `Job` is what both run. It
knows nothing but the body and the `Checker`, and its result can be sent.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from server.api.chat_format import ChatFormat
from server.api.completions_schema import MAX_PROMPT_TOKENS
from server.api.content import Conversation, MediaLimits, convert
from server.api.problems import from_validation
from server.api.prompt import EncodedPrompt
from server.api.sampling import Limits
from server.api.schema import ChatBody
from server.api.validate import Call, ChatCall, make_chat_call
from server.errors import ContextLengthError
from server.media.types import MediaSource
from server.messages import SamplingParams

B = TypeVar("B", bound=BaseModel)
R = TypeVar("R", bound=msgspec.Struct)


class Prompts(msgspec.Struct, frozen=True):
    """What every result of a job has that is as large as its body.

    Attributes:
        prompt: tokens with one placeholder per picture.
        sources: the pictures, in the order of their placeholders.
        more_prompts: prompts without pictures that are answered beside it, with choices of their own.
    """

    prompt: EncodedPrompt
    sources: tuple[MediaSource, ...] = ()
    more_prompts: tuple[list[int], ...] = ()


class Prepared(Prompts, frozen=True, kw_only=True):
    """A request before any media or engine work; what every endpoint makes out of its own body.

    Attributes:
        call: its parameters.
    """

    call: Call


class Checker(msgspec.Struct, frozen=True):
    """What requests are checked against; the same for all of them."""

    limits: Limits
    media_limits: MediaLimits
    chat_format: ChatFormat

    def encode(self, chat: ChatCall, conversation: Conversation) -> Prepared:
        """Render and tokenize a conversation, whatever kind of body it came in.

        Raises:
            BadRequestError: it cannot be rendered.
            ContextLengthError: it does not fit.
        """
        max_len = self.limits.max_model_len
        prompt = self.chat_format.encode_chat(
            conversation.messages, chat.tools.definitions, chat.thinking_mode, max_tokens=max_len - 1
        )
        # Pictures only add tokens: a text that is too long is refused before they are looked at.
        fit(chat.call, len(prompt.token_ids), max_len)
        return Prepared(prompt, tuple(conversation.sources[index] for index in prompt.media_order), call=chat.call)

    def show(self, body: ChatBody, *, add_generation_prompt: bool = True) -> Prompts:
        """The prompt of a chat that is not run, however much longer than the model's window it is.

        Raises:
            BadRequestError: it cannot be rendered.
        """
        chat = make_chat_call(body, self.limits, self.chat_format)
        conversation = convert(body.messages, self.media_limits)
        prompt = self.chat_format.encode_chat(
            conversation.messages,
            chat.tools.definitions,
            chat.thinking_mode,
            add_generation_prompt=add_generation_prompt,
            max_tokens=MAX_PROMPT_TOKENS,
        )
        return Prompts(prompt, tuple(conversation.sources[index] for index in prompt.media_order))


class Job(msgspec.Struct, Generic[R], frozen=True):
    """One way to prepare a body.

    Attributes:
        name: what a worker process finds it by.
        run: makes the result out of the body's bytes; raises an `M3Error`, the first fault only.
        result: the type of the result.
    """

    name: str
    run: Callable[[Checker, bytes], R]
    result: type[R]


def prepare_chat(checker: Checker, raw: bytes) -> Prepared:
    """Parse, check, render and tokenize the body of a chat request."""
    body = parse(ChatBody, raw)
    call = make_chat_call(body, checker.limits, checker.chat_format)
    return checker.encode(call, convert(body.messages, checker.media_limits))


CHAT_JOB: Final = Job("chat", prepare_chat, Prepared)


def parse(model: type[B], raw: bytes) -> B:
    """A body as its model.

    Raises:
        BadRequestError: the first fault in it.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def fit(call: Call, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """The call's parameters with the number of tokens that the prompt leaves.

    Raises:
        ContextLengthError: the prompt alone, or with the `max_tokens` that the client asked for, does not fit.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and the longest sequence is {max_model_len} tokens", param="messages"
        )
    if call.max_tokens is not None and call.max_tokens > num_left and not call.ends_with_window:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, so at most {num_left} of {max_model_len} are left"
            f" and {call.max_tokens} were asked for",
            param="max_tokens",
        )
    return msgspec.structs.replace(call.sampling, max_tokens=min(call.max_tokens or num_left, num_left))
