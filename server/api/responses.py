"""`POST /v1/responses`: OpenAI's Responses API around the chat path. Nothing is kept: every request brings its conversation."""

import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.exchange import answer
from server.api.generate import Generation
from server.api.openapi import json_body
from server.api.places import Places
from server.api.responses_prepare import RESPONSE_JOB, PreparedResponse
from server.api.responses_schema import ResponsesBody
from server.api.responses_stream import ResponseStream
from server.api.responses_wire import Event
from server.api.service import Service
from server.api.sse import HEARTBEAT, named_event
from server.errors import M3Error

router = APIRouter()

REQUEST_BODY: Final = {"requestBody": json_body(ResponsesBody)}


class ResponsesForm:
    """One request in the Responses API's shapes.

    Attributes:
        places: where the parts of the chat body came from, once there is one.
    """

    job = RESPONSE_JOB

    def __init__(self, service: Service) -> None:
        self.places = Places()
        self._service = service
        self._stream: ResponseStream | None = None

    def begin(self, prepared: PreparedResponse) -> None:
        """Take what was made of the body."""
        self.places = prepared.places
        model = self._service.settings.model_name
        self._stream = ResponseStream(f"resp_{secrets.token_hex(12)}", int(time.time()), model, prepared.echo)

    async def whole(self, generation: Generation) -> bytes:
        """The whole response as JSON."""
        stream = self._prepared()
        async for _ in self._events(stream, generation):
            pass
        return msgspec.json.encode(stream.response)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The response as events."""
        async for events in self._events(self._prepared(), generation):
            yield encode_events(events) or HEARTBEAT

    def failed(self, error: M3Error) -> bytes:
        """The events of a response that breaks off."""
        self.places.rename(error)
        return encode_events(self._prepared().fail(error))

    def _prepared(self) -> ResponseStream:
        assert self._stream is not None
        return self._stream

    async def _events(self, stream: ResponseStream, generation: Generation) -> AsyncIterator[Iterable[Event]]:
        yield stream.open()
        while not generation.finished:
            yield [event for delta in await generation.next() for event in stream.push(delta)]
        yield stream.close(generation.usage)


def encode_events(events: Iterable[Event]) -> bytes:
    """The events as they are sent, each under the name of its type."""
    return b"".join(named_event(str(event.__struct_config__.tag), event) for event in events)


@router.post("/v1/responses", openapi_extra=REQUEST_BODY)
async def create_response(request: Request) -> Response:
    """Answer a conversation in the Responses API's shape."""
    form = ResponsesForm(request.app.state.service)
    try:
        return await answer(request, form)
    except M3Error as error:
        form.places.rename(error)
        raise
