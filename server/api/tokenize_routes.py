"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes: what a text, a conversation or ids are to the tokenizer."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, RootModel, Tag
from starlette.responses import Response

from server.api.chat_format import ChatFormat
from server.api.completions_schema import MAX_PROMPT_TOKENS
from server.api.completions_text import spelled
from server.api.encode import ShownPrompt, admitted, chat_prompt, expanded_ids
from server.api.openapi import json_body
from server.api.prepare import Checker, parse
from server.api.prompt import EncodedPrompt
from server.api.sampling import check_model
from server.api.sampling_schema import Body
from server.api.schema import ChatBody
from server.api.service import Service
from server.api.tokenizer import SpecialTokens
from server.errors import BadRequestError

router = APIRouter()


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


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`; the strings are null unless asked for, and pictures count as the engine gets them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`; special tokens are spelled out."""

    prompt: str


TOKENIZE_BODY: Final = {"requestBody": json_body(TokenizeBody)}
DETOKENIZE_BODY: Final = {"requestBody": json_body(DetokenizeBody)}


@router.post("/tokenize", openapi_extra=TOKENIZE_BODY)
async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation's prompt."""
    return Response(await admitted(request, _tokenize), media_type="application/json")


@router.post("/detokenize", openapi_extra=DETOKENIZE_BODY)
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    return Response(await admitted(request, _detokenize), media_type="application/json")


async def _tokenize(service: Service, raw: bytes) -> bytes:
    body, shown = await service.in_thread(_prepare, service.checker, raw)
    token_ids = await expanded_ids(service, shown)
    return await service.in_thread(_tokenized, token_ids, body.return_token_strs is True, service)


def _prepare(checker: Checker, raw: bytes) -> tuple[TextToTokenize | ChatToTokenize, ShownPrompt]:
    body = parse(TokenizeBody, raw).root
    check_model(body.model, checker.limits)
    if isinstance(body, ChatToTokenize):
        return body, chat_prompt(checker, body, add_generation_prompt=body.add_generation_prompt is not False)
    return body, ShownPrompt(EncodedPrompt(checker.chat_format.encode_text(body.prompt, MAX_PROMPT_TOKENS)))


def _tokenized(token_ids: list[int], wants_strings: bool, service: Service) -> bytes:
    chat_format: ChatFormat = service.chat_format
    strings = [spelled(chat_format.token_bytes(token_id)) for token_id in token_ids] if wants_strings else None
    return msgspec.json.encode(Tokenized(len(token_ids), service.max_model_len, token_ids, strings))


async def _detokenize(service: Service, raw: bytes) -> bytes:
    return await service.in_thread(_detokenized, service.checker, raw)


def _detokenized(checker: Checker, raw: bytes) -> bytes:
    body = parse(DetokenizeBody, raw)
    check_model(body.model, checker.limits)
    vocab_size = checker.limits.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise BadRequestError(f"tokens must be token ids below {vocab_size}", param="tokens")
    detokenizer = checker.chat_format.detokenizer(SpecialTokens.ALL)
    return msgspec.json.encode(Detokenized(detokenizer.push(body.tokens) + detokenizer.flush()))
