"""The thread's share of a request: bytes of the body to a checked call, an encoded prompt and undecoded pictures.

Everything here costs time in proportion to the body (JSON, base64, template, tokenizer), so it never runs on the event loop.
"""

from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from server.api.chat_format import ChatFormat
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


class Prepared(msgspec.Struct, frozen=True):
    """A request before any media or engine work; what every endpoint makes out of its own body.

    Attributes:
        call: its parameters.
        prompt: tokens with one placeholder per picture.
        sources: the pictures, in the order of their placeholders.
        more_prompts: prompts without pictures that are answered beside it, with choices of their own.
    """

    call: Call
    prompt: EncodedPrompt
    sources: tuple[MediaSource, ...] = ()
    more_prompts: tuple[list[int], ...] = ()


class Checker(msgspec.Struct, frozen=True):
    """What requests are checked against; the same for all of them."""

    limits: Limits
    media_limits: MediaLimits
    chat_format: ChatFormat

    def prepare_chat(self, raw: bytes) -> Prepared:
        """Parse, check, render and tokenize the body of a chat request.

        Raises:
            M3Error: whatever is wrong with the request, the first fault only.
        """
        body = parse(ChatBody, raw)
        call = make_chat_call(body, self.limits, self.chat_format)
        return self.encode(call, convert(body.messages, self.media_limits))

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
        return Prepared(chat.call, prompt, tuple(conversation.sources[index] for index in prompt.media_order))


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
