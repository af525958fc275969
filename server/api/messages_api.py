"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's shapes around the chat path."""

import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.encode import ShownPrompt, admitted, chat_prompt, expanded_ids
from server.api.exchange import answer
from server.api.generate import Generation
from server.api.messages_errors import error_body, messages_error
from server.api.messages_schema import CountTokensBody, MessagesBody
from server.api.messages_stream import MessageStream
from server.api.messages_translate import chat_body
from server.api.messages_wire import Event, Ping, TokenCount
from server.api.middleware import request_id
from server.api.openapi import json_body
from server.api.places import Places
from server.api.prepare import Checker, Prepared, parse
from server.api.service import Service
from server.api.sse import named_event
from server.api.translated import parse_chat, prepare_translated
from server.errors import M3Error

router = APIRouter()

MESSAGES_BODY: Final = {"requestBody": json_body(MessagesBody)}
COUNT_BODY: Final = {"requestBody": json_body(CountTokensBody)}
# Where Anthropic's clients look for the id.
REQUEST_ID: Final = "request-id"


class MessagesForm:
    """One request in Anthropic's shapes.

    Attributes:
        places: where the parts of the chat body came from, once there is one.
    """

    def __init__(self, service: Service, identity: str) -> None:
        self.places = Places()
        self._service = service
        self._request_id = identity
        self._stream = MessageStream(f"msg_{secrets.token_hex(12)}", service.settings.model_name)
        self._max_tokens = 0

    def prepare(self, raw: bytes) -> Prepared:
        """Translate, check and encode the body."""
        body = parse(MessagesBody, raw)
        translation = chat_body(body)
        self.places = translation.places
        self._max_tokens = body.max_tokens
        # The limit is required, so clients send the most they would take, whatever the prompt leaves.
        return prepare_translated(self._service.checker, translation.body, ends_with_window=True)

    async def whole(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        async for _ in self._events(generation):
            pass
        return msgspec.json.encode(self._stream.message)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as events."""
        async for events in self._events(generation):
            if data := b"".join(named_event(str(event.__struct_config__.tag), event) for event in events):
                yield data

    def failed(self, error: M3Error) -> bytes:
        """The error as the last event."""
        self.places.rename(error)
        return named_event("error", error_body(error, self._request_id))

    async def _events(self, generation: Generation) -> AsyncIterator[Iterable[Event]]:
        yield self._stream.open(len(generation.prompts[0]))
        while not generation.finished:
            deltas = await generation.next()
            yield [event for delta in deltas for event in self._stream.push(delta)] if deltas else [Ping()]
        usage = generation.usage
        fills_window = usage.completion_tokens < self._max_tokens
        yield self._stream.close(usage, generation.stop_string, fills_window=fills_window)


@router.post("/v1/messages", openapi_extra=MESSAGES_BODY)
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's shape."""
    identity = request_id(request.scope)
    form = MessagesForm(request.app.state.service, identity)
    try:
        response = await answer(request, form)
    except M3Error as error:
        form.places.rename(error)
        response = messages_error(error, identity)
    response.headers[REQUEST_ID] = identity
    return response


@router.post("/v1/messages/count_tokens", openapi_extra=COUNT_BODY)
async def count_tokens(request: Request) -> Response:
    """The length of a prompt, pictures included, without running it."""
    identity = request_id(request.scope)
    places = Places()

    def prepare(checker: Checker, raw: bytes) -> ShownPrompt:
        nonlocal places
        translation = chat_body(parse(CountTokensBody, raw))
        places = translation.places
        return chat_prompt(checker, parse_chat(translation.body))

    async def count(service: Service, raw: bytes) -> int:
        return len(await expanded_ids(service, await service.in_thread(prepare, service.checker, raw)))

    try:
        num_tokens = await admitted(request, count)
        response = Response(msgspec.json.encode(TokenCount(num_tokens)), media_type="application/json")
    except M3Error as error:
        places.rename(error)
        response = messages_error(error, identity)
    response.headers[REQUEST_ID] = identity
    return response
