"""What `/tokenize` and `/detokenize` take, and what is made of it: a prompt that is shown, or a text."""

from typing import Annotated, Final

import msgspec
from pydantic import Discriminator, Field, RootModel, Tag

from server.api.completions_schema import MAX_PROMPT_TOKENS
from server.api.prepare import Checker, Job, Prompts, parse
from server.api.prompt import EncodedPrompt
from server.api.sampling import check_model
from server.api.sampling_schema import Body
from server.api.schema import ChatBody
from server.api.tokenizer import SpecialTokens
from server.errors import BadRequestError


class TextToTokenize(Body):
    """A text. There are no special tokens that could be added to it, and none comes out of it."""

    prompt: str
    model: str | None = None
    return_token_strs: bool | None = None


class ChatToTokenize(ChatBody):
    """A conversation with its tools, as the chat endpoint takes it."""

    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeBody(RootModel[object]):
    """`POST /tokenize`."""

    root: Annotated[
        Annotated[TextToTokenize, Tag("<text>")] | Annotated[ChatToTokenize, Tag("<chat>")],
        Discriminator(lambda value: "<chat>" if isinstance(value, dict) and "messages" in value else "<text>"),
    ]


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
    model: str | None = None


class ShownPrompt(Prompts, frozen=True, kw_only=True):
    """A prompt, and whether the text of each token was asked for."""

    wants_strings: bool


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`; special tokens are spelled out."""

    prompt: str


def prepare_tokenize(checker: Checker, raw: bytes) -> ShownPrompt:
    """The prompt of a text or of a conversation."""
    body = parse(TokenizeBody, raw).root
    assert isinstance(body, TextToTokenize | ChatToTokenize)
    check_model(body.model, checker.limits)
    wants_strings = body.return_token_strs is True
    if isinstance(body, TextToTokenize):
        prompt = EncodedPrompt(checker.chat_format.encode_text(body.prompt, MAX_PROMPT_TOKENS))
        return ShownPrompt(prompt, wants_strings=wants_strings)
    shown = checker.show(body, add_generation_prompt=body.add_generation_prompt is not False)
    return ShownPrompt(shown.prompt, shown.sources, wants_strings=wants_strings)


def prepare_detokenize(checker: Checker, raw: bytes) -> Detokenized:
    """The text of ids."""
    body = parse(DetokenizeBody, raw)
    check_model(body.model, checker.limits)
    vocab_size = checker.limits.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise BadRequestError(f"tokens must be token ids below {vocab_size}", param="tokens")
    detokenizer = checker.chat_format.detokenizer(SpecialTokens.ALL)
    return Detokenized(detokenizer.push(body.tokens) + detokenizer.flush())


TOKENIZE_JOB: Final = Job("tokenize", prepare_tokenize, ShownPrompt)
DETOKENIZE_JOB: Final = Job("detokenize", prepare_detokenize, Detokenized)
