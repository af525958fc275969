"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's shapes around the chat path."""

import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import RequestBody
from server.api.encode import admitted, expanded_ids
from server.api.exchange import answer
from server.api.generate import Generation
from server.api.messages_errors import error_body, messages_error
from server.api.messages_prepare import COUNT_JOB, MESSAGES_JOB, PreparedMessages
from server.api.messages_schema import CountTokensBody, MessagesBody
from server.api.messages_stream import MessageStream
from server.api.messages_wire import Event, Ping, TokenCount
from server.api.middleware import request_id
from server.api.openapi import json_body
from server.api.places import Places
from server.api.service import Service
from server.api.sse import named_event
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

    job = MESSAGES_JOB

    def __init__(self, service: Service, identity: str) -> None:
        self.places = Places()
        self._request_id = identity
        self._stream = MessageStream(f"msg_{secrets.token_hex(12)}", service.settings.model_name)
        self._max_tokens = 0

    def begin(self, prepared: PreparedMessages) -> None:
        """Take what was made of the body."""
        self.places = prepared.places
        self._max_tokens = prepared.max_tokens

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

    async def count(service: Service, body: RequestBody) -> int:
        nonlocal places
        counted = await service.prepare(COUNT_JOB, body)
        places = counted.places
        return len(await expanded_ids(service, counted))

    try:
        num_tokens = await admitted(request, count)
        response = Response(msgspec.json.encode(TokenCount(num_tokens)), media_type="application/json")
    except M3Error as error:
        places.rename(error)
        response = messages_error(error, identity)
    response.headers[REQUEST_ID] = identity
    return response
