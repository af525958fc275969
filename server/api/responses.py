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
from server.api.prepare import Prepared, parse
from server.api.responses_schema import ResponsesBody, TextFormat
from server.api.responses_stream import ResponseStream
from server.api.responses_translate import chat_body
from server.api.responses_wire import Echo, Event
from server.api.service import Service
from server.api.sse import HEARTBEAT, named_event
from server.api.translated import prepare_translated
from server.api.validate import Call
from server.errors import M3Error

router = APIRouter()

REQUEST_BODY: Final = {"requestBody": json_body(ResponsesBody)}


class ResponsesForm:
    """One request in the Responses API's shapes.

    Attributes:
        places: where the parts of the chat body came from, once there is one.
    """

    def __init__(self, service: Service) -> None:
        self.places = Places()
        self._service = service
        self._stream: ResponseStream | None = None

    def prepare(self, raw: bytes) -> Prepared:
        """Translate, check and encode the body."""
        body = parse(ResponsesBody, raw)
        translation = chat_body(body)
        self.places = translation.places
        prepared = prepare_translated(self._service.checker, translation.body)
        self._stream = ResponseStream(
            f"resp_{secrets.token_hex(12)}",
            int(time.time()),
            self._service.settings.model_name,
            echo(body, prepared.call),
        )
        return prepared

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


def echo(body: ResponsesBody, call: Call) -> Echo:
    """What the response repeats of its request."""
    text_format = body.text.format if body.text is not None and body.text.format is not None else TextFormat(type="text")
    choice = body.tool_choice or "auto"
    return Echo(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        temperature=call.sampling.temperature,
        text={"format": text_format.model_dump(by_alias=True, exclude_none=True)},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=list(body.tools or ()),
        top_logprobs=body.top_logprobs or 0,
        top_p=call.sampling.top_p,
        user=body.user,
    )


@router.post("/v1/responses", openapi_extra=REQUEST_BODY)
async def create_response(request: Request) -> Response:
    """Answer a conversation in the Responses API's shape."""
    form = ResponsesForm(request.app.state.service)
    try:
        return await answer(request, form)
    except M3Error as error:
        form.places.rename(error)
        raise
