"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes: what a text, a conversation or ids are to the tokenizer."""

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import RequestBody
from server.api.chat_format import ChatFormat
from server.api.completions_text import spelled
from server.api.encode import admitted, expanded_ids
from server.api.openapi import json_body
from server.api.service import Service
from server.api.tokenize_prepare import DETOKENIZE_JOB, TOKENIZE_JOB, DetokenizeBody, TokenizeBody

router = APIRouter()


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`; the strings are null unless asked for, and pictures count as the engine gets them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


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


async def _tokenize(service: Service, body: RequestBody) -> bytes:
    shown = await service.prepare(TOKENIZE_JOB, body)
    return await service.in_thread(_tokenized, await expanded_ids(service, shown), shown.wants_strings, service)


def _tokenized(token_ids: list[int], wants_strings: bool, service: Service) -> bytes:
    chat_format: ChatFormat = service.chat_format
    strings = [spelled(chat_format.token_bytes(token_id)) for token_id in token_ids] if wants_strings else None
    return msgspec.json.encode(Tokenized(len(token_ids), service.max_model_len, token_ids, strings))


async def _detokenize(service: Service, body: RequestBody) -> bytes:
    return msgspec.json.encode(await service.prepare(DETOKENIZE_JOB, body))
